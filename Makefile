# csi-registrar. `make help` lists what there is to do.

GO      ?= go
DESTDIR ?=
VERSION ?= $(shell scripts/version)
LDFLAGS  = -s -w -X csi-registrar/internal/cli.buildVersion=$(VERSION)
# grpcnotrace leaves out golang.org/x/net/trace, whose html/template keeps the linker from
# dropping unused methods: 2.5 MB. nethttpomithttp2 leaves out the HTTP/2 of net/http, which
# the control socket does not need (gRPC has its own): 0.3 MB.
TAGS     = grpcnotrace,nethttpomithttp2

# Without inlining: 0.9 MB less to keep in memory on every node, for a daemon that is idle.
GCFLAGS  = all=-l

# The daemon is one static binary.
export CGO_ENABLED = 0

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## build bin/csi-registrar
	$(GO) build -trimpath -tags $(TAGS) -gcflags=$(GCFLAGS) -ldflags '$(LDFLAGS)' -o bin/csi-registrar ./cmd/csi-registrar

.PHONY: demo
demo: build ## tell the whole story on this machine: no cluster, no root
	bin/csi-registrar demo

.PHONY: test
test: build ## everything that this machine can run; what it cannot is named
	scripts/test all

.PHONY: test-unit
test-unit: ## the main module alone, with the race detector
	scripts/test unit

.PHONY: check
check: ## gofmt, go vet, staticcheck
	scripts/test check

.PHONY: chaos
chaos: build ## a hostile node at random: CHAOS_SEED=N|fresh CHAOS_DRIVERS=50 CHAOS_DURATION=10m
	cd internal/e2e/chaos && CSI_REGISTRAR_BIN=$(CURDIR)/bin/csi-registrar $(GO) test -count=1 -v -timeout 0 -run TestChaos .

.PHONY: fuzz
fuzz: ## every fuzz target for FUZZTIME (20s)
	scripts/fuzz $(FUZZTIME)

.PHONY: bench
bench: build ## measure latency, memory and quiet; BENCH='--quick', BENCH='--peer "CMD {socket} {registry}"'
	$(GO) run ./internal/bench --bin bin/csi-registrar $(BENCH)

.PHONY: allocs
allocs: ## what the paths inside allocate, beside the last release's figures; KEEP=1 writes them down
	scripts/test allocs

.PHONY: packages
packages: ## build deb and rpm in dist/ (ARCHS=amd64,arm64,armhf,ppc64el,s390x,riscv64)
	scripts/packages

.PHONY: sysext
sysext: ## build a system extension image in dist/, for images with a read-only /usr
	scripts/sysext

.PHONY: install
install: build ## install everything below DESTDIR, as the packages do; then run systemctl
	STAGE_LEGAL=yes scripts/stage '$(DESTDIR)' bin/csi-registrar

.PHONY: cluster-test
cluster-test: build ## a real kubelet, API server and etcd; root, compiles for minutes, not in CI
	cd internal/e2e/cluster && CSI_REGISTRAR_BIN=$(CURDIR)/bin/csi-registrar $(GO) test -count=1 -timeout 30m ./...

.PHONY: clean
clean: ## remove what was built
	rm -rf bin dist
