// Package core is the wing that keeps drivers registered. It imports sys and node.
//
// Begin with registrar/decide.go: what happens next is a pure function of what is known about the
// driver (package driver) and about the registration socket (package regsocket). A registrar runs
// for each driver, and agent compares the running registrars with the configuration. control serves
// the state to commands, probes and Prometheus; sidecar is what is needed in place of
// node-driver-registrar. ARCHITECTURE.md has the states and the table of decisions.
package core
