package registrar

import (
	"context"
	"errors"
	"log/slog"
	"reflect"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
)

// world is a driver, a directory and a kubelet in one, for tests under virtual time.
type world struct {
	mu     sync.Mutex
	hints  chan struct{} // the driver's
	shints chan struct{} // the socket's

	report status.Report
	answer status.Report // the last one
	hang   bool          // Ask answers only when its context ends
	asks   int
	takes  time.Duration        // an answer
	probe  func() status.Report // nil: report
	probes int

	sock        status.Socket
	checks      int
	checkErr    error
	publishErr  error
	onPublish   func()
	hold        chan struct{} // publishing waits for it
	withdrawErr error
	published   []status.Announcement
	withdrawals int // tried
	withdrawn   int
	accept      func(status.Announcement) (bool, string) // the kubelet; nil: there is none
	delay       time.Duration                            // of the kubelet
}

func newWorld() *world {
	return &world{
		hints: make(chan struct{}, 1), shints: make(chan struct{}, 1),
		report: status.Report{Driver: status.Absent, Reason: "no such file"},
		sock:   status.Socket{Path: "/reg/foo-reg.sock", Place: status.Missing},
		accept: func(status.Announcement) (bool, string) { return true, "" },
	}
}

// readyWorld returns a world whose driver is ready.
func readyWorld() *world {
	w := newWorld()
	w.report = ready()
	return w
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// set changes the world and pokes whoever watches.
func (w *world) set(f func(*world)) {
	w.mu.Lock()
	f(w)
	w.mu.Unlock()
	poke(w.hints)
	poke(w.shints)
}

func (w *world) Ask(ctx context.Context, why driver.Why, progress func(status.Report)) status.Report {
	w.mu.Lock()
	rep, last := w.report, w.answer
	w.mu.Unlock()
	switch {
	case why == driver.Probing:
		return w.callProbe(ctx)
	case why == driver.Hinted && rep.Driver == status.Starting && rep.Connection != 0 && !w.hang && reflect.DeepEqual(rep, last):
		return status.Report{}
	}
	return w.ask(ctx, progress)
}

func (w *world) ask(ctx context.Context, progress func(status.Report)) status.Report {
	w.mu.Lock()
	w.asks++
	hang, rep, takes := w.hang, w.report, w.takes
	w.mu.Unlock()
	if takes > time.Second {
		takes -= time.Second
		select {
		case <-time.After(time.Second):
			progress(status.Report{Driver: status.Starting, Reason: "has not answered for 1s"})
		case <-ctx.Done():
		}
	}
	select {
	case <-time.After(takes):
	case <-ctx.Done():
	}
	if hang {
		progress(status.Report{Driver: status.Starting, Reason: "has not answered for 1s"})
		<-ctx.Done()
		return status.Report{Driver: status.Starting, Reason: "cancelled"}
	}
	w.mu.Lock()
	w.answer = rep
	w.mu.Unlock()
	return rep
}

func (w *world) callProbe(ctx context.Context) status.Report {
	w.mu.Lock()
	w.probes++
	rep := w.report
	if w.probe != nil {
		rep = w.probe()
	}
	takes := w.takes
	w.mu.Unlock()
	select {
	case <-time.After(takes):
	case <-ctx.Done():
	}
	return rep
}
func (w *world) Hints() <-chan struct{} { return w.hints }
func (w *world) Close()                 {}

type fakeSocket struct{ w *world }

func (s fakeSocket) Hints() <-chan struct{} { return s.w.shints }
func (s fakeSocket) Look() status.Socket    { s.w.mu.Lock(); defer s.w.mu.Unlock(); return s.w.sock }

func (s fakeSocket) Check(context.Context) error {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	s.w.checks++
	return s.w.checkErr
}

// change begins a change of the path: it waits while the test holds it, and locks w.
func (w *world) change() {
	w.mu.Lock()
	hold := w.hold
	w.mu.Unlock()
	if hold != nil {
		<-hold
	}
	w.mu.Lock()
	if w.onPublish != nil {
		w.onPublish()
	}
}

func (s fakeSocket) Publish(ctx context.Context, a status.Announcement) error {
	w := s.w
	w.change()
	defer w.mu.Unlock()
	if w.publishErr != nil {
		return w.publishErr
	}
	w.published = append(w.published, a)
	old := w.sock
	w.sock = status.Socket{
		Path: old.Path, Place: status.Ours, Up: true, DirRecreated: old.DirRecreated, Accepted: old.Accepted, Refusals: old.Refusals,
		Publication: status.Publication{
			Announced: a, PublishedAt: time.Now(),
		},
	}
	if w.accept != nil {
		ok, why := w.accept(a)
		time.AfterFunc(w.delay, func() { w.word(ok, why) })
	}
	return nil
}

func (s fakeSocket) Clear(context.Context, status.Announcement) error {
	w := s.w
	w.change()
	defer w.mu.Unlock()
	if w.publishErr == nil && w.sock.Place == status.Foreign {
		w.sock.Place = status.Missing
	}
	return w.publishErr
}

func (s fakeSocket) Withdraw(context.Context) error {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	s.w.withdrawals++
	if s.w.withdrawErr != nil {
		return s.w.withdrawErr
	}
	s.w.withdrawn++
	s.w.sock.Up, s.w.sock.Place = false, status.Missing
	return nil
}

// word is a call of the kubelet.
func (w *world) word(ok bool, why string) {
	w.mu.Lock()
	w.sock.GetInfoAt = time.Now()
	w.sock.Notification = status.Notification{At: time.Now(), Registered: ok, Error: why}
	if ok {
		w.sock.Accepted++
		if w.sock.FirstAcceptedAt.IsZero() {
			w.sock.FirstAcceptedAt = w.sock.Notification.At
		}
	} else {
		w.sock.Refusals++
	}
	w.mu.Unlock()
	poke(w.shints)
}

type conflict struct{}

func (conflict) Error() string  { return "another registrar holds it" }
func (conflict) Conflict() bool { return true }

var errFull = errors.New("no space left on device")

func ready() status.Report {
	return status.Report{Driver: status.Ready, Identity: status.Identity{
		Name: "foo", Version: "1", NodeID: "n1", MaxVolumes: 8, Topology: map[string]string{"zone": "a"},
	}}
}

// harness is a registrar that runs in a bubble.
type harness struct {
	*testing.T
	w   *world
	reg *Registrar
	mu  sync.Mutex
	now status.Driver
	log *lines
}

// lines counts log entries.
type lines struct {
	mu   sync.Mutex
	text []string
}

func (l *lines) Enabled(_ context.Context, v slog.Level) bool { return v >= slog.LevelInfo }
func (l *lines) WithAttrs([]slog.Attr) slog.Handler           { return l }
func (l *lines) WithGroup(string) slog.Handler                { return l }
func (l *lines) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	text := r.Message
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "reason" {
			text += ": " + a.Value.String()
		}
		return true
	})
	l.text = append(l.text, text)
	return nil
}

func (l *lines) said() []string { l.mu.Lock(); defer l.mu.Unlock(); return slices.Clone(l.text) }

func (l *lines) len() int { l.mu.Lock(); defer l.mu.Unlock(); return len(l.text) }

var (
	base = config.Driver{
		Connection: config.Connection{Name: "foo", Socket: "/run/foo.sock", Endpoint: "/run/foo.sock"},
		Enabled:    true, SupportedVersions: []string{"1.0.0"},
	}
	disabled = config.Driver{Connection: config.Connection{Name: "foo"}}
)

// runHarness runs test in a bubble with a registrar that has begun, and ends it afterwards;
// synctest fails the test if a goroutine stays.
func runHarness(t *testing.T, w *world, table config.Driver, test func(h *harness)) {
	synctest.Test(t, func(t *testing.T) {
		// they must be the bubble's
		w.hints, w.shints = make(chan struct{}, 1), make(chan struct{}, 1)
		h := &harness{T: t, w: w, log: &lines{}}
		h.reg = New(table, driver.Observe(w), fakeSocket{w}, slog.New(h.log), func(s status.Driver) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.now = s
		})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { h.reg.Run(ctx) })
		synctest.Wait()
		test(h)
		cancel()
		wg.Wait()
		time.Sleep(time.Hour) // the fake kubelet's timers
	})
}

func (h *harness) status() status.Driver {
	synctest.Wait()
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.now
}

func (h *harness) state(want string) {
	h.Helper()
	if s := h.status(); s.State != want {
		h.Fatalf("state is %q (%s), want %q", s.State, s.Reason, want)
	}
}

func (h *harness) publications(want int) {
	h.Helper()
	synctest.Wait()
	h.w.mu.Lock()
	defer h.w.mu.Unlock()
	if n := len(h.w.published); n != want {
		h.Fatalf("published %d times, want %d", n, want)
	}
}

// counts returns how often the driver was asked, and its socket published and withdrawn.
func (h *harness) counts() (asks, published, withdrawn int) {
	synctest.Wait()
	h.w.mu.Lock()
	defer h.w.mu.Unlock()
	return h.w.asks, len(h.w.published), h.w.withdrawn
}
