package kubelet

import (
	"time"

	"k8s.io/kubernetes/pkg/kubelet/pluginmanager/cache"
)

// recorder prints what the plugin manager asks of a handler, and what that answers.
type recorder struct {
	cache.PluginHandler
	events *events
}

func (r *recorder) ValidatePlugin(name, endpoint string, versions []string) error {
	err := r.PluginHandler.ValidatePlugin(name, endpoint, versions)
	r.events.print(event{Event: "validate", Driver: name, Endpoint: endpoint, Versions: versions, Error: text(err)})
	return err
}

func (r *recorder) RegisterPlugin(name, endpoint string, versions []string, timeout *time.Duration) error {
	start := time.Now()
	err := r.PluginHandler.RegisterPlugin(name, endpoint, versions, timeout)
	r.events.print(event{
		Event: "register", Driver: name, Endpoint: endpoint, Versions: versions,
		Error: text(err), TookSeconds: time.Since(start).Seconds(),
	})
	return err
}

func (r *recorder) DeRegisterPlugin(name, endpoint string) {
	r.PluginHandler.DeRegisterPlugin(name, endpoint)
	r.events.print(event{Event: "deregister", Driver: name, Endpoint: endpoint})
}

// yes is the handler of --handler=record: it takes every plugin.
type yes struct{}

func (yes) ValidatePlugin(string, string, []string) error                 { return nil }
func (yes) RegisterPlugin(string, string, []string, *time.Duration) error { return nil }
func (yes) DeRegisterPlugin(string, string)                               {}
