// Package tool is the wing for the commands that explain, import and record: they help an
// administrator, and the daemon runs without them. They run as root and outside of the daemon's
// sandbox, so everything that the daemon or a driver reports is untrusted text for them: no path,
// unit or process is used before it was compared with the configuration and checked by package
// trust. The wing imports sys, node and core; package cli calls it.
//
// Begin with doctor/report.go, which lists the findings of doctor in the order of cause and effect.
package tool
