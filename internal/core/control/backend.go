// Package control implements the daemon's HTTP API: the control socket, health and metrics on it
// and on TCP, and the client for the commands.
package control

import (
	"context"

	"csi-registrar/internal/node/status"
)

// Backend is the part of the daemon that its API needs. All methods may be called at any time from
// any goroutine; the texts of their errors are for people.
type Backend interface {
	// Status is a snapshot that does not change.
	Status() status.Document
	// Changed returns a channel that is closed at the next change of the status. A caller that
	// gets the channel first and the status second misses no change.
	Changed() <-chan struct{}
	// Reload reads the configuration again and returns when it is in force, with what the user
	// should know. If it has errors, the old one stays in force, and the error has one line for
	// each. With force, also drivers whose volumes are in use are withdrawn.
	Reload(ctx context.Context, force bool) (notes []string, err error)
	// Reregister makes the kubelet register the driver again. Without force it fails where the
	// kubelet would refuse what the driver reports now.
	Reregister(ctx context.Context, name string, force bool) error
	// Live returns nil if the driver answers Probe now, or did less than a second ago. The text of
	// its error contains no text of the driver, so everybody may read it.
	Live(ctx context.Context, driver string) error
	// Alive returns nil when the agent and all registrars answer, or did less than a second ago.
	// They do not wait for drivers; after 2 s Alive returns an error.
	Alive(ctx context.Context) error
}
