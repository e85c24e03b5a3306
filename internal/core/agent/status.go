package agent

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
)

// change runs f under the lock and closes the channel of Changed.
func (a *Agent) change(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
	close(a.changed)
	a.changed = make(chan struct{})
}

// Status returns the current status.
func (a *Agent) Status() status.Document {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	s := status.Document{
		Version: a.version, StartedAt: status.ByWallClock(a.began, now), ConfigFiles: claims(a.files), ConfigError: a.configError, InvalidFiles: claims(a.invalidFile),
		PluginsRegistry: safetext.Claim(a.config.Kubelet.PluginsRegistry()), Kubelet: a.kubelet, Drivers: []status.Driver{},
	}
	drivers := map[string]status.Driver{} // by name
	for _, d := range a.config.Drivers {
		idle := status.Driver{
			Name: d.Name, Socket: safetext.Claim(d.Socket), Endpoint: safetext.Claim(d.Endpoint), State: status.Disabled,
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
	for name, r := range a.running {
		if st := &r.status; st.WithdrawalError != "" {
			s.Withdrawals = append(s.Withdrawals, status.Withdrawal{
				Driver: name, RegistrationSocket: st.RegistrationSocket, Since: status.ByWallClock(st.WithdrawalFailedAt, now), Error: st.WithdrawalError,
			})
		}
		drivers[name] = r.status
	}
	for name, errs := range a.invalid {
		if d, ok := drivers[name]; ok {
			addReason(&d, "the table in the files is not in force: "+errs)
			drivers[name] = d
			continue
		}
		drivers[name] = status.Driver{Name: name, State: status.Invalid, Driver: status.Absent, Registration: status.None, Reason: errs}
	}
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
		if now.Sub(d.ServedBy.AskedAt) > status.AnswerLasts {
			d.ServedBy = status.ServedBy{}
		}
		for _, at := range []*time.Time{
			&d.Since, &d.DriverSince, &d.RegisteredAt, &d.LastGetInfoAt, &d.DampedUntil, &d.WithdrawalFailedAt, &d.ServedBy.Since, &d.ServedBy.AskedAt,
		} {
			*at = status.ByWallClock(*at, now)
		}
		d.NoTable = table.KeptFor != ""
		addReason(&d, table.KeptFor)
		s.Drivers = append(s.Drivers, d)
	}
	for _, at := range []*time.Time{&s.Kubelet.ConfirmedAt, &s.Kubelet.EndedAt} {
		*at = status.ByWallClock(*at, now)
	}
	slices.SortFunc(s.Withdrawals, func(a, b status.Withdrawal) int { return cmp.Compare(a.RegistrationSocket, b.RegistrationSocket) })
	return s
}

func claims(paths []string) []safetext.Claim {
	out := []safetext.Claim{}
	for _, p := range paths {
		out = append(out, safetext.Claim(p))
	}
	return out
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

// ConfigErrors sets the errors of the files, one a line; those of each driver's table; and the
// files of which nothing is in force.
func (a *Agent) ConfigErrors(all string, tables map[string]string, files []string) {
	a.change(func() { a.configError, a.invalid, a.invalidFile = all, tables, files })
}

// Kubelet sets the kubelet that last reported a result.
func (a *Agent) Kubelet(k status.Kubelet) { a.change(func() { a.kubelet = k }) }

// Unnamed adds to the status a driver whose name is not known yet, because
// node-driver-registrar's flags do not have it; the zero Driver removes it.
func (a *Agent) Unnamed(d status.Driver) { a.change(func() { a.unnamed = d }) }
