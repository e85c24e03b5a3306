// Package chaos drives the real daemon through minutes of a hostile node, with a seed:
// drivers, the kubelet and the daemon start, stop, hang, lie and are killed, files are
// removed and replaced, the configuration changes, all at random. All the time, and once
// more after it has settled, it is checked that nothing of anybody else's was removed, that no
// registration went away without a cause, and that nothing was leaked.
//
// One generator makes all decisions (plan.go), from the seed alone, so that a seed that
// failed makes the same decisions again: CHAOS_SEED=… make chaos. README.md has the rest.
package chaos
