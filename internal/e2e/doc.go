// Package e2e holds csi-registrar's built binary against the kubelet's own code: its tests
// run a daemon, drivers and kubelets (see harness and kubelet) and say what must be seen
// on both sides. `go test ./...` runs them; -long takes the spans of time that the
// contract names where the short run takes a shorter one.
package e2e
