package kubelet

import (
	"time"

	"k8s.io/kubernetes/pkg/kubelet/pluginmanager/cache"
)

// recorder prints the calls of the plugin manager to a handler, and the results. Its methods and
// those of yes are in handler.go and oldhandler.go, because the interface has changed.
type recorder struct {
	cache.PluginHandler
	events *events
}

func (r *recorder) validated(name, endpoint string, versions []string, err error) error {
	r.events.print(event{Event: "validate", Driver: name, Endpoint: endpoint, Versions: versions, Error: text(err)})
	return err
}

func (r *recorder) registered(name, endpoint string, versions []string, start time.Time, err error) error {
	r.events.print(event{
		Event: "register", Driver: name, Endpoint: endpoint, Versions: versions,
		Error: text(err), TookSeconds: time.Since(start).Seconds(),
	})
	return err
}

func (r *recorder) deregistered(name, endpoint string) {
	r.events.print(event{Event: "deregister", Driver: name, Endpoint: endpoint})
}

// yes is the handler of --handler=record, which accepts every plugin.
type yes struct{}
