package agent

import (
	"context"
	"errors"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/core/registrar"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
)

// node is a node on which every driver is ready and the kubelet accepts at once.
type node struct {
	mu      sync.Mutex
	sockets map[string]*socket
	clients []string // every client that was made, by driver
	ended   int      // clients that were closed
	tries   int      // to make a socket
	broken  string   // the driver for which no socket can be made
	left    bool     // sockets are those that an earlier process left
}

func (n *node) Driver(d config.Driver) registrar.Driver {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.clients = append(n.clients, d.Name)
	return driver.Observe(client{d.Name, make(chan struct{}), n})
}

func (n *node) Socket(_ context.Context, name string) (Socket, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.tries++
	if name == n.broken {
		return nil, errors.New("too long")
	}
	s := &socket{path: "/k/plugins_registry/" + name, hints: make(chan struct{}, 1)}
	if old := n.sockets[s.path]; old != nil && old.counts()[2] == 0 { // as kubelet.Registry
		return nil, errors.New("in use already")
	}
	s.up = status.Socket{Path: s.path, Place: status.Ours, Up: n.left}
	n.sockets[s.path] = s
	return s, nil
}

func (n *node) socket(path string) *socket { n.mu.Lock(); defer n.mu.Unlock(); return n.sockets[path] }

type client struct {
	name  string
	hints chan struct{}
	node  *node
}

func (c client) Ask(context.Context, driver.Why, func(status.Report)) status.Report {
	return status.Report{Driver: status.Ready, Identity: status.Identity{Name: c.name, NodeID: "n"}}
}
func (c client) Hints() <-chan struct{} { return c.hints }
func (c client) Close()                 { c.node.mu.Lock(); defer c.node.mu.Unlock(); c.node.ended++ }

type socket struct {
	path  string
	hints chan struct{}

	mu                           sync.Mutex
	up                           status.Socket
	published, withdrawn, closed int
	discarded                    bool // when it was closed
	refused                      error
	hold                         chan struct{} // Look waits for it
	closing                      chan struct{} // Close waits for it
}

func (s *socket) Hints() <-chan struct{} { return s.hints }
func (s *socket) Look() status.Socket {
	s.mu.Lock()
	up, hold := s.up, s.hold
	s.mu.Unlock()
	if hold != nil {
		<-hold
	}
	return up
}
func (s *socket) Check(context.Context) error { return nil }

func (s *socket) Clear(context.Context, status.Announcement) error { return nil }

func (s *socket) Publish(_ context.Context, a status.Announcement) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.published++
	s.up = status.Socket{
		Path: s.path, Place: status.Ours, Up: true,
		Publication: status.Publication{
			Announced: a, PublishedAt: time.Now(), Notification: status.Notification{At: time.Now(), Registered: true},
		},
	}
	return nil
}
func (s *socket) Withdraw(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refused != nil {
		return s.refused
	}
	s.withdrawn++
	s.up = status.Socket{Path: s.path, Place: status.Missing}
	return nil
}

// refuse makes Withdraw fail.
func (s *socket) refuse(err error) { s.mu.Lock(); defer s.mu.Unlock(); s.refused = err }
func (s *socket) Close(_ context.Context, withdrawn bool) error {
	s.mu.Lock()
	closing := s.closing
	s.mu.Unlock()
	if closing != nil {
		<-closing
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed++
	s.discarded = withdrawn
	return nil
}

func (s *socket) counts() [3]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return [3]int{s.published, s.withdrawn, s.closed}
}

func conf(root string, drivers ...config.Driver) *config.Config {
	c := config.Default()
	c.Kubelet.RootDir = root
	c.Drivers = drivers
	return c
}

func drv(name string) config.Driver { return config.DefaultDriver(name, "/run/"+name) }

// with runs test with an agent in a bubble, and ends the agent.
func with(t *testing.T, test func(t *testing.T, a *Agent, n *node)) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{sockets: map[string]*socket{}}
		a := New(slog.New(slog.DiscardHandler), n, "test")
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := a.Run(ctx); err != nil {
				t.Error(err)
			}
		})
		test(t, a, n)
		cancel()
		wg.Wait()
		for path, s := range n.sockets {
			if c := s.counts(); c[2] != 1 || s.discarded != (c[1] > 0) {
				t.Errorf("%s was closed %d times, withdrawn %d times, and then nothing of it was kept: %t", path, c[2], c[1], s.discarded)
			}
		}
		if n.ended != len(n.clients) {
			t.Errorf("%d of %d clients were closed", n.ended, len(n.clients))
		}
	})
}

func apply(t *testing.T, a *Agent, c *config.Config) {
	t.Helper()
	if err := a.Apply(t.Context(), c, []string{"a.toml"}); err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
}

func states(a *Agent) []string { return statesOf(a.Status()) }

func statesOf(s status.Document) (out []string) {
	for _, d := range s.Drivers {
		out = append(out, d.Name+" "+d.State)
	}
	return out
}

func want(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestApplyTouchesOnlyWhatChanged(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, n *node) {
		apply(t, a, conf("/k", drv("a"), drv("b"), drv("c")))
		want(t, states(a), "a registered", "b registered", "c registered")
		b := drv("b")
		b.Endpoint = "/other"
		d := drv("d")
		d.Enabled = false
		apply(t, a, conf("/k", drv("a"), b, d))
		want(t, states(a), "a registered", "b registered", "d disabled")
		for path, counts := range map[string][3]int{
			"/k/plugins_registry/a": {1, 0, 0},
			"/k/plugins_registry/b": {2, 0, 0},
			"/k/plugins_registry/c": {1, 1, 1},
		} {
			if got := n.socket(path).counts(); got != counts {
				t.Errorf("%s: published, withdrawn, closed %v, want %v", path, got, counts)
			}
		}
		want(t, n.clients, "a", "b", "c", "b")
	})
}

// A key that changes how the driver is found or trusted takes effect at once; the others cost no
// new connection.
// A daemon that leaves its root_dir does not look like one without drivers, and registers none.
func TestLeave(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, n *node) {
		apply(t, a, conf("/k", drv("a.example"), drv("b.example")))
		off := drv("off.example")
		off.Enabled = false
		if err := a.Leave(t.Context(), conf("/k", drv("a.example"), drv("c.example"), off), errors.New("moved")); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Minute) // for what starts registrars again
		synctest.Wait()
		want(t, states(a), "a.example absent", "c.example absent", "off.example disabled")
		s := a.Status()
		if len(s.Unserved()) != 2 || s.Drivers[0].Reason != "moved" || s.Drivers[2].Reason == "moved" {
			t.Errorf("%+v", s.Drivers)
		}
	})
}

func TestKeysThatNeedANewConnection(t *testing.T) {
	for key, c := range map[string]struct {
		change func(*config.Driver)
		again  bool
	}{
		"socket":              {func(d *config.Driver) { d.Socket = "/b" }, true},
		"endpoint":            {func(d *config.Driver) { d.Endpoint = "/b" }, true},
		"timeout":             {func(d *config.Driver) { d.Timeout++ }, true},
		"socket_owner":        {func(d *config.Driver) { d.SocketOwner = "any" }, true},
		"withdraw_after":      {func(d *config.Driver) { d.WithdrawAfter++ }, false},
		"when_driver_is_gone": {func(d *config.Driver) { d.WhenGone = config.Withdraw }, false},
		"supported_versions":  {func(d *config.Driver) { d.SupportedVersions = []string{"1.1.0"} }, false},
	} {
		t.Run(key, func(t *testing.T) {
			with(t, func(t *testing.T, a *Agent, n *node) {
				d := drv("a")
				apply(t, a, conf("/k", d))
				c.change(&d)
				apply(t, a, conf("/k", d))
				if again := len(n.clients) == 2; again != c.again {
					t.Errorf("a new connection: %t, want %t", again, c.again)
				}
			})
		})
	}
}

// A registration socket that cannot be taken away is tried again, and is still there for
// its driver if that comes back before.
func TestWithdrawingFails(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, n *node) {
		apply(t, a, conf("/k", drv("a"), drv("b")))
		s := n.socket("/k/plugins_registry/a")
		s.refuse(errors.New("read-only"))
		for range 2 {
			if err := a.Apply(t.Context(), conf("/k", drv("b")), nil); err == nil || !strings.Contains(err.Error(), "read-only") {
				t.Errorf("error %v", err)
			}
			time.Sleep(time.Minute)
			want(t, states(a), "a registered", "b registered")
			if s, _ := a.Status().Driver("a"); s.Reason != "read-only" {
				t.Errorf("reason %q", s.Reason)
			}
			apply(t, a, conf("/k", drv("a"), drv("b")))
			want(t, states(a), "a registered", "b registered")
		}
		if got := s.counts(); got != [3]int{1, 0, 0} {
			t.Errorf("published, withdrawn, closed %v", got)
		}
		if err := a.Apply(t.Context(), conf("/k", drv("b")), nil); err == nil {
			t.Error("no error")
		}
		s.refuse(nil)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if got := s.counts(); got != [3]int{1, 1, 1} {
			t.Errorf("published, withdrawn, closed %v", got)
		}
	})
}

// A driver that is enabled again while its socket is being closed, however long that takes, is
// registered.
func TestEnabledAgainWhileItsSocketIsClosed(t *testing.T) {
	for _, long := range []time.Duration{time.Millisecond, leaveTime / 2, time.Minute} {
		with(t, func(t *testing.T, a *Agent, n *node) {
			apply(t, a, conf("/k", drv("a"), drv("b")))
			s := n.socket("/k/plugins_registry/a")
			s.mu.Lock()
			s.closing = make(chan struct{})
			s.mu.Unlock()
			began := time.Now()
			time.AfterFunc(long, func() { close(s.closing) })
			ctx, cancel := context.WithTimeout(t.Context(), long/4)
			defer cancel()
			if err := a.Apply(ctx, conf("/k", drv("b")), nil); err == nil {
				t.Error("withdrawn at once")
			}
			moved := drv("a") // it needs a new client, which is not used
			moved.Socket = "/run/moved"
			err := a.Apply(t.Context(), conf("/k", moved, drv("b")), nil)
			if (err != nil) != (long > leaveTime) {
				t.Errorf("%s: %v", long, err)
			}
			synctest.Wait()
			if long > leaveTime {
				if d, _ := a.Status().Driver("a"); d.State == "registered" || d.Reason == "" {
					t.Errorf("%+v", d)
				}
			}
			time.Sleep(time.Until(began.Add(long + time.Millisecond)))
			synctest.Wait()
			want(t, states(a), "a registered", "b registered")
			if err := a.Reregister(t.Context(), "a", false); err != nil {
				t.Error(err)
			}
		})
	}
}

// A driver whose registrar cannot be started is tried again, and its status says why.
func TestStartingIsTriedAgain(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, n *node) {
		n.broken = "a"
		if err := a.Apply(t.Context(), conf("/k", drv("a"), drv("b")), nil); err == nil {
			t.Error("no error")
		}
		time.Sleep(time.Hour)
		want(t, states(a), "a absent", "b registered")
		if d, _ := a.Status().Driver("a"); !strings.Contains(d.Reason, "too long") {
			t.Errorf("%+v", d)
		}
		n.mu.Lock()
		tries := n.tries
		n.broken = ""
		n.mu.Unlock()
		if tries < 100 || tries > 150 {
			t.Errorf("tried %d times in an hour", tries)
		}
		time.Sleep(startMost)
		synctest.Wait()
		want(t, states(a), "a registered", "b registered")
		tries = n.tries
		time.Sleep(time.Hour)
		if n.tries != tries {
			t.Errorf("tried %d times after that", n.tries-tries)
		}
	})
}

func TestOneThatCannotStartHoldsUpNoOther(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, n *node) {
		n.broken = "a"
		if err := a.Apply(t.Context(), conf("/k", drv("a"), drv("b")), nil); err == nil {
			t.Error("no error")
		}
		synctest.Wait()
		want(t, states(a), "a absent", "b registered")
	})
}

func TestChangedMissesNothing(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, n *node) {
		seen := make(chan []string, 1)
		go func() {
			for {
				changed := a.Changed()
				if s := a.Status(); len(s.Drivers) == 2 && len(s.Pending()) == 0 {
					seen <- statesOf(s)
					return
				}
				<-changed
			}
		}()
		apply(t, a, conf("/k", drv("a"), drv("b")))
		want(t, <-seen, "a registered", "b registered")
	})
}

// A table with an error that was never in force is a row of its own; one that was keeps its state.
func TestInvalidTables(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, n *node) {
		apply(t, a, conf("/k", drv("a"), drv("b")))
		a.ConfigErrors("x:1: first\nx:2: second", map[string]string{"a": "x:1: first", "c": "x:2: second"}, []string{"y"})
		want(t, states(a), "a registered", "b registered", "c invalid")
		s := a.Status()
		kept, _ := s.Driver("a")
		never, _ := s.Driver("c")
		if kept.Reason != "the table in the files is not in force: x:1: first" || never.Reason != "x:2: second" || !slices.Equal(s.InvalidFiles, []safetext.Claim{"y"}) {
			t.Errorf("%+v", s)
		}
		a.ConfigErrors("", nil, nil)
		want(t, states(a), "a registered", "b registered")
	})
}

func TestAliveAndReregister(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, n *node) {
		apply(t, a, conf("/k", drv("a")))
		if err := a.Alive(t.Context()); err != nil {
			t.Error(err)
		}
		if err := a.Reregister(t.Context(), "nobody", false); err == nil || !strings.Contains(err.Error(), `no enabled driver of that name is configured: "nobody"`) {
			t.Errorf("got %v", err)
		}
		if err := a.Reregister(t.Context(), "a", false); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if got := n.socket("/k/plugins_registry/a").counts(); got != [3]int{2, 0, 0} {
			t.Errorf("published, withdrawn, closed %v", got)
		}
	})
}

// The watchdog must be fed also when a driver is taken off just while all are asked.
func TestAliveForgivesTheRemoved(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, n *node) {
		apply(t, a, conf("/k", drv("a"), drv("b")))
		all := a.registrars()
		apply(t, a, conf("/k", drv("b")))
		a.change(func() { a.running = all }) // as just before the end of its registrar
		if err := a.Alive(t.Context()); err != nil || len(all) != 2 {
			t.Error(all, err)
		}
	})
}

// A registrar that hangs is noticed: the watchdog is not fed then.
func TestAliveNoticesAHang(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, n *node) {
		apply(t, a, conf("/k", drv("a"), drv("b")))
		s := n.socket("/k/plugins_registry/a")
		hold := make(chan struct{})
		s.mu.Lock()
		s.hold = hold
		s.mu.Unlock()
		s.hints <- struct{}{}
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := a.Alive(ctx); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "registrar of a") || strings.Contains(err.Error(), "registrar of b") {
			t.Errorf("got %v", err)
		}
		close(hold)
		synctest.Wait()
		if err := a.Alive(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// The status has one time zone, wherever a time comes from.
func TestTimesAreUTC(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, n *node) {
		apply(t, a, conf("/k", drv("a"), drv("b")))
		n.socket("/k/plugins_registry/b").refuse(errors.New("read-only"))
		if err := a.Apply(t.Context(), conf("/k", drv("a")), nil); err == nil {
			t.Error("no error")
		}
		times := 0
		var walk func(path string, v reflect.Value)
		walk = func(path string, v reflect.Value) {
			if at, ok := v.Interface().(time.Time); ok {
				if !at.IsZero() {
					times++
				}
				if at.Location() != time.UTC {
					t.Errorf("%s is %s", path, at)
				}
				return
			}
			switch v.Kind() {
			case reflect.Struct:
				for i := range v.NumField() {
					walk(path+"."+v.Type().Field(i).Name, v.Field(i))
				}
			case reflect.Slice:
				for i := range v.Len() {
					walk(path, v.Index(i))
				}
			}
		}
		walk("", reflect.ValueOf(a.Status()))
		if times < 6 {
			t.Errorf("only %d times", times)
		}
	})
}

// Withdrawals that fail are in the status also when the driver has another registrar.
func TestFailingWithdrawalsAreShown(t *testing.T) {
	with(t, func(t *testing.T, a *Agent, n *node) {
		apply(t, a, conf("/k", drv("a")))
		old := n.socket("/k/plugins_registry/a")
		old.refuse(errors.New("read-only"))
		if err := a.Apply(t.Context(), conf("/k"), nil); err == nil || err.Error() != "1 withdrawals go on: a (read-only)" {
			t.Errorf("got %v", err)
		}
		synctest.Wait()
		want(t, states(a), "a registered")
		if w := a.Status().Withdrawals; len(w) != 1 || w[0].Driver != "a" || w[0].Error != "read-only" || string(w[0].RegistrationSocket) != old.path || w[0].Since.IsZero() {
			t.Errorf("%+v", w)
		}
		old.refuse(nil)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if w := a.Status().Withdrawals; len(w) != 0 {
			t.Errorf("%+v", w)
		}
	})
}
