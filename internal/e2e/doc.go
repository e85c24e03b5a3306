// Package e2e holds csi-registrar's built binary against the kubelet's own code: its tests
// run a daemon, drivers and kubelets (see harness and kubelet) and say what must be seen
// on both sides.
//
//	go test ./...          about a minute, after some minutes of compiling Kubernetes once
//	go test . -long        waits as long as the contract says where that run waits shorter
//	CSI_REGISTRAR_BIN=…    tests that binary instead of building one
//
// They need root, and are skipped without; under CI=true that is a failure. Module
// oldkubelet has the same with an older kubelet; package node has whole nodes with the real one.
package e2e
