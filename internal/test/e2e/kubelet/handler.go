//go:build !oldkubelet

package kubelet

import (
	"context"
	"time"
)

// The interface from Kubernetes 1.37 on.

func (r *recorder) ValidatePlugin(ctx context.Context, name, endpoint string, versions []string) error {
	return r.validated(name, endpoint, versions, r.PluginHandler.ValidatePlugin(ctx, name, endpoint, versions))
}

func (r *recorder) RegisterPlugin(ctx context.Context, name, endpoint string, versions []string, timeout *time.Duration) error {
	start := time.Now()
	return r.registered(name, endpoint, versions, start, r.PluginHandler.RegisterPlugin(ctx, name, endpoint, versions, timeout))
}

func (r *recorder) DeRegisterPlugin(ctx context.Context, name, endpoint string) {
	r.PluginHandler.DeRegisterPlugin(ctx, name, endpoint)
	r.deregistered(name, endpoint)
}

func (yes) ValidatePlugin(context.Context, string, string, []string) error { return nil }
func (yes) RegisterPlugin(context.Context, string, string, []string, *time.Duration) error {
	return nil
}
func (yes) DeRegisterPlugin(context.Context, string, string) {}
