//go:build oldkubelet

package kubelet

import "time"

// The interface up to Kubernetes 1.36.

func (r *recorder) ValidatePlugin(name, endpoint string, versions []string) error {
	return r.validated(name, endpoint, versions, r.PluginHandler.ValidatePlugin(name, endpoint, versions))
}

func (r *recorder) RegisterPlugin(name, endpoint string, versions []string, timeout *time.Duration) error {
	start := time.Now()
	return r.registered(name, endpoint, versions, start, r.PluginHandler.RegisterPlugin(name, endpoint, versions, timeout))
}

func (r *recorder) DeRegisterPlugin(name, endpoint string) {
	r.PluginHandler.DeRegisterPlugin(name, endpoint)
	r.deregistered(name, endpoint)
}

func (yes) ValidatePlugin(string, string, []string) error                 { return nil }
func (yes) RegisterPlugin(string, string, []string, *time.Duration) error { return nil }
func (yes) DeRegisterPlugin(string, string)                               {}
