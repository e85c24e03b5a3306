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

// statusStore keeps the newest snapshot of everything. Registrars write, anybody reads; the lock
// is never held across a call to others.
type statusStore struct {
	mu       sync.Mutex
	status   status.Document // without Drivers
	drivers  map[string]status.Driver
	owners   map[string]any // by driver: whose snapshots count
	disabled map[string]status.Driver
	changed  chan struct{} // closed at the next change
}

func newStatusStore(version string, now time.Time) *statusStore {
	return &statusStore{
		status:  status.Document{Version: version, StartedAt: now.UTC()},
		drivers: map[string]status.Driver{},
		owners:  map[string]any{},
		changed: make(chan struct{}),
	}
}

// change runs f under the lock and wakes everybody who waits.
func (b *statusStore) change(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f()
	close(b.changed)
	b.changed = make(chan struct{})
}

// own makes owner's snapshots of a driver the ones that count. While a registration is being
// withdrawn under an earlier root_dir the driver has two registrars.
func (b *statusStore) own(name string, owner any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.owners[name] = owner
}

func (b *statusStore) driver(owner any, s status.Driver) {
	b.mu.Lock()
	counts := b.owners[s.Name] == owner
	b.mu.Unlock()
	if counts {
		b.change(func() { b.drivers[s.Name] = s })
	}
}

func (b *statusStore) forget(owner any, name string) {
	b.mu.Lock()
	counts := b.owners[name] == owner
	b.mu.Unlock()
	if counts {
		b.change(func() { delete(b.drivers, name); delete(b.owners, name) })
	}
}

func (b *statusStore) configured(c *config.Config, files []string) {
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
	b := a.store
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.status
	s.ConfigFiles = append([]string{}, s.ConfigFiles...)
	s.Drivers = slices.AppendSeq(make([]status.Driver, 0, len(b.drivers)+len(b.disabled)), maps.Values(b.drivers))
	for name, d := range b.disabled {
		if _, leaving := b.drivers[name]; !leaving {
			s.Drivers = append(s.Drivers, d)
		}
	}
	slices.SortFunc(s.Drivers, func(x, y status.Driver) int { return cmp.Compare(x.Name, y.Name) })
	return s
}

// Changed is closed at the next change. Take it before Status, and nothing is missed.
func (a *Agent) Changed() <-chan struct{} {
	a.store.mu.Lock()
	defer a.store.mu.Unlock()
	return a.store.changed
}

// ConfigError says what is wrong with the files, while an older configuration is in force;
// empty when nothing is.
func (a *Agent) ConfigError(text string) {
	a.store.change(func() { a.store.status.ConfigError = text })
}

// Unnamed shows a driver whose name is not known yet (node-driver-registrar's flags do
// not have it) among the others, with an empty name; nil when it is.
func (a *Agent) Unnamed(s *status.Driver) {
	if s == nil {
		a.store.forget(nil, "")
		return
	}
	s.Name = ""
	a.store.driver(nil, *s)
}
