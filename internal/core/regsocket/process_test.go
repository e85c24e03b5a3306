package regsocket

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

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
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
func (w *world) process() (*Process, *observer) {
	o := &observer{}
	p := NewProcess(slog.New(slog.NewTextHandler(w.log, nil)), w.run, o.observe)
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
	p, o := w.process()
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
	if err := errors.Join(s.Close(t.Context(), false), p.Close()); err != nil {
		t.Fatal(err)
	}
	next, seen := w.process()
	if err := next.Adopt(); err != nil {
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
	last, seen := w.process()
	if err := last.Adopt(); err != nil {
		t.Fatal(err)
	}
	if k := seen.get(); k.EndedAt.Sub(ended).Abs() > time.Second {
		t.Errorf("ended at %s, was %s", k.EndedAt, ended)
	}
}

// A kubelet that ends while no daemon runs is noticed by the next daemon at its start.
func TestKubeletThatEndedWhileNoDaemonRan(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	p, _ := w.process()
	s := w.registrable(p, with(m, true))
	kubelet := w.startKubelet()
	slowly(t, "it is registered", func() bool { return s.Look().Notification.Registered })
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	kill(kubelet)
	next, seen := w.process()
	if err := next.Adopt(); err != nil {
		t.Fatal(err)
	}
	slowly(t, "the end is noticed", func() bool { return !seen.get().EndedAt.IsZero() })
}

// Without a record, or if another process has the pid of the record, no kubelet is followed: the
// second has ended, whenever that was.
func TestAdoptWithoutTheKubelet(t *testing.T) {
	w := newWorld(t)
	p, _ := w.process()
	s := w.registrable(p)
	kubelet := w.startKubelet()
	slowly(t, "it is registered", func() bool { return s.Look().Notification.Registered })
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	rec := p.last
	write := func(change func(*processRecord)) func() error {
		return func() error {
			other := rec
			change(&other)
			return p.host.writeJSON(p.file, other)
		}
	}
	for name, c := range map[string]struct {
		spoil          func() error
		isError, ended bool
	}{
		"no record":             {func() error { return os.Remove(p.file) }, false, false},
		"not a regular file":    {func() error { return errors.Join(os.Remove(p.file), os.Mkdir(p.file, 0o700)) }, true, false},
		"its start is unknown":  {write(func(r *processRecord) { r.Started = 0 }), false, false},
		"not a pid":             {write(func(r *processRecord) { r.PID = -1 }), true, false},
		"another has its pid":   {write(func(r *processRecord) { r.Started++ }), false, true},
		"nobody has its pid":    {write(func(r *processRecord) { r.PID = 1 << 22 }), false, true},
		"its end is recorded":   {write(func(r *processRecord) { r.Started++; r.EndedAt = time.Now() }), false, true},
		"it is the running one": {write(func(*processRecord) {}), false, false},
	} {
		if err := errors.Join(os.RemoveAll(p.file), p.host.writeJSON(p.file, rec), c.spoil()); err != nil {
			t.Fatal(err)
		}
		next, seen := w.process()
		if err := next.Adopt(); (err != nil) != c.isError {
			t.Errorf("%s: %v", name, err)
		}
		if c.ended {
			eventually(t, name, func() bool { return !seen.get().EndedAt.IsZero() })
		}
		if followed := seen.get().PID == kubelet.Process.Pid && seen.get().EndedAt.IsZero(); followed != (name == "it is the running one") {
			t.Errorf("%s: %+v is followed", name, seen.get())
		}
		if err := next.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Without a record the end is noticed, but not after a restart.
func TestKubeletThatIsNotRecorded(t *testing.T) {
	w := newWorld(t)
	w.run = w.root + "/file/run"
	if err := os.WriteFile(w.root+"/file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p, o := w.process()
	s := w.registrable(p)
	kubelet := w.startKubelet()
	slowly(t, "it is registered", func() bool { return s.Look().Notification.Registered })
	slowly(t, "the log says it", func() bool { return strings.Contains(w.log.String(), "will not be noticed") })
	kill(kubelet)
	slowly(t, "the end is noticed", func() bool { return !o.get().EndedAt.IsZero() })
}
