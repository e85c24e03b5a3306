package kubelet

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"csi-registrar/internal/test/fake"
	"csi-registrar/internal/node/status"
)

// runKubelet is a child process: a kubelet that registers what is in the directory until it is
// killed.
func runKubelet(dir string) int {
	_, err := fake.StartKubelet(dir, fake.NewAPIServer(), func(e fake.Event) {
		if e.What != fake.Reconciled {
			fmt.Fprintln(os.Stderr, e.What, e.Reason)
		}
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	select {}
}

// observer collects what a Process reports.
type observer struct {
	mu   sync.Mutex
	last status.Kubelet
}

func (o *observer) observe(k status.Kubelet) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.last = k
}

func (o *observer) get() status.Kubelet {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.last
}

// process makes the Process of a daemon.
func (w *world) process(store Store) (*Process, *observer) {
	o := &observer{}
	p := NewProcess(ProcessOptions{Log: slog.New(slog.NewTextHandler(w.log, nil)), Store: store, RunDir: w.run, Observe: o.observe})
	w.t.Cleanup(func() {
		if err := p.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			w.t.Error(err)
		}
	})
	return p, o
}

// startKubelet starts a kubelet in a process of its own.
func (w *world) startKubelet() *exec.Cmd {
	w.t.Helper()
	cmd := startChild(w.t, "kubelet", w.dir)
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { kill(cmd) })
	return cmd
}

func kill(cmd *exec.Cmd) {
	_ = cmd.Process.Kill() // fails once it has ended
	_ = cmd.Wait()
}

// registrable publishes a driver that the fake kubelet accepts.
func (w *world) registrable(p *Process, change ...func(*Options)) *Socket {
	w.t.Helper()
	endpoint := w.root + "/csi.sock"
	driver := fake.NewDriver(endpoint, fake.Healthy("a"))
	if _, err := driver.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(driver.Kill)
	s := socket(w.t, w.open(append(change, func(o *Options) { o.Process = p })...), "a")
	a := announcement("a")
	a.Endpoint = endpoint
	if err := s.Publish(w.t.Context(), a); err != nil {
		w.t.Fatal(err)
	}
	return s
}

// slowly is eventually, for what a kubelet does once a second.
func slowly(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not in time: %s", what)
		}
	}
}

func TestEndOfTheKubeletIsNoticed(t *testing.T) {
	if !isolate(t, nil) {
		return
	}
	w := newWorld(t)
	m := newManager(t)
	p, o := w.process(m)
	s := w.registrable(p, with(m, true))
	first := w.startKubelet()
	slowly(t, "it is registered", func() bool { return s.Look().Notification.Registered })
	if k := o.get(); k.PID != first.Process.Pid || !k.EndedAt.IsZero() || k.ConfirmedAt.IsZero() {
		t.Fatalf("followed is %+v, want pid %d", k, first.Process.Pid)
	}
	killed := time.Now()
	kill(first)
	slowly(t, "the end is noticed", func() bool { return !o.get().EndedAt.IsZero() })
	t.Logf("noticed after %s", o.get().EndedAt.Sub(killed))
	if k := o.get(); k.PID != first.Process.Pid || time.Since(k.EndedAt) > time.Minute {
		t.Errorf("%+v", k)
	}

	// GetInfo is not enough: doctor calls it as well.
	mustAnswer(t, s.path, s.Look().Announced.Endpoint)
	if o.get().EndedAt.IsZero() {
		t.Error("GetInfo was taken for a kubelet's answer")
	}
	second := w.startKubelet()
	slowly(t, "another kubelet has answered", func() bool { return o.get().EndedAt.IsZero() })
	if k := o.get(); k.PID != second.Process.Pid {
		t.Errorf("%+v, want pid %d", k, second.Process.Pid)
	}

	// The next daemon notices the end too, although no kubelet has called it.
	if err := errors.Join(s.Close(t.Context()), p.Close()); err != nil {
		t.Fatal(err)
	}
	next, seen := w.process(m)
	if err := next.Adopt(t.Context(), m.pass(t, ProcessName)); err != nil {
		t.Fatal(err)
	}
	if k := seen.get(); k.PID != second.Process.Pid || !k.EndedAt.IsZero() {
		t.Errorf("adopted %+v, want pid %d", k, second.Process.Pid)
	}
	kill(second)
	slowly(t, "the end is noticed again", func() bool { return !seen.get().EndedAt.IsZero() })
	ended := seen.get().EndedAt
	if err := next.Close(); err != nil {
		t.Fatal(err)
	}

	// The daemon after that knows when the kubelet ended.
	last, seen := w.process(m)
	if err := last.Adopt(t.Context(), m.pass(t, ProcessName)); err != nil {
		t.Fatal(err)
	}
	if k := seen.get(); !k.EndedAt.Equal(ended) {
		t.Errorf("ended at %s, was %s", k.EndedAt, ended)
	}
}

// A kubelet that ends while no daemon runs is noticed by the next daemon at its start.
func TestKubeletThatEndedWhileNoDaemonRan(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	p, _ := w.process(m)
	s := w.registrable(p, with(m, true))
	kubelet := w.startKubelet()
	slowly(t, "it is registered", func() bool { return s.Look().Notification.Registered })
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	kill(kubelet)
	next, seen := w.process(m)
	if err := next.Adopt(t.Context(), m.pass(t, ProcessName)); err != nil {
		t.Fatal(err)
	}
	slowly(t, "the end is noticed", func() bool { return !seen.get().EndedAt.IsZero() })
}

// A pidfd that does not belong to the record is not followed, and leaves the store.
func TestPidfdWithoutItsRecord(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	p, _ := w.process(m)
	s := w.registrable(p, with(m, true))
	w.startKubelet()
	slowly(t, "it is registered", func() bool { return s.Look().Notification.Registered })
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	rec, err := p.readRecord()
	if err != nil {
		t.Fatal(err)
	}
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	pidfd := m.pass(t, ProcessName)[0]
	defer pidfd.Close()
	for name, c := range map[string]struct {
		stored  *os.File
		spoil   func() error
		isError bool
	}{
		"no record":          {pidfd, func() error { return os.Remove(p.recordPath()) }, true},
		"not a regular file": {pidfd, func() error { return errors.Join(os.Remove(p.recordPath()), os.Mkdir(p.recordPath(), 0o700)) }, true},
		"another process's":  {pidfd, func() error { return p.host.writeJSON(p.recordPath(), processRecord{Inode: 1}) }, false},
		"not a pidfd":        {null, func() error { return nil }, false},
	} {
		if err := errors.Join(os.RemoveAll(p.recordPath()), p.host.writeJSON(p.recordPath(), rec), m.Keep(t.Context(), ProcessName, c.stored), c.spoil()); err != nil {
			t.Fatal(err)
		}
		next, seen := w.process(m)
		if err := next.Adopt(t.Context(), m.pass(t, ProcessName)); (err != nil) != c.isError {
			t.Errorf("%s: %v", name, err)
		}
		if k := seen.get(); k != (status.Kubelet{}) || m.count(ProcessName) != 0 {
			t.Errorf("%s: %+v is followed, %d in the store", name, k, m.count(ProcessName))
		}
	}
}

// If the store is full, the end is noticed, but not after a restart.
func TestPidfdThatIsNotKept(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	m.fail = errors.New("the store is full")
	p, o := w.process(m)
	s := w.registrable(p)
	kubelet := w.startKubelet()
	slowly(t, "it is registered", func() bool { return s.Look().Notification.Registered })
	slowly(t, "the log says it", func() bool { return strings.Contains(w.log.String(), "the store is full") })
	kill(kubelet)
	slowly(t, "the end is noticed", func() bool { return !o.get().EndedAt.IsZero() })
}
