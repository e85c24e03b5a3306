package agent

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"csi-registrar/internal/node/status"
)

// change runs f under the lock and closes the channel of Changed.
func (a *Agent) change(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
	close(a.changed)
	a.changed = make(chan struct{})
}

// Status returns the current status. If a driver has two registrars, it has the status of the one
// below the root_dir in force; the registration of the other is being withdrawn.
func (a *Agent) Status() status.Document {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := status.Document{
		Version: a.version, StartedAt: a.began.UTC(), ConfigFiles: append([]string{}, a.files...), ConfigError: a.configError,
		PluginsRegistry: a.config.Kubelet.PluginsRegistry(), Kubelet: a.kubelet, Drivers: []status.Driver{},
	}
	drivers := map[string]status.Driver{} // by name
	for _, d := range a.config.Drivers {
		idle := status.Driver{
			Name: d.Name, Socket: d.Socket, Endpoint: d.Endpoint, State: status.Disabled,
			Driver: status.Absent, Registration: status.None, Reason: "disabled in the configuration",
		}
		if d.Enabled {
			idle.State, idle.Reason = string(status.Absent), "its registrar is starting"
		}
		drivers[d.Name] = idle
	}
	if a.unnamed.State != "" {
		drivers[""] = a.unnamed
	}
	for k, r := range a.running {
		if st := &r.status; st.WithdrawalError != "" {
			s.Withdrawals = append(s.Withdrawals, status.Withdrawal{
				Driver: k.name, RegistrationSocket: st.RegistrationSocket, Since: st.WithdrawalFailedAt, Error: st.WithdrawalError,
			})
		}
		if k.kubelet == a.config.Kubelet || a.running[key{k.name, a.config.Kubelet}] == nil {
			drivers[k.name] = r.status
		}
	}
	now := time.Now()
	for _, name := range slices.Sorted(maps.Keys(drivers)) {
		d := drivers[name]
		table, _ := a.config.Driver(name)
		addReason(&d, s.KubeletEnded(d, now))
		if err := a.failed[name]; err != nil {
			d.Reason = err.Error()
		}
		if d.DriverRestarts = restarts(d.Restarts, now); d.DriverRestarts >= status.ManyRestarts {
			addReason(&d, fmt.Sprintf("the driver restarted %d times within %s", d.DriverRestarts, status.RestartWindow))
		}
		addReason(&d, table.KeptFor)
		s.Drivers = append(s.Drivers, d)
	}
	slices.SortFunc(s.Withdrawals, func(a, b status.Withdrawal) int { return strings.Compare(a.RegistrationSocket, b.RegistrationSocket) })
	return s
}

// restarts counts the restarts within status.RestartWindow. Each status counts them again, because
// there is no event when a restart leaves the window.
func restarts(at []time.Time, now time.Time) (n int) {
	for _, t := range at {
		if now.Sub(t) < status.RestartWindow {
			n++
		}
	}
	return n
}

// addReason appends a reason, unless it is empty.
func addReason(d *status.Driver, reason string) {
	if reason != "" {
		d.Reason = strings.TrimPrefix(d.Reason+"; "+reason, "; ")
	}
}

// Changed returns a channel that is closed at the next change. Get it before calling Status, so
// that no change is missed.
func (a *Agent) Changed() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.changed
}

// ConfigError sets the errors of the files, one a line; empty if there are none.
func (a *Agent) ConfigError(text string) { a.change(func() { a.configError = text }) }

// Kubelet sets the kubelet that last reported a result.
func (a *Agent) Kubelet(k status.Kubelet) { a.change(func() { a.kubelet = k }) }

// Unnamed adds to the status a driver whose name is not known yet, because
// node-driver-registrar's flags do not have it; the zero Driver removes it.
func (a *Agent) Unnamed(d status.Driver) { a.change(func() { a.unnamed = d }) }
