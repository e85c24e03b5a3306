package fake

import (
	"fmt"
	"maps"
	"sync"
)

// APIServer has the API server's objects of the node. It is kept when the kubelet restarts.
type APIServer struct {
	mu      sync.Mutex
	labels  map[string]string // of the Node: topology, never removed
	entries map[string]string // of the CSINode: driver to node ID
}

// NewAPIServer returns an empty API server.
func NewAPIServer() *APIServer {
	return &APIServer{labels: map[string]string{}, entries: map[string]string{}}
}

// update is the kubelet's UpdateNode, with the errors of the API server and of the kubelet's own
// checks.
func (a *APIServer) update(r Registration) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if old, found := a.entries[r.Driver]; found && old != r.NodeID {
		delete(a.entries, r.Driver) // the next try succeeds
		return fmt.Errorf("the node id is immutable: it was %q, is %q", old, r.NodeID)
	}
	for k, v := range r.Topology {
		if old, found := a.labels[k]; found && old != v {
			return fmt.Errorf("detected topology value collision: driver reported %q:%q but existing label is %q:%q", k, v, k, old)
		}
	}
	maps.Copy(a.labels, r.Topology)
	a.entries[r.Driver] = r.NodeID
	return nil
}

// Align sets a topology to the values of the Node's labels, which are never removed.
func (a *APIServer) Align(topology map[string]string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for k := range topology {
		if v, found := a.labels[k]; found {
			topology[k] = v
		}
	}
}

func (a *APIServer) remove(driver string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.entries, driver)
}

// Registration is what the kubelet knows about a registered driver.
type Registration struct {
	Socket   string // the registration socket
	Driver   string
	Endpoint string
	NodeID   string
	Limit    int64
	Topology map[string]string
}
