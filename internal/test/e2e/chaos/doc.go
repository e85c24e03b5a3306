// Package chaos runs the real daemon on a node with random faults: drivers, the kubelet and the
// daemon start, stop, hang, give wrong answers and are killed, files are removed and replaced, and
// the configuration changes. During the faults, and again after the node has settled, it checks
// that nobody else's file was removed, that no registration was lost without a cause, and that
// nothing was leaked.
//
// All decisions come from one generator (plan.go) and depend only on the seed, so that a failed
// seed can be repeated: CHAOS_SEED=… make chaos. README.md has the details.
package chaos
