package chaos

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/test/fake"
)

// world is the node: its processes and files, and the history of both.
type world struct {
	t        testing.TB
	dir      string
	root     string // the kubelet's
	registry string
	etc      string // --config-root
	scratch  string // files are made here and moved into place, or moved away to here
	plan     *Plan
	spawner  *spawner
	api      api
	log      *os.File // everything in one file, to find the cause of a failure
	noFS     error    // why there is no HangFS
	keep     bool     // the directory is kept, even without a failure

	// Only used by the goroutine that carries out the steps.
	drivers []*Driver
	kubelet *fake.Kubelet
	cluster *fake.APIServer
	posts   sync.WaitGroup       // pending requests to the daemon
	damped  map[string]time.Time // drivers damped at the last check, and until when
	made    int                  // files made so far, for their names

	// mu is held while a step changes files, so that a check sees all of its changes or none.
	mu        sync.Mutex
	history   history
	foreign   []*foreign
	byName    map[string]*Driver
	daemon    *Daemon
	fed       int       // how often the watchdog was fed, and …
	fedAt     time.Time // … since when it is so often
	otherFrom map[string]time.Time

	fs         *fake.HangFS // nil if not available here
	hangsSince time.Time    // zero while it answers
	busy       busy
	registryAt time.Time // when plugins_registry was last removed or moved
	chaos      bool      // the plan is being carried out
	mutedUntil map[string]time.Time
	// Changes of each driver's registration socket by the current daemon.
	changes map[string]int
	// Durations by measurement and by concurrent fault.
	times map[string]map[string][]time.Duration

	published map[string]fileID    // the last file at a driver's path, and …
	upAt      map[string]time.Time // … when that was first seen
	awayAt    time.Time            // when the daemon was last unable to answer
	suspects  []fake.Event         // deregistrations to check once the log has been read
	figures   map[string]int
	events    map[string]int // the kubelet's registrations and deregistrations, by driver
	wrong     []string
}

const maxWrong = 10

func newWorld(t testing.TB, binary string, seed uint64, drivers int) (*world, error) {
	dir, err := os.MkdirTemp("/tmp", "c") // short, wherever TMPDIR points
	if err != nil {
		return nil, err
	}
	w := &world{
		t: t, dir: dir, root: filepath.Join(dir, "k"), etc: filepath.Join(dir, "r"), scratch: filepath.Join(dir, "s"),
		plan:    NewPlan(seed, drivers),
		cluster: fake.NewAPIServer(),
		byName:  map[string]*Driver{}, otherFrom: map[string]time.Time{}, published: map[string]fileID{}, upAt: map[string]time.Time{},
		history: history{map[string][]deed{}}, figures: map[string]int{}, events: map[string]int{},
		mutedUntil: map[string]time.Time{}, changes: map[string]int{}, damped: map[string]time.Time{}, times: map[string]map[string][]time.Duration{},
	}
	w.registry = rootdir.PluginsRegistry(w.root)
	errs := []error{os.Chmod(dir, 0o755)}
	run, hang := filepath.Join(dir, "d"), filepath.Join(dir, "h")
	for _, d := range []string{w.root, w.registry, run, hang, w.scratch, filepath.Join(w.etc, "etc", "csi-registrar", "conf.d")} {
		errs = append(errs, os.MkdirAll(d, 0o755))
	}
	errs = append(errs, os.WriteFile(filepath.Join(w.etc, "etc", "csi-registrar", "config.toml"),
		fmt.Appendf(nil, "[kubelet]\nroot_dir = %q\n[log]\nlevel = \"debug\"\nformat = \"text\"\n", w.root), 0o644))
	w.log, err = os.Create(filepath.Join(dir, "log"))
	errs = append(errs, err)
	w.fs, err = fake.MountHangFS(hang)
	if errors.Is(err, os.ErrPermission) || errors.Is(err, os.ErrNotExist) {
		w.noFS, err = err, nil
	}
	errs = append(errs, err)
	manager, err := fake.StartManager(dir)
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, err
	}
	w.spawner = &spawner{binary: binary, root: w.etc, manager: manager, line: w.heard}
	w.api = newAPI(w.etc)
	w.populate(drivers, run, hang)
	for _, d := range w.drivers {
		w.byName[d.name] = d
		if err := errors.Join(w.configure(d), d.start()); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// populate makes the drivers: those of the plan first.
func (w *world) populate(many int, run, hang string) {
	flaws := []flaw{otherName, neverReady, failingNode}
	for i := range many {
		f, dir, hangable := sound, run, w.fs != nil && i%6 == 2
		if i%8 == 5 {
			f = flaws[i/8%len(flaws)]
		}
		if hangable {
			dir = hang
		}
		d := newDriver(fmt.Sprintf("d%02d", i), dir, f)
		d.hangable = hangable
		w.drivers = append(w.drivers, d)
	}
	for i := range 3 {
		d := newDriver(fmt.Sprintf("m%02d", i), run, sound)
		d.role, d.conf.withdraw = measured, true // so that it can register again
		w.drivers = append(w.drivers, d)
	}
	d := newDriver("f00", run, sound)
	d.role = flapping
	w.drivers = append(w.drivers, d)
}

// close ends everything, and keeps the directory after a failure.
func (w *world) close() {
	w.posts.Wait()
	w.idleManager()
	var errs []error
	if w.fs != nil {
		errs = append(errs, w.fs.Resume())
	}
	if w.kubelet != nil {
		errs = append(errs, w.kubelet.Stop())
	}
	if w.daemon != nil && w.daemon.running() {
		errs = append(errs, w.daemon.kill())
	}
	for _, d := range w.drivers {
		errs = append(errs, d.stop(false))
	}
	for _, f := range w.foreign {
		errs = append(errs, f.crash())
	}
	if w.fs != nil {
		errs = append(errs, w.fs.Close())
	}
	errs = append(errs, w.spawner.manager.Close(), w.log.Close())
	if !w.t.Failed() && !w.keep {
		errs = append(errs, os.RemoveAll(w.dir))
	}
	if err := errors.Join(errs...); err != nil {
		w.t.Error(err)
	}
}

// say writes a line to the log, which also has the daemon's lines.
func (w *world) say(format string, args ...any) {
	fmt.Fprintf(w.log, "%s "+format+"\n", append([]any{time.Now().Format("15:04:05.000")}, args...)...)
}

// violated records that an invariant does not hold. mu must be held.
func (w *world) violated(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	w.say("WRONG: %s", text)
	if len(w.wrong) < maxWrong {
		w.wrong = append(w.wrong, text)
	}
}

func (w *world) failed() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.wrong)
}

func (w *world) pathOf(d *Driver) string {
	return filepath.Join(w.registry, rootdir.SocketName(d.name))
}

func (w *world) confPath(d *Driver) string {
	return filepath.Join(w.etc, "etc", "csi-registrar", "conf.d", "50-"+d.name+".toml")
}

// configure writes a driver's drop-in as its conf says.
func (w *world) configure(d *Driver) error {
	if !d.conf.present {
		return gone(os.Remove(w.confPath(d)))
	}
	// Atomically, as editors do.
	temporary := filepath.Join(w.scratch, "conf")
	if err := os.WriteFile(temporary, []byte(d.table()), 0o644); err != nil {
		return err
	}
	return os.Rename(temporary, w.confPath(d))
}

// ready reports whether the daemon has sent READY=1.
func (w *world) ready() bool {
	return w.daemon != nil && w.daemon.running() && w.spawner.manager.State().Ready > w.daemon.before
}

// noteAll records a deed for all drivers.
func (w *world) noteAll(k kind, what string) {
	for name := range maps.Keys(w.byName) {
		w.history.note(name, k, what)
	}
}

// startDaemon starts a daemon with the contents of the store.
func (w *world) startDaemon(args ...string) error {
	w.mu.Unlock()
	d, err := w.spawner.start(args...) // waits until the service manager is not busy
	w.mu.Lock()
	if err != nil {
		return err
	}
	clear(w.changes)
	for name, until := range w.mutedUntil {
		if until.After(d.began) {
			w.mutedUntil[name] = d.began.Add(readWithin)
		}
	}
	w.figures["daemons"]++
	w.daemon = d
	return nil
}

// stopDaemon ends the daemon with SIGKILL or SIGTERM. It releases the lock meanwhile, so that the
// log can be read.
func (w *world) stopDaemon(kill bool) error {
	d := w.daemon
	if d == nil {
		return nil
	}
	wasReady := w.ready()
	w.daemon = nil
	if kill {
		w.noteAll(crashed, "daemon killed")
		for name, at := range w.upAt { // the daemon had the only copy
			if w.managerBusy(at) {
				w.history.note(name, onPath, "not sent to the descriptor store when the daemon was killed")
			}
		}
	}
	if w.managerBusy(time.Now()) { // the next daemon may start too late for a Notify
		w.noteAll(crashed, "daemon stopped while the service manager was busy")
	}
	var err error
	if d.frozen {
		err = d.signal(syscall.SIGCONT)
	}
	w.mu.Unlock()
	defer w.mu.Lock()
	if kill {
		return errors.Join(err, d.kill())
	}
	return errors.Join(err, d.terminate(wasReady))
}
