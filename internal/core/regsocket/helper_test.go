package regsocket

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/worker"
	"csi-registrar/internal/test/fake"
)

// world is a node as far as this package sees it.
type world struct {
	t    *testing.T
	root string // the kubelet's root_dir
	dir  string // plugins_registry
	run  string
	log  *fake.Buffer
}

// newWorld makes a root_dir with a plugins_registry, and checks at the end that nothing leaked.
func newWorld(t *testing.T) *world {
	t.Helper()
	checkLeaks(t)
	top := fake.ShortDir(t)
	w := &world{t: t, root: top, run: filepath.Join(top, "run"), log: &fake.Buffer{}}
	w.dir = rootdir.PluginsRegistry(w.root)
	if err := os.MkdirAll(w.dir, 0o750); err != nil {
		t.Fatal(err)
	}
	return w
}

// hints is a rate.Hinter that only the test gives hints to.
type hints chan struct{}

func (h hints) Hint() {
	select {
	case h <- struct{}{}:
	default:
	}
}
func (h hints) Hints() <-chan struct{} { return h }
func (hints) Close()                   {}

// options returns the required options of a Registry.
func options() Options {
	return Options{
		Log: slog.New(slog.DiscardHandler), Pool: worker.NewPool(),
		Watch: func(...string) rate.Hinter { return make(hints, 1) },
	}
}

func withRun(w *world) Options {
	o := options()
	o.RunDir = w.run
	return o
}

// look returns the state after a Check.
func look(t *testing.T, s *Socket) status.Socket {
	t.Helper()
	if err := s.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s.Look()
}

func pathOf(r *Registry, name string) string { return filepath.Join(r.dir.path, name+"-reg.sock") }

// isGone reports whether nothing is at the path.
func isGone(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, os.ErrNotExist)
}

// open starts a daemon's registry; the sockets must be closed before it ends.
func (w *world) open(change ...func(*Options)) *Registry {
	w.t.Helper()
	o := options()
	o.RunDir, o.Log = w.run, slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	for _, c := range change {
		c(&o)
	}
	r, err := Open(w.root, o)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		r.mu.Lock()
		var open []*Socket
		for _, s := range r.sockets {
			open = append(open, s)
		}
		r.mu.Unlock()
		for _, s := range open {
			s.Close(context.Background(), false)
		}
		r.Close(context.Background())
	})
	return r
}

func with(store Store, keep bool) func(*Options) {
	return func(o *Options) { o.Store, o.KeepSockets = store, keep }
}

func socket(t *testing.T, r *Registry, name string) *Socket {
	t.Helper()
	s, err := r.Socket(name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func announcement(name string) status.Announcement {
	return status.Announcement{
		Endpoint: "/run/" + name + "/csi.sock", Versions: []string{"1.0.0"},
		Identity: status.Identity{Name: name, Version: "v1", NodeID: "n1"},
	}
}

func publish(t *testing.T, s *Socket) {
	t.Helper()
	if err := s.Publish(t.Context(), announcement(s.name)); err != nil {
		t.Fatal(err)
	}
}

// published makes a daemon with one published driver.
func (w *world) published(name string, change ...func(*Options)) (*Registry, *Socket) {
	w.t.Helper()
	r := w.open(change...)
	s := socket(w.t, r, name)
	publish(w.t, s)
	return r, s
}

func wantPlace(t *testing.T, s *Socket, want status.Place) {
	t.Helper()
	if got := look(t, s).Place; got != want {
		t.Fatalf("place is %s, want %s", got, want)
	}
}

func wantConflict(t *testing.T, err error, holder string) {
	t.Helper()
	var c interface{ Conflict() bool }
	if !errors.As(err, &c) || !c.Conflict() || !strings.Contains(err.Error(), holder) {
		t.Fatalf("error is %v, want a conflict with %q", err, holder)
	}
}

// cannotAdopt reports whether it was logged that a socket of an earlier process cannot be adopted.
func (w *world) cannotAdopt() bool { return strings.Contains(w.log.String(), "cannot adopt") }

// recorded returns the record of a driver; the zero one if there is none.
func recorded(r *Registry, name string) record {
	rec, _ := newHost().readRecord(r.recordOf(name))
	return rec
}

func isConflict(err error) bool {
	_, ok := errors.AsType[ConflictError](err)
	return ok
}

// checkLeaks compares goroutines and descriptors at the end with those now.
func checkLeaks(t *testing.T) {
	t.Helper()
	goroutines, fds := runtime.NumGoroutine(), descriptors(t)
	t.Cleanup(func() {
		var g int
		var f []string
		for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
			g, f = runtime.NumGoroutine(), descriptors(t)
			if g <= goroutines && len(f) <= len(fds) {
				return
			}
		}
		buf := make([]byte, 1<<20)
		t.Errorf("leaked: %d goroutines were %d; descriptors %v were %v\n%s", g, goroutines, f, fds, buf[:runtime.Stack(buf, true)])
	})
}

func descriptors(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		target, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && !strings.HasSuffix(target, fmt.Sprintf("/proc/%d/fd", os.Getpid())) && !strings.Contains(target, "anon_inode") {
			names = append(names, e.Name()+" "+target)
		}
	}
	slices.Sort(names)
	return names
}

// eventually waits until cond holds.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not in time: %s", what)
		}
	}
}

func sameAnnouncement(a, b status.Announcement) bool {
	return a.Endpoint == b.Endpoint && slices.Equal(a.Versions, b.Versions) && a.Identity.Equal(b.Identity)
}

// discard ends a Socket as the agent does after its registration was withdrawn.
func discard(t *testing.T, s *Socket) error {
	return s.Close(t.Context(), true)
}
