package chaos

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"csi-registrar/internal/test/fake"
)

// settlesWithin is how long recovery may take: after many changes, the registrar delays one that
// the kubelet must learn by up to 30 s, and the kubelet's backoff is added to that.
const settlesWithin = 50 * time.Second

// calm ends all faults: foreign files are removed, drivers run and give correct answers, the
// configuration is valid, and the daemon and the kubelet run.
func (w *world) calm() error {
	w.posts.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.idleManager()
	errs := []error{w.resumeFS()}
	if d := w.daemon; d != nil && d.frozen {
		errs = append(errs, actions["daemon thaw"](w, Step{}, nil))
	}
	for _, d := range w.drivers {
		errs = append(errs, w.leave(w.pathOf(d), d, true), w.leave(w.otherPath(d), d, true))
		delete(w.otherFrom, d.name)
		d.unhang()
		d.setReady(true)
		if d.lie != nil {
			errs = append(errs, actions["driver truth"](w, Step{}, d))
		}
		was := maps.Clone(d.truth.Topology)
		if w.cluster.Align(d.truth.Topology); !maps.Equal(was, d.truth.Topology) {
			errs = append(errs, w.again(d, "says the truth"))
		}
		if !d.Running() {
			errs = append(errs, w.up(d))
		}
		if want := (conf{present: true, enabled: true, byAlias: d.conf.byAlias, withdraw: d.role == measured}); d.conf != want {
			d.conf = want
			w.history.note(d.name, byConfig, "as it should be")
			errs = append(errs, w.configure(d))
		}
	}
	// Ignore the files that the test itself moved away.
	moved, err := filepath.Glob(filepath.Join(w.registry, "moved-*"))
	errs = append(errs, err)
	for _, path := range moved {
		errs = append(errs, gone(os.Remove(path)))
	}
	if w.daemon == nil {
		errs = append(errs, w.startDaemon("--keep-sockets"))
	}
	// A kubelet whose directory was recreated never looks there again.
	errs = append(errs, w.stopKubelet(), w.startKubelet())
	return errors.Join(errs...)
}

// eventually waits for a condition that has no event, and checks meanwhile.
func (w *world) eventually(limit time.Duration, missing func() string) string {
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	end := time.Now().Add(limit)
	for now := range tick.C {
		w.check(now)
		if len(w.failed()) > 0 {
			return "" // already reported
		}
		if why := missing(); why == "" || now.After(end) {
			return why
		}
	}
	return ""
}

// asItShouldBe returns an error text while the state is not the one to settle in.
func (w *world) asItShouldBe() string {
	if w.kubelet == nil { // it could not start: the directory was removed at that moment
		w.mu.Lock()
		err := w.startKubelet()
		w.mu.Unlock()
		if w.kubelet == nil {
			return fmt.Sprintf("the kubelet does not run: %v", err)
		}
	}
	s, err := w.api.status()
	if err != nil {
		return err.Error()
	}
	if s.ConfigError != "" {
		return "the configuration has errors: " + s.ConfigError
	}
	clear(w.damped)
	registered := w.kubelet.Registered()
	var wrong []string
	for _, d := range w.drivers {
		have := s.driver(d.name)
		damped, err := have.damped()
		if damped {
			w.damped[d.name] = have.DampedUntil
		}
		if err != nil {
			wrong = append(wrong, d.name+": "+err.Error())
		} else if why := w.driverAsItShouldBe(d, have, registered[d.name]); why != "" && !damped {
			wrong = append(wrong, d.name+": "+why)
		}
	}
	if len(s.Drivers) != len(w.drivers) {
		wrong = append(wrong, fmt.Sprintf("%d drivers in the status", len(s.Drivers)))
	}
	if len(s.Stuck) > 0 {
		wrong = append(wrong, fmt.Sprintf("a file system does not answer: %v", s.Stuck))
	}
	return strings.Join(wrong, "\n  ")
}

func (w *world) driverAsItShouldBe(d *Driver, s driverStatus, r fake.Registration) string {
	there := r.Driver != ""
	if d.flaw != sound {
		if there || s.Registration != "none" {
			return fmt.Sprintf("has the flaw %q and is registered: kubelet %t, status %+v", d.flaw, there, s)
		}
		return ""
	}
	endpoint := d.Socket
	if d.conf.byAlias {
		endpoint = d.alias
	}
	want := fake.Registration{Socket: w.pathOf(d), Driver: d.name, Endpoint: endpoint, NodeID: d.truth.NodeID, Limit: d.truth.MaxVolumes, Topology: d.truth.Topology}
	switch {
	case !there || s.State != string(fake.Registered):
		return fmt.Sprintf("kubelet: registered %t; status: %s (%s, %s): %s", there, s.State, s.Driver, s.Registration, s.Reason)
	case r.Socket != want.Socket:
		return "the kubelet knows it by " + r.Socket
	case r.Endpoint != want.Endpoint || r.NodeID != want.NodeID || r.Limit != want.Limit || !maps.Equal(r.Topology, want.Topology):
		return fmt.Sprintf("the kubelet knows %+v, the driver is %+v", r, want)
	case s.NodeID != want.NodeID || s.Limit != want.Limit || !maps.Equal(s.Topology, want.Topology):
		return fmt.Sprintf("the status shows %+v, the driver is %+v", s, want)
	case s.Driver != "ready":
		return fmt.Sprintf("the driver is %s in the status: %s", s.Driver, s.Reason)
	}
	return ""
}

// leftovers returns dot names that no bystander made.
func (w *world) leftovers() string {
	var left []string
	for _, dir := range []string{w.root, w.registry} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return err.Error()
		}
		for _, e := range entries {
			path := filepath.Join(dir, e.Name())
			if strings.HasPrefix(e.Name(), ".") && !slices.ContainsFunc(w.foreign, func(f *foreign) bool { return f.path == path }) {
				left = append(left, path)
			}
		}
	}
	return strings.Join(left, " ")
}

// atRest counts the daemon's resources once they no longer change.
func (w *world) atRest() (descriptors, goroutines int, open []string, err error) {
	stable := 0
	why := w.eventually(20*time.Second, func() string {
		n, list, derr := w.daemon.descriptors()
		g, _, gerr := w.api.goroutines()
		if err = errors.Join(derr, gerr); err != nil {
			return err.Error()
		}
		if n != descriptors || g != goroutines {
			stable = 0
		}
		descriptors, goroutines, open = n, g, list
		if stable++; stable < 40 {
			return fmt.Sprintf("%d descriptors, %d goroutines, not stable", n, g)
		}
		return ""
	})
	if why != "" {
		err = errors.New(why)
	}
	return descriptors, goroutines, open, err
}

// removedByStop returns an error text if the daemon left files after a stop without a store.
func (w *world) removedByStop() string {
	var left []string
	for _, d := range w.drivers {
		if _, _, err := lookAt(w.pathOf(d)); err == nil {
			left = append(left, w.pathOf(d))
		}
	}
	if l := w.leftovers(); l != "" {
		left = append(left, l)
	}
	return strings.Join(left, " ")
}

// isDamped reports whether a driver is still damped, or not in its final state.
func (w *world) isDamped(name string) string {
	if why := w.asItShouldBe(); why != "" {
		return why
	}
	if until, damped := w.damped[name]; damped {
		return fmt.Sprintf("%s is damped until %s", name, until)
	}
	return ""
}
