package registrar

import (
	"context"
	"time"

	"csi-registrar/internal/node/status"
)

// Driver is a CSI driver (implemented by driver.Observer).
type Driver interface {
	// Look returns what is known of the driver, from memory.
	Look() status.View
	// Hints receives when Look may return something else. Capacity one: a hint has no payload.
	Hints() <-chan struct{}
	// AskNow asks the driver again, without waiting for the answer.
	AskNow()
	// Follow sets whether the driver is asked at all, and whether it is registered: then Probe is
	// called each probeEvery (0: never), and it is Hanging after two calls without an answer.
	Follow(enabled, registered bool, probeEvery time.Duration)
	// Close ends the goroutine, the connection and the hints.
	Close()
}

// Socket is the registration socket of a driver (implemented by regsocket.Socket). All methods but
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
	// Clear removes what Publish would remove of others at the path, and fails as Publish does if
	// that is not possible.
	Clear(ctx context.Context, a status.Announcement) error
	// Withdraw removes the path if it is ours, then the listener and its entry in the
	// descriptor store. Without a published socket it does nothing. If the path cannot be
	// removed, everything stays as it is.
	Withdraw(ctx context.Context) error
	// Hints receives when Check may find something else, or the kubelet called.
	Hints() <-chan struct{}
}
