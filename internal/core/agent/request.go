package agent

import (
	"context"
	"fmt"

	"csi-registrar/internal/node/config"
)

// Reregister recreates the driver's registration socket.
func (a *Agent) Reregister(ctx context.Context, name string, force bool) error {
	r, err := a.enabled(name)
	if err != nil {
		return err
	}
	return r.reg.Reregister(ctx, force)
}

// Record redirects the calls to the driver to a recorder, see Socket.Record.
func (a *Agent) Record(ctx context.Context, name string, listen func(context.Context, string) error, linked func()) error {
	r, err := a.enabled(name)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { // no call arrives any more when the registration has ended
		select {
		case <-r.ended:
			cancel()
		case <-ctx.Done():
		}
	}()
	return r.socket.Record(ctx, listen, linked)
}

// Configured returns the table of a driver in the configuration in force.
func (a *Agent) Configured(name string) (config.Driver, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.config.Driver(name)
}

// enabled returns the registrar of an enabled driver.
func (a *Agent) enabled(name string) (*running, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	d, _ := a.config.Driver(name)
	r := a.running[key{name, a.config.Kubelet}]
	if !d.Enabled || r == nil {
		return nil, fmt.Errorf("no enabled driver of that name is configured: %q", name)
	}
	return r, nil
}
