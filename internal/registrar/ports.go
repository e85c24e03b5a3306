package registrar

import (
	"context"

	"csi-registrar/internal/status"
)

// Driver is the CSI driver as a registrar needs it (satisfied by driver.Client).
type Driver interface {
	// Ask finds out how the driver is: it connects, or uses the connection that it
	// keeps, and asks. It returns when that is known or ctx is done; at most one Ask runs
	// at a time. While the last Ready report holds, it is returned again at the cost of a
	// look. progress is called when the driver takes long; it must not block.
	Ask(ctx context.Context, progress func(status.Report)) status.Report
	// Hints receives when it is worth asking. Capacity one: a hint is never lost, many are
	// one. Nobody else may receive from it while Ask runs.
	Hints() <-chan struct{}
	// Close ends the kept connection and the hints. No Ask may be running.
	Close() error
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
