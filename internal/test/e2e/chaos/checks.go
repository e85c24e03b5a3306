package chaos

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/test/fake"
)

// changesPerHour is the daemon's own limit: changes, restorations after others removed the socket,
// and returns after a withdrawal, plus the socket that it found when it started.
const changesPerHour = 12 + 60 + 60 + 1

// Times of the checks.
const (
	checkEvery = 50 * time.Millisecond
	readWithin = 3 * time.Second // by then the daemon's log has been read
	earlier    = 500 * time.Millisecond
)

// check checks all invariants that must hold at every moment.
func (w *world) check(now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.foreign = slices.DeleteFunc(w.foreign, func(f *foreign) bool {
		why := f.missing()
		if why != "" && !f.mayGo {
			w.violated("%s", why)
		}
		return why != ""
	})
	w.checkRegistry(now)
	w.suspects = slices.DeleteFunc(w.suspects, func(e fake.Event) bool {
		if now.Sub(e.At) < readWithin {
			return false
		}
		w.checkCause(e)
		return true
	})
	w.checkDaemon(now)
}

// checkCause looks for the cause of a deregistration.
func (w *world) checkCause(e fake.Event) {
	kinds := []kind{onPath, logged}
	if strings.HasPrefix(e.Reason, "Notify failed") {
		kinds = append(kinds, crashed)
	}
	name := e.Driver
	if e.At.Before(w.mutedUntil[name]) {
		return
	}
	if w.history.between(name, e.Seen.Add(-earlier), e.At, kinds...) == nil {
		w.violated("%s was deregistered without a cause: %s (known to the kubelet since %s)%s",
			name, e.Reason, e.Seen.Format("15:04:05.000"), w.history.story(name))
	}
}

// checkRegistry checks the contents of plugins_registry.
func (w *world) checkRegistry(now time.Time) {
	entries, err := os.ReadDir(w.registry)
	if gone(err) != nil {
		w.violated("cannot look into the plugin registry: %v", err)
	}
	for _, e := range entries {
		path := filepath.Join(w.registry, e.Name())
		if strings.HasPrefix(e.Name(), "moved-") ||
			slices.ContainsFunc(w.foreign, func(f *foreign) bool { return f.path == path }) {
			continue
		}
		name, ours := rootdir.DriverName(e.Name())
		d := w.byName[name]
		if !ours || d == nil {
			w.violated("%s is not the path of any driver's registration socket", path)
			continue
		}
		id, mode, err := lookAt(path)
		if err != nil || id == w.published[name] {
			continue
		}
		w.published[name], w.upAt[name] = id, now
		if mode != unix.S_IFSOCK {
			continue // put there by the test itself
		}
		w.figures["published"]++
		if w.changes[name]++; w.changes[name] > changesPerHour && w.history.between(name, w.daemon.startedAt(), now, asked) == nil {
			w.violated("%s was published more than %d times by one daemon%s", name, changesPerHour, w.history.story(name))
		}
		if !d.everWell {
			w.violated("%s is published, and was never ready", name)
		}
		if from, there := w.otherFrom[name]; there && now.Sub(from) > 5*time.Second {
			w.violated("%s is published beside another live socket of that name", name)
		}
	}
}

// checkDaemon checks that the daemon runs, is ready and feeds its watchdog.
func (w *world) checkDaemon(now time.Time) {
	d := w.daemon
	if !w.ready() || d.frozen {
		w.awayAt = now
	}
	if d == nil {
		return
	}
	if !d.running() {
		w.violated("the daemon ended by itself: %v", d.err)
		w.daemon = nil
		return
	}
	s := w.spawner.manager.State()
	if d.readyAt.IsZero() && s.Ready > d.before {
		if d.readyAt = now; !w.managerBusy(d.began) {
			w.noteTime(starts, d.began, now.Sub(d.began))
		}
	}
	if w.managerBusy(now) {
		w.fedAt = now // the service manager does not watch now
	}
	switch {
	case d.frozen || s.Watchdog != w.fed || w.fedAt.Before(d.began):
		w.fed, w.fedAt = s.Watchdog, now
	case s.Ready == d.before && now.Sub(d.began) > startsWithin:
		w.violated("the daemon was not ready within %s", startsWithin)
		w.fedAt, d.began = now, now
	case s.Ready > d.before && now.Sub(w.fedAt) > watchdog:
		w.violated("the daemon has not fed its watchdog for %s", now.Sub(w.fedAt))
		w.fedAt = now
	}
}
