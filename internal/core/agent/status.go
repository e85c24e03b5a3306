package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"
	"time"

	"csi-registrar/internal/core/registrar"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
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
		// Each status counts them again: there is no event when a restart leaves the window.
		old := sort.Search(len(d.Restarts), func(i int) bool { return now.Sub(d.Restarts[i]) < status.RestartWindow })
		if d.DriverRestarts = len(d.Restarts) - old; d.DriverRestarts >= status.ManyRestarts {
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

// running is a registrar and what belongs to it.
type running struct {
	driver config.Driver // under Agent.apply; not enabled: its registration is being withdrawn
	reg    *registrar.Registrar
	ended  context.Context // until the registrar has ended and the socket is closed
	status status.Driver   // under Agent.mu
}

// start starts a registrar.
func (a *Agent) start(d config.Driver, socket Socket) {
	ended, end := context.WithCancel(context.Background())
	r := &running{driver: d, ended: ended}
	log := a.log.With("driver", d.Name)
	r.reg = registrar.New(d, a.parts.Driver(d), socket, log, func(s status.Driver) {
		a.change(func() { r.status = s })
	})
	a.change(func() { a.running[d.Name] = r })
	a.ended.Go(func() {
		r.reg.Run(a.ctx)
		if err := socket.Close(context.WithoutCancel(a.ctx), a.ctx.Err() == nil); err != nil {
			log.Error("cannot end a registration cleanly", "error", err)
		}
		// no other takes its place before r.ended is done
		a.change(func() { delete(a.running, d.Name) })
		end()
		rate.Hint(a.hints) // it may have been enabled again
	})
}

// awaitEnd waits until r has ended or ctx is done; it reports whether r has ended.
func (r *running) awaitEnd(ctx context.Context) bool {
	select {
	case <-r.ended.Done():
	case <-ctx.Done():
	}
	return r.ended.Err() != nil
}

// awaitWithdrawal waits up to leaveTime until all are withdrawn. The error names a few that are
// not.
func (a *Agent) awaitWithdrawal(ctx context.Context, leaving []*running) error {
	ctx, cancel := context.WithTimeout(ctx, leaveTime)
	defer cancel()
	var left []string
	reason := ""
	for _, r := range leaving {
		if r.awaitEnd(ctx) {
			continue
		}
		left = append(left, r.driver.Name)
		a.mu.Lock()
		reason = cmp.Or(reason, r.status.WithdrawalError)
		a.mu.Unlock()
	}
	if len(left) == 0 {
		return nil
	}
	slices.Sort(left)
	text := fmt.Sprintf("%d withdrawals go on: %s", len(left), safetext.Some(left, 3))
	if reason != "" {
		text += " (" + reason + ")"
	}
	return errors.New(text)
}

// update passes a changed table to its registrar, with a new client if the driver must be found
// or checked in another way. It returns false if the registrar is ending. One that was to be
// withdrawn, and is not yet, continues.
func (a *Agent) update(r *running, d config.Driver) bool {
	r.driver.KeptFor = d.KeptFor // no setting of the registrar
	if r.driver.Equal(d) {
		return true
	}
	var client registrar.Driver
	if r.driver.Connection != d.Connection {
		client = a.parts.Driver(d)
	}
	if err := r.reg.Update(a.ctx, d, client); err != nil {
		a.log.Debug("a registrar ended before it could be changed", "driver", d.Name, "error", err)
		if client != nil {
			client.Close()
		}
		return false
	}
	r.driver = d
	return true
}
