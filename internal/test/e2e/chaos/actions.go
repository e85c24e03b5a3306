package chaos

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"csi-registrar/internal/test/fake"
)

// An action performs a step while it holds the world's lock. A step that is no longer applicable
// does nothing. An error is a failure of the test itself, or of a daemon that does not end.
type action func(w *world, s Step, d *Driver) error

// actions are the actions by their names in the plan.
var actions = allActions()

func allActions() map[string]action {
	all := map[string]action{}
	add := func(name string, a action) { all[name] = a }

	add("driver start", func(w *world, s Step, d *Driver) error { return w.up(d) })
	add("driver stop", func(w *world, s Step, d *Driver) error { return w.down(d, false) })
	add("driver kill", func(w *world, s Step, d *Driver) error { return w.down(d, true) })
	add("driver restart", func(w *world, s Step, d *Driver) error {
		if err := w.down(d, s.A < 500); err != nil || s.B < 500 {
			return err // started by the action that follows
		}
		return w.up(d)
	})
	add("driver hang", func(w *world, s Step, d *Driver) error {
		methods := []string{fake.GetPluginInfo, fake.Probe, fake.NodeGetInfo}
		d.hangIn(methods[s.A%len(methods)])
		return nil
	})
	add("driver unhang", func(w *world, s Step, d *Driver) error {
		d.unhang()
		return nil
	})
	add("driver not ready", func(w *world, s Step, d *Driver) error { d.setReady(false); return w.again(d, "not ready") })
	add("driver ready", func(w *world, s Step, d *Driver) error { d.setReady(true); return nil })
	add("driver lie", func(w *world, s Step, d *Driver) error {
		d.lie = d.lying()
		d.lie.Name = []string{"other." + d.name, "../../" + d.name, "Under_score!", ""}[s.A%4]
		return w.again(d, "says it is "+d.lie.Name)
	})
	add("driver move topology", func(w *world, s Step, d *Driver) error {
		d.lie = d.lying()
		d.lie.Topology["topology."+d.name+"/zone"] = "z" + strconv.Itoa(2+s.A%3)
		return w.again(d, "moves its topology")
	})
	add("driver truth", func(w *world, s Step, d *Driver) error {
		d.lie = nil
		w.cluster.Align(d.truth.Topology)
		return w.again(d, "says the truth")
	})
	add("driver change", func(w *world, s Step, d *Driver) error {
		switch s.A % 3 {
		case 0:
			d.truth.NodeID = fmt.Sprintf("node-%d-%s", s.B, d.name)
		case 1:
			d.truth.MaxVolumes = int64(s.B)
		case 2:
			d.truth.Topology[fmt.Sprintf("topology.%s/k%d", d.name, s.B%5)] = "v"
		}
		return w.again(d, "changes")
	})
	add("driver hangs at start", func(w *world, s Step, d *Driver) error {
		err := w.down(d, s.A < 500)
		d.hangIn(fake.NodeGetInfo)
		return errors.Join(err, w.up(d))
	})
	add("driver replace", func(w *world, s Step, d *Driver) error {
		w.history.note(d.name, byDriver, "replaced")
		return d.replace()
	})
	add("driver directory", func(w *world, s Step, d *Driver) error {
		// Directory first, so that the daemon is still connected to a socket without a name.
		w.history.note(d.name, byDriver, "directory removed")
		return errors.Join(os.RemoveAll(d.dir), d.stop(true))
	})

	add("file system hang", func(w *world, s Step, d *Driver) error { return w.hangFS() })
	add("file system answer", func(w *world, s Step, d *Driver) error { return w.resumeFS() })
	add("manager slow", func(w *world, s Step, d *Driver) error { return w.busyManager(s, false) })
	add("manager stop", func(w *world, s Step, d *Driver) error { return w.busyManager(s, true) })

	add("kubelet stop", func(w *world, s Step, d *Driver) error { return w.stopKubelet() })
	add("kubelet start", func(w *world, s Step, d *Driver) error { return w.startKubelet() })
	add("kubelet restart", func(w *world, s Step, d *Driver) error {
		return errors.Join(w.stopKubelet(), w.startKubelet())
	})

	add("daemon start", func(w *world, s Step, d *Driver) error {
		if w.daemon != nil {
			return nil
		}
		return w.startDaemon("--keep-sockets")
	})
	add("daemon kill", func(w *world, s Step, d *Driver) error { return w.stopDaemon(true) })
	add("daemon restart", func(w *world, s Step, d *Driver) error { return w.stopDaemon(false) })
	add("daemon again", func(w *world, s Step, d *Driver) error {
		err := w.stopDaemon(false)
		return errors.Join(err, w.startDaemon("--keep-sockets"))
	})
	add("daemon hang up", func(w *world, s Step, d *Driver) error {
		if !w.ready() {
			return nil // SIGHUP would end a process that does not handle it yet
		}
		return w.daemon.signal(syscall.SIGHUP)
	})
	add("daemon reload", func(w *world, s Step, d *Driver) error { w.post("/v1/reload"); return nil })
	add("daemon reregister", func(w *world, s Step, d *Driver) error {
		w.history.note(d.name, asked, "reregister")
		w.post("/v1/drivers/" + d.name + "/reregister")
		return nil
	})
	add("daemon freeze", func(w *world, s Step, d *Driver) error {
		if w.daemon == nil {
			return nil
		}
		w.noteAll(crashed, "daemon frozen")
		w.daemon.frozen, w.awayAt = true, time.Now()
		return w.daemon.signal(syscall.SIGSTOP)
	})
	add("daemon thaw", func(w *world, s Step, d *Driver) error {
		if w.daemon == nil || !w.daemon.frozen {
			return nil
		}
		w.daemon.frozen, w.awayAt = false, time.Now()
		return w.daemon.signal(syscall.SIGCONT)
	})

	add("socket remove", func(w *world, s Step, d *Driver) error {
		return w.touch(d, "removed", os.Remove)
	})
	add("socket move within", func(w *world, s Step, d *Driver) error {
		w.made++
		return w.touch(d, "moved within", func(path string) error {
			return os.Rename(path, filepath.Join(w.registry, fmt.Sprintf("moved-%d", w.made)))
		})
	})
	add("socket move out", func(w *world, s Step, d *Driver) error {
		return w.touch(d, "moved out", func(path string) error {
			w.made++
			return os.Rename(path, filepath.Join(w.scratch, fmt.Sprintf("out-%d", w.made)))
		})
	})
	for act, kind := range map[string]string{
		"socket to file": aFile, "socket to directory": aDirectory, "socket to link": aLink, "socket to mute": aMute, "socket to sidecar": aSidecar,
	} {
		add(act, func(w *world, s Step, d *Driver) error { return w.replace(d, kind, s.A < 600) })
	}
	add("socket leave", func(w *world, s Step, d *Driver) error { return w.leave(w.pathOf(d), d, s.B < 500) })
	add("socket other", func(w *world, s Step, d *Driver) error {
		path := w.otherPath(d)
		if w.foreignAt(path) != nil {
			return nil
		}
		w.history.note(d.name, onPath, "other registrar came")
		f, err := makeForeign(w.scratch, path, aSidecar, d, false)
		if err != nil {
			return whileThere(err)
		}
		w.foreign = append(w.foreign, f)
		w.otherFrom[d.name] = time.Now()
		return nil
	})
	add("other leave", func(w *world, s Step, d *Driver) error {
		delete(w.otherFrom, d.name)
		// Also removes its file: a dead socket at this path belongs to no driver.
		return w.leave(w.otherPath(d), d, true)
	})
	add("bystander", func(w *world, s Step, d *Driver) error { return w.bystander(s, d) })
	add("registry remove", func(w *world, s Step, d *Driver) error {
		w.noteAll(onPath, "registry removed")
		w.registryAt = time.Now()
		w.forgetForeign()
		// This fails if the daemon restores files at the same time, so it is retried.
		err := os.RemoveAll(w.registry)
		for range 3 {
			if err != nil {
				err = os.RemoveAll(w.registry)
			}
		}
		w.say("registry removed: %v", err)
		w.forgetForeign()
		if s.A < 300 {
			return already(os.Mkdir(w.registry, 0o755))
		}
		return nil
	})
	add("registry move away", func(w *world, s Step, d *Driver) error {
		w.noteAll(onPath, "registry moved away")
		w.registryAt = time.Now()
		w.made++
		if err := gone(os.Rename(w.registry, filepath.Join(w.scratch, fmt.Sprintf("registry-%d", w.made)))); err != nil {
			return err
		}
		w.forgetForeign()
		if s.A < 300 {
			return already(os.Mkdir(w.registry, 0o755))
		}
		return nil
	})

	conf := func(what string, change func(d *Driver)) action {
		return func(w *world, s Step, d *Driver) error {
			was := d.conf
			change(d)
			if d.conf == was {
				return nil
			}
			w.history.note(d.name, byConfig, what)
			return w.configure(d)
		}
	}
	add("config remove", conf("removed", func(d *Driver) { d.conf.present = false }))
	add("config restore", conf("restored", func(d *Driver) { d.conf.present = true }))
	add("config break", conf("broken", func(d *Driver) { d.conf.broken = true }))
	add("config fix", conf("fixed", func(d *Driver) { d.conf.broken = false }))
	add("config endpoint", conf("another endpoint", func(d *Driver) { d.conf.byAlias = !d.conf.byAlias }))
	add("config disable", conf("disabled", func(d *Driver) { d.conf.enabled = false }))
	add("config enable", conf("enabled", func(d *Driver) { d.conf.enabled = true }))
	add("config withdraw", conf("keep or withdraw", func(d *Driver) { d.conf.withdraw = !d.conf.withdraw }))
	return all
}

// do carries out a step.
func (w *world) do(s Step) error {
	d := w.drivers[s.Driver]
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.blocked(s, d) {
		return nil
	}
	w.say("%v %s", s, d.name)
	w.figures["steps"]++
	if err := actions[s.Act](w, s, d); err != nil {
		return fmt.Errorf("%v: %w", s, err)
	}
	return nil
}

func (w *world) up(d *Driver) error {
	w.history.note(d.name, byDriver, "started")
	return d.start()
}

func (w *world) down(d *Driver, killed bool) error {
	w.history.note(d.name, byDriver, "stopped")
	return d.stop(killed)
}

// again restarts a running driver, because its answers have changed.
func (w *world) again(d *Driver, what string) error {
	w.history.note(d.name, byDriver, what)
	if !d.Running() {
		return nil
	}
	return errors.Join(d.stop(false), d.start())
}

func (w *world) count(what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.figures[what]++
}

// post sends a request to the daemon. The daemon may refuse it.
func (w *world) post(path string) {
	w.posts.Go(func() {
		_, err := w.api.do(http.MethodPost, path)
		w.say("POST %s: %v", path, err)
	})
}

// touch changes a registration socket that belongs to the daemon.
func (w *world) touch(d *Driver, what string, do func(path string) error) error {
	path := w.pathOf(d)
	if w.foreignAt(path) != nil {
		return nil
	}
	w.history.note(d.name, onPath, what)
	return gone(do(path))
}

func already(err error) error {
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	return err
}
