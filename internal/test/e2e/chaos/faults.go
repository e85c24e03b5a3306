package chaos

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

// busy is a period in which the service manager is slow or stopped. It ends by itself: nothing can
// be started meanwhile, and the plan must not wait for its own next step.
type busy struct {
	from, until time.Time
	end         *time.Timer
}

// busyManager makes the service manager slow, or stops it.
func (w *world) busyManager(s Step, stopped bool) error {
	now := time.Now()
	if now.Before(w.busy.until) {
		return nil
	}
	long := time.Duration(200+6*s.A) * ms // the daemon gives up after 8 s
	m := w.spawner.manager
	if stopped {
		m.Stop()
	} else {
		long /= 2 // so that the messages that wait are read in time
		m.SetDelay(time.Duration(10+s.B/5) * ms)
	}
	w.busy = busy{from: now, until: now.Add(long), end: time.AfterFunc(long, func() {
		m.SetDelay(0)
		m.Continue()
	})}
	return nil
}

// idleManager ends the busy period early.
func (w *world) idleManager() {
	if w.busy.end != nil {
		w.busy.end.Stop()
	}
	w.spawner.manager.SetDelay(0)
	w.spawner.manager.Continue()
}

// managerBusy reports whether the service manager was slow or stopped since from, or just before.
func (w *world) managerBusy(from time.Time) bool {
	return from.Before(w.busy.until.Add(time.Second))
}

// blocked reports whether a step would hang with the file system, and the test with it.
func (w *world) blocked(s Step, d *Driver) bool {
	return w.hanging() && (d.hangable && strings.HasPrefix(s.Act, "driver ") || strings.HasPrefix(s.Act, "kubelet "))
}

func (w *world) hanging() bool { return !w.hangsSince.IsZero() }

func (w *world) hangFS() error {
	if w.fs == nil || w.hanging() {
		return nil
	}
	w.hangsSince = time.Now()
	return w.fs.Hang()
}

// resumeFS makes the file system answer again, after checking that a daemon that started meanwhile
// has reported it.
func (w *world) resumeFS() error {
	if !w.hanging() {
		return nil
	}
	if w.settled(w.hangsSince, 3*time.Second) && w.daemon.began.After(w.hangsSince) {
		w.figures["started under a file system that hangs"]++
		if s, err := w.api.status(); err != nil || len(s.Stuck) == 0 {
			w.violated("the status says nothing of the file system that hangs: %+v, %v", s, err)
		}
	}
	w.hangsSince = time.Time{}
	return w.fs.Resume()
}

// settled reports whether the daemon itself has had no fault for the given time, and a condition
// that began at from has lasted that long.
func (w *world) settled(from time.Time, long time.Duration) bool {
	if !w.ready() || w.daemon.frozen {
		return false
	}
	// awayAt does not tell of a daemon that was restarted, and was ready, between two checks.
	for _, at := range []time.Time{from, w.awayAt, w.daemon.began, w.daemon.readyAt, w.registryAt} {
		if time.Since(at) <= long {
			return false
		}
	}
	return true
}

// startWhileFSHangs restarts the daemon while the file system of some drivers hangs: it must start
// and report which file system does not answer.
func (w *world) startWhileFSHangs() error {
	if w.fs == nil {
		return nil
	}
	w.mu.Lock()
	err := errors.Join(w.hangFS(), w.stopDaemon(false), w.startDaemon("--keep-sockets"))
	w.mu.Unlock()
	if why := w.eventually(startsWithin, func() string {
		s, err := w.api.status()
		if err != nil || len(s.Stuck) == 0 {
			return fmt.Sprintf("started while a file system hangs; the status does not say so: %v", err)
		}
		return ""
	}); why != "" {
		err = errors.Join(err, errors.New(why))
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return errors.Join(err, w.resumeFS())
}

// restartWhileManagerStops has all registration sockets removed while the service manager is
// stopped: they are restored meanwhile, and the restart that follows loses none.
func (w *world) restartWhileManagerStops() error {
	// A driver may have used up its changes, and this removal would be damped. A new daemon
	// counts from zero.
	if err := w.restartAndSettle(); err != nil {
		return err
	}
	w.mu.Lock()
	err := w.busyManager(Step{A: 900}, true)
	made := map[string]fileID{}
	for _, d := range w.drivers {
		if d.flaw == sound && w.damped[d.name].IsZero() {
			w.history.note(d.name, onPath, "removed")
			made[w.pathOf(d)] = fileID{}
			err = errors.Join(err, gone(os.Remove(w.pathOf(d))))
		}
	}
	removed := time.Now()
	w.mu.Unlock()
	for path := range made {
		await(context.Background(), func() bool {
			id, _, missing := lookAt(path)
			made[path] = id
			return missing == nil && accepts(path)
		})
	}
	// They are restored at the same time, within 0.3 s; a publication that waits for the
	// manager takes 3 s.
	if long := time.Since(removed); long > 2500*ms {
		err = errors.Join(err, fmt.Errorf("all registration sockets are restored only after %s while the service manager is stopped", long))
	}
	if err = errors.Join(err, w.restartAndSettle()); err != nil {
		return err
	}
	for path, before := range made {
		if after, _, e := lookAt(path); after != before {
			err = errors.Join(err, e, fmt.Errorf("%s was lost at a restart while the service manager was stopped", path))
		}
	}
	return err
}

func (w *world) restartAndSettle() error {
	w.mu.Lock()
	err := actions["daemon again"](w, Step{}, nil)
	w.mu.Unlock()
	if why := w.eventually(settlesWithin, w.asItShouldBe); why != "" {
		err = errors.Join(err, errors.New(why))
	}
	return err
}

// flapUntilDamped makes a driver alternate between ready and mismatch until it is damped.
func (w *world) flapUntilDamped() error {
	i := slices.IndexFunc(w.drivers, func(d *Driver) bool { return d.role == flapping })
	d := w.drivers[i]
	path := w.pathOf(d)
	for range changesPerHour {
		for _, act := range []string{"driver lie", "driver truth"} {
			w.mu.Lock()
			err := actions[act](w, Step{}, d)
			w.mu.Unlock()
			if err != nil {
				return err
			}
			if await(context.Background(), func() bool { return accepts(path) == (act == "driver truth") }) {
				continue
			}
			s, err := w.api.status()
			if damped, wrong := s.driver(d.name).damped(); damped {
				return wrong
			}
			return fmt.Errorf("%s is not followed, and not damped: %+v, %v", d.name, s.driver(d.name), err)
		}
	}
	return fmt.Errorf("%s was followed %d times, and is not damped", d.name, changesPerHour)
}

// damped reports whether a driver waits because it changed too often.
func (s driverStatus) damped() (bool, error) {
	if s.DampedUntil.IsZero() {
		return false, nil
	}
	if wait := time.Until(s.DampedUntil); wait < -time.Second || wait > 5*time.Minute {
		return true, fmt.Errorf("damped_until is %s from now", wait.Round(time.Millisecond))
	}
	return true, nil
}
