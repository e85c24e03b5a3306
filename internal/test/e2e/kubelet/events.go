package kubelet

import (
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"

	storagev1 "k8s.io/api/storage/v1"
)

// event is one line of output. It is documented in cmd/kubelet; fields are added, never renamed.
type event struct {
	Time        time.Time         `json:"time"`
	Event       string            `json:"event"`
	Node        string            `json:"node,omitempty"`
	Root        string            `json:"root,omitempty"`
	Driver      string            `json:"driver,omitempty"`
	Endpoint    string            `json:"endpoint,omitempty"`
	Versions    []string          `json:"versions,omitempty"`
	Error       string            `json:"error,omitempty"`
	TookSeconds float64           `json:"took_seconds,omitempty"`
	Drivers     []csiNodeDriver   `json:"drivers,omitempty"`
	Labels      map[string]string `json:"labels,omitempty"`
	// Successful writes since the process started, on csinode, node and done events.
	CSINodeWrites int    `json:"csinode_writes,omitempty"`
	NodeWrites    int    `json:"node_writes,omitempty"`
	Command       string `json:"command,omitempty"`
}

type csiNodeDriver struct {
	Name         string   `json:"name"`
	NodeID       string   `json:"node_id"`
	TopologyKeys []string `json:"topology_keys,omitempty"`
	MaxVolumes   int32    `json:"max_volumes,omitempty"`
}

func driversOf(n *storagev1.CSINode) []csiNodeDriver {
	var out []csiNodeDriver
	for _, d := range n.Spec.Drivers {
		c := csiNodeDriver{Name: d.Name, NodeID: d.NodeID, TopologyKeys: d.TopologyKeys}
		if d.Allocatable != nil && d.Allocatable.Count != nil {
			c.MaxVolumes = *d.Allocatable.Count
		}
		out = append(out, c)
	}
	return out
}

// events prints one line at a time. If the reader has closed the pipe, the kubelet ends, because
// nobody observes it any more.
type events struct {
	mu     sync.Mutex
	w      io.Writer
	broken func(error)
}

func (e *events) print(v event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	v.Time = time.Now()
	line, err := json.Marshal(v)
	if err == nil {
		_, err = e.w.Write(append(line, '\n'))
	}
	if err != nil {
		e.broken(fmt.Errorf("cannot print an event: %w", err))
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
