// Package e2e tests csi-registrar's built binary with the kubelet's own code: its tests run a
// daemon, drivers and kubelets (see harness and kubelet) and check what both sides see.
//
//	go test ./...          about a minute, after some minutes of compiling Kubernetes once
//	go test . -long        with the documented times, where the first one waits for a shorter time
//	CSI_REGISTRAR_BIN=…    tests that binary instead of building one
//
// They need root, and are skipped without it; under CI=true that is a failure. Module oldkubelet
// has such tests with an older kubelet, package node has whole nodes with a real kubelet.
package e2e
