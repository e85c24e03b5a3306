package agent

import (
	"sort"
	"strings"

	"csi-registrar/internal/status"
)

// change runs f under the lock and wakes everybody who waits.
func (a *Agent) change(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
	close(a.changed)
	a.changed = make(chan struct{})
}

// Status is the snapshot of this moment. Of two registrars of a driver the one that counts is that
// of the configuration in force, also while the other's registration is still being withdrawn.
func (a *Agent) Status() status.Document {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := status.Document{
		Version: a.version, StartedAt: a.began.UTC(), ConfigFiles: append([]string{}, a.files...), ConfigError: a.configError,
		PluginsRegistry: a.config.Kubelet.PluginsRegistry(), Drivers: make([]status.Driver, 0, len(a.running)),
	}
	shown := make(map[string]bool, len(a.running))
	for k, r := range a.running {
		if _, two := a.running[key{k.name, a.config.Kubelet}]; k.kubelet == a.config.Kubelet || !two && !shown[k.name] {
			s.Drivers, shown[k.name] = append(s.Drivers, r.status), true
		}
	}
	for _, d := range a.config.Drivers {
		if !d.Enabled && !shown[d.Name] {
			s.Drivers = append(s.Drivers, status.Driver{
				Name: d.Name, Socket: d.Socket, Endpoint: d.Endpoint, State: status.Disabled,
				Driver: status.Absent, Registration: status.None, Reason: "disabled in the configuration",
			})
		}
	}
	if a.unnamed != nil {
		s.Drivers = append(s.Drivers, *a.unnamed)
	}
	for i := range s.Drivers {
		if d, _ := a.config.Driver(s.Drivers[i].Name); d.KeptFor != "" {
			s.Drivers[i].Reason = strings.TrimPrefix(s.Drivers[i].Reason+"; "+d.KeptFor, "; ")
		}
	}
	sort.Slice(s.Drivers, func(i, j int) bool { return s.Drivers[i].Name < s.Drivers[j].Name })
	return s
}

// Changed is closed at the next change. Take it before Status, and nothing is missed.
func (a *Agent) Changed() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.changed
}

// ConfigError says what is wrong with the files, while an older configuration is in force;
// empty when nothing is.
func (a *Agent) ConfigError(text string) { a.change(func() { a.configError = text }) }

// Unnamed shows a driver whose name is not known yet (node-driver-registrar's flags do
// not have it) among the others, with an empty name; nil when it is.
func (a *Agent) Unnamed(s *status.Driver) {
	if s != nil {
		unnamed := *s
		s = &unnamed // the caller's changes
	}
	a.change(func() { a.unnamed = s })
}
