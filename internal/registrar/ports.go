package registrar

import (
	"context"

	"csi-registrar/internal/status"
)

// Driver is the CSI driver as a registrar needs it (satisfied by driver.Client).
type Driver interface {
	// Ask finds out how the driver is: it connects, or uses the connection that it
	// keeps, and asks. It returns when there is a verdict or ctx is done; at most one
	// Ask runs at a time.
	Ask(ctx context.Context) status.Report
	// Stale tells, without asking the driver, that the last Ready report may no longer
	// hold: the connection broke, or another socket is at the path. Cheap: one stat.
	Stale() bool
	// Hints receives when it is worth looking again. Capacity one: a hint is never lost,
	// many are one.
	Hints() <-chan struct{}
	// Close ends the kept connection and the hints. No Ask may be running.
	Close() error
}

// Replacer is what a Driver may be, too (driver.Client is).
type Replacer interface {
	// Replaced tells, after an Ask that was Ready, that the driver's socket is another file
	// than at the Ready before. No Ask may be running.
	Replaced() bool
}

// Socket is the driver's registration socket (satisfied by kubelet.Socket). Its methods
// are called one at a time, except Look, which may be called at any time.
type Socket interface {
	// Look tells what is at the path and what the kubelet said. Cheap: one lstat.
	Look() status.Socket
	// Publish puts a new socket in place that tells the announcement, instead of the one
	// we had, if any. An error that has the method Conflict() bool returning true means
	// that somebody else holds the path or the name.
	Publish(ctx context.Context, a status.Announcement) error
	// Withdraw takes the socket away: the path if it is ours, then the listener and its
	// place in the descriptor store.
	Withdraw(ctx context.Context) error
	// Hints receives when it is worth looking again: the path changed or the kubelet
	// called. Capacity one.
	Hints() <-chan struct{}
}
