package registrar

import (
	"context"

	"csi-registrar/internal/status"
)

// Driver is the CSI driver as a registrar needs it (satisfied by driver.Client).
type Driver interface {
	// Ask finds out how the driver is. It uses the connection that it keeps, or makes one,
	// and asks only what may have changed: nothing, if the connection and what is at the
	// path are as they were at the last Ready report. It returns when there is an answer or
	// ctx is done, and calls progress while a call of it takes long. At most one Ask runs at
	// a time, and while it runs it is the one that receives from Hints.
	Ask(ctx context.Context, progress func(status.Report)) status.Report
	// Hints receives when it is worth asking again. Capacity one: a hint has no payload.
	Hints() <-chan struct{}
	// Close ends the kept connection and the hints. No Ask may be running.
	Close() error
}

// Socket is the driver's registration socket (satisfied by kubelet.Socket). All methods but
// Look and Hints may wait, for a limited time; they are called one at a time.
type Socket interface {
	// Look returns what is known, from memory.
	Look() status.Socket
	// Check looks at the path, for Look.
	Check(ctx context.Context) error
	// Publish puts a new socket in place that tells the announcement, instead of the one
	// we had, if any. An error that has the method Conflict() bool returning true means
	// that somebody else has the path or the name.
	Publish(ctx context.Context, a status.Announcement) error
	// Withdraw takes the socket away: the path if it is ours, then the listener and its
	// place in the descriptor store.
	Withdraw(ctx context.Context) error
	// Acknowledge notes an announcement that the kubelet need not be told: it has learned the
	// identity from the driver itself, or only the target of the link is another.
	Acknowledge(ctx context.Context, a status.Announcement) error
	// Hints receives when Check may find something else, or the kubelet called.
	Hints() <-chan struct{}
}
