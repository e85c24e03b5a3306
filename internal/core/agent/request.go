package agent

import (
	"context"
	"fmt"

	"csi-registrar/internal/node/config"
)

// Reregister recreates the driver's registration socket.
func (a *Agent) Reregister(ctx context.Context, name string, force bool) error {
	a.mu.Lock()
	d, _ := a.config.Driver(name)
	r := a.running[name]
	a.mu.Unlock()
	if !d.Enabled || r == nil {
		return fmt.Errorf("no enabled driver of that name is configured: %q", name)
	}
	return r.reg.Reregister(ctx, force)
}

// Configured returns the table of a driver in the configuration in force.
func (a *Agent) Configured(name string) (config.Driver, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.config.Driver(name)
}
