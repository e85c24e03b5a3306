# csi-registrar. `make help` lists the targets.

GO      ?= go
DESTDIR ?=

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## build bin/csi-registrar and bin/csi-sample-driver, as they are packaged
	scripts/build

.PHONY: demo
demo: build ## show what it does, on this machine, without a cluster or root
	CGO_ENABLED=0 $(GO) run -trimpath -tags grpcnotrace,nethttpomithttp2 ./cmd/demo bin

.PHONY: test
test: ## for every change: checks and unit tests; needs only Go, at most 3 minutes
	scripts/test quick

.PHONY: test-all
test-all: test ## what CI runs; it names the suites that this machine cannot run; 10 minutes, root
	scripts/test all

.PHONY: test-nightly
test-nightly: ## everything else; root, hours
	scripts/test nightly

.PHONY: test-unit
test-unit: ## the main module alone, with the race detector
	scripts/test unit

.PHONY: check
check: ## format, go vet, staticcheck, tidy modules, man pages
	scripts/test check

.PHONY: chaos
chaos: ## random faults on a node: CHAOS_SEED=N|fresh CHAOS_DRIVERS=50 CHAOS_DURATION=10m
	cd internal/test/e2e && $(GO) test -count=1 -v -timeout 0 -run TestChaos ./chaos

.PHONY: fuzz
fuzz: ## every fuzz target for FUZZTIME (20s)
	scripts/fuzz $(FUZZTIME)

.PHONY: corpus-test
corpus-test: ## import every manifest below DIR and print what came out: DIR=DIRECTORY
	CORPUS='$(abspath $(DIR))' scripts/test corpus

.PHONY: vulncheck
vulncheck: ## look for known vulnerabilities in the database GOVULNDB=https://…|file:///…
	GOVULNDB='$(or $(DB),$(GOVULNDB))' scripts/vulncheck

.PHONY: bench
bench: build ## measure latency, memory and idling; BENCH='--quick', BENCH='--peer "CMD {socket} {registry}"'
	$(GO) run ./internal/test/bench $(BENCH)

.PHONY: packages
packages: ## build deb and rpm in dist/ (ARCHS=amd64,arm64,armhf,ppc64el,s390x,riscv64)
	scripts/packages

.PHONY: sysext
sysext: ## build a system extension image in dist/, for images with a read-only /usr
	scripts/sysext

.PHONY: repository
repository: ## add dist/ to a signed apt and rpm repository: KEY=GPG-KEY BASE_URL=URL [REPOSITORY=DIR]
	scripts/repository $(REPOSITORY)

.PHONY: install
install: build ## install everything below DESTDIR, like the packages; then run systemctl
	STAGE_LEGAL=yes scripts/stage '$(DESTDIR)' bin/csi-registrar

.PHONY: node-test
node-test: ## whole nodes at length: each suite of Debian, more power cuts, each kind of node
	LONG=yes scripts/test node

.PHONY: cluster-test
cluster-test: ## a real kubelet and scheduler: restarts under new pods; root, nightly
	scripts/test cluster

.PHONY: storage-test
storage-test: ## Kubernetes' own storage tests against the sample driver; root, 15 minutes, nightly
	scripts/test storage

.PHONY: arm64-test
arm64-test: ## the demo and the unit tests on arm64, under qemu; nightly
	scripts/test arm64

.PHONY: vm-test
vm-test: ## power cuts, SELinux and a whole node, in a virtual machine; root, half an hour, nightly
	scripts/test vm

.PHONY: kubelets-test
kubelets-test: ## the registration tests with other kubelets; nightly; KUBELET_VERSIONS="1.38.0" says which
	scripts/test kubelets

.PHONY: newsystem-test
newsystem-test: ## the units on the newest systemd, that of Debian testing; root, nightly
	scripts/test newsystem

.PHONY: clean
clean: ## remove what was built
	rm -rf bin dist release repository
