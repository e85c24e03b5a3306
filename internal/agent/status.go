package agent

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"csi-registrar/internal/config"
	"csi-registrar/internal/status"
)

// statusStore keeps the newest snapshot of everything. Registrars write, anybody reads; the lock
// is never held across a call to others.
type statusStore struct {
	mu      sync.Mutex
	status  status.Document // without Drivers
	drivers map[key]status.Driver
	config  *config.Config
	changed chan struct{} // closed at the next change
}

func newStatusStore(version string, now time.Time) *statusStore {
	return &statusStore{
		status:  status.Document{Version: version, StartedAt: now.UTC()},
		drivers: map[key]status.Driver{},
		config:  config.Default(),
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

// set puts in a registrar's snapshot; nil: it has ended.
func (b *statusStore) set(k key, s *status.Driver) {
	b.change(func() {
		if s == nil {
			delete(b.drivers, k)
		} else {
			b.drivers[k] = *s
		}
	})
}

func (b *statusStore) configured(c *config.Config, files []string) {
	b.change(func() {
		b.config = c
		b.status.ConfigFiles = slices.Clone(files)
		b.status.PluginsRegistry = c.Kubelet.PluginsRegistry()
	})
}

// Status is the snapshot of this moment. Of two registrars of a driver the one that counts is that
// of the configuration in force, also while the other's registration is still being withdrawn.
func (a *Agent) Status() status.Document {
	b := a.store
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.status
	s.ConfigFiles = append([]string{}, s.ConfigFiles...)
	s.Drivers = make([]status.Driver, 0, len(b.drivers))
	shown := make(map[string]bool, len(b.drivers))
	for k, d := range b.drivers {
		if _, two := b.drivers[key{k.name, b.config.Kubelet}]; k.kubelet == b.config.Kubelet || !two && !shown[k.name] {
			s.Drivers, shown[k.name] = append(s.Drivers, d), true
		}
	}
	for _, d := range b.config.Drivers {
		if !d.Enabled && !shown[d.Name] {
			s.Drivers = append(s.Drivers, status.Driver{
				Name: d.Name, Socket: d.Socket, Endpoint: d.Endpoint, State: status.Disabled,
				Driver: status.Absent, Registration: status.None, Reason: "disabled in the configuration",
			})
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
func (a *Agent) Unnamed(s *status.Driver) { a.store.set(key{}, s) }
