package registrar

import (
	"context"

	"csi-registrar/internal/node/status"
)

// Driver is a CSI driver (implemented by driver.Client).
type Driver interface {
	// Ask returns the state of the driver. While the connection of the last Ready report is
	// good and the same socket is at the path, it returns that report again without a call.
	// It returns when the state is known or ctx is done. At most one of Ask, Probe and
	// AskAfterHint may run at a time; it receives from Hints while it runs. It calls progress
	// while the driver takes long to answer, and continues when progress returns: progress may
	// wait for its receiver.
	Ask(ctx context.Context, progress func(status.Report)) status.Report
	// Probe is Ask, but calls Probe if Ask would return the last Ready report without a call. If
	// that call is not answered, Ask calls Probe, too, until it is answered.
	Probe(ctx context.Context) status.Report
	// AskAfterHint is Ask after a hint: if a driver that is not ready answered the last Ask, and
	// its connection and its socket are the same, it returns that report again without a call,
	// with Repeated. NodeGetInfo may be expensive for the driver.
	AskAfterHint(ctx context.Context, progress func(status.Report)) status.Report
	// Hints receives when AskAfterHint may return something else. Capacity one: a hint has no
	// payload.
	Hints() <-chan struct{}
	// Close closes the connection and ends the hints. None of the above may be running.
	Close()
}

// Socket is the registration socket of a driver (implemented by kubelet.Socket). All methods but
// Look and Hints may block for a limited time; they are called one at a time.
type Socket interface {
	// Look returns the state of the socket from memory.
	Look() status.Socket
	// Check examines the path and updates what Look returns. After an error Look returns what
	// was found before.
	Check(ctx context.Context) error
	// Publish puts a new socket in place that reports the announcement, and replaces the
	// current one, if any. An error with a method Conflict() bool that returns true means
	// that another registrar has the path or the name.
	Publish(ctx context.Context, a status.Announcement) error
	// Withdraw removes the path if it is ours, then the listener and its entry in the
	// descriptor store. Without a published socket it does nothing. If the path cannot be
	// removed, everything stays as it is.
	Withdraw(ctx context.Context) error
	// Acknowledge records an announcement that needs no new registration: the kubelet learned
	// the identity from the driver itself, or only the target of the link changed.
	Acknowledge(ctx context.Context, a status.Announcement) error
	// Hints receives when Check may find something else, or the kubelet called.
	Hints() <-chan struct{}
}
