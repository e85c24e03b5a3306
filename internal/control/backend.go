// Package control is the daemon's HTTP API: the control socket, health and metrics for it
// and for TCP, and the client that the commands use.
package control

import (
	"context"

	"csi-registrar/internal/status"
)

// Backend is the daemon, as its API needs it. All methods may be called at any time from
// any goroutine; the texts of their errors are for people.
type Backend interface {
	// Status is a snapshot; nobody changes it afterwards.
	Status() status.Document
	// Changed is closed when the status is no longer the one that Status gave at this
	// moment or later. Whoever takes the channel first and the status second misses
	// nothing, and need not look in between.
	Changed() <-chan struct{}
	// Reload reads the configuration again and returns when it is in force. If it has errors
	// the old one still is; they are returned one a line.
	Reload(ctx context.Context) error
	// Reregister makes the kubelet register the driver again.
	Reregister(ctx context.Context, name string) error
	// Alive returns nil when the agent and all registrars answer, which takes them no time,
	// whatever their drivers do.
	Alive(ctx context.Context) error
}
