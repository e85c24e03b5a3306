package agent

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"csi-registrar/internal/config"
	"csi-registrar/internal/status"
)

// board keeps the newest snapshot of everything. Registrars write, anybody reads; the lock
// is never held across a call to others.
type board struct {
	mu       sync.Mutex
	status   status.Document // without Drivers
	drivers  map[string]status.Driver
	disabled map[string]status.Driver
	changed  chan struct{} // closed at the next change
}

func newBoard(version string, now time.Time) *board {
	return &board{
		status:  status.Document{Version: version, StartedAt: now.UTC()},
		drivers: map[string]status.Driver{},
		changed: make(chan struct{}),
	}
}

// change runs f under the lock and wakes everybody who waits.
func (b *board) change(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f()
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *board) driver(s status.Driver) {
	b.change(func() { b.drivers[s.Name] = s })
}

func (b *board) forget(name string) {
	b.change(func() { delete(b.drivers, name) })
}

func (b *board) configured(c *config.Config, files []string) {
	disabled := map[string]status.Driver{}
	for _, d := range c.Drivers {
		if !d.Enabled {
			disabled[d.Name] = status.Driver{
				Name: d.Name, Socket: d.Socket, Endpoint: d.Endpoint, State: status.Disabled,
				Driver: status.Absent, Registration: status.None, Reason: "disabled in the configuration",
			}
		}
	}
	b.change(func() {
		b.status.ConfigFiles = slices.Clone(files)
		b.status.PluginsRegistry = c.Kubelet.PluginsRegistry()
		b.disabled = disabled
	})
}

// Status is the snapshot of this moment.
func (a *Agent) Status() status.Document {
	b := a.board
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.status
	s.ConfigFiles = append([]string{}, s.ConfigFiles...)
	s.Drivers = slices.AppendSeq(make([]status.Driver, 0, len(b.drivers)+len(b.disabled)), maps.Values(b.drivers))
	s.Drivers = slices.AppendSeq(s.Drivers, maps.Values(b.disabled))
	slices.SortFunc(s.Drivers, func(x, y status.Driver) int { return cmp.Compare(x.Name, y.Name) })
	return s
}

// Changed is closed at the next change. Take it before Status, and nothing is missed.
func (a *Agent) Changed() <-chan struct{} {
	a.board.mu.Lock()
	defer a.board.mu.Unlock()
	return a.board.changed
}

// ConfigError says what is wrong with the files, while an older configuration is in force;
// empty when nothing is.
func (a *Agent) ConfigError(text string) {
	a.board.change(func() { a.board.status.ConfigError = text })
}

// Unnamed shows a driver whose name is not known yet (node-driver-registrar's flags do
// not tell it) among the others, with an empty name; nil when it is.
func (a *Agent) Unnamed(s *status.Driver) {
	if s == nil {
		a.board.forget("")
		return
	}
	s.Name = ""
	a.board.driver(*s)
}
