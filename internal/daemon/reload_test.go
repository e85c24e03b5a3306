package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/core/agent"
	"csi-registrar/internal/core/control"
	"csi-registrar/internal/core/regsocket"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/worker"
	"csi-registrar/internal/test/fake"
)

// node is a configuration root with a kubelet's root directory beside it.
type node struct {
	t       *testing.T
	root    string       // --config-root
	kubelet string       // root_dir
	log     bytes.Buffer // of the daemons; complete when they are stopped
	period  time.Duration
}

func newNode(t *testing.T) *node {
	t.Helper()
	dir := fake.ShortDir(t)
	n := &node{t: t, root: filepath.Join(dir, "r"), kubelet: filepath.Join(dir, "k"), period: config.GracePeriod}
	if err := os.Mkdir(n.kubelet, 0o755); err != nil {
		t.Fatal(err)
	}
	n.write("config.toml", fmt.Sprintf("[kubelet]\nroot_dir = %q\n", n.kubelet))
	n.write("conf.d/10-empty.toml", "")
	return n
}

func (n *node) path(name string) string { return filepath.Join(n.root, "etc/csi-registrar", name) }

func (n *node) write(name, text string) {
	n.t.Helper()
	if err := os.MkdirAll(filepath.Dir(n.path(name)), 0o755); err != nil {
		n.t.Fatal(err)
	}
	if err := os.WriteFile(n.path(name), []byte(text), 0o644); err != nil {
		n.t.Fatal(err)
	}
}

// table is the configuration of a driver that never listens.
func (n *node) table(name string) string {
	return fmt.Sprintf("[driver.%q]\nsocket = %q\n", name, filepath.Join(n.kubelet, name+".sock"))
}

// run starts the daemon. The client reaches it; stop ends it, and is called at the end of the
// test at the latest.
func (n *node) run() (c *control.Client, stop func()) { return n.runWith(config.Load) }

func (n *node) runWith(load func(config.Source) *config.Result) (c *control.Client, stop func()) {
	n.t.Helper()
	return n.start(func(ctx context.Context, o Options) error { return run(ctx, o, load, n.period) })
}

// start runs a daemon until stop.
func (n *node) start(run func(context.Context, Options) error) (c *control.Client, stop func()) {
	n.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- run(ctx, Options{Source: config.Source{Root: n.root}, Version: "test", Getenv: func(string) string { return "" }, Stderr: &n.log})
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			n.t.Error(err)
		}
		if n.t.Failed() {
			n.t.Log(n.log.String())
		}
	})
	n.t.Cleanup(stop)
	return control.NewClient(control.Path(n.root)), stop
}

// await waits until the daemon's status is as wanted.
func (n *node) await(c *control.Client, what string, wanted func(status.Document) bool) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), 30*time.Second)
	defer cancel()
	for ctx.Err() == nil {
		for s, err := range c.Watch(ctx) {
			if err != nil {
				break // not served yet
			}
			if wanted(s) {
				return
			}
		}
	}
	n.t.Fatalf("timed out waiting for %s", what)
}

func serves(s status.Document) bool { return s.Version != "" }

func has(name string) func(status.Document) bool {
	return func(s status.Document) bool {
		_, there := s.Driver(name)
		return there
	}
}

// A new drop-in takes effect even if another file is written all the time.
func TestDropInCountsBesideAFileThatIsWrittenAllTheTime(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	c, _ := n.run()
	n.write("conf.d/40-first.toml", n.table("first.example"))
	n.await(c, "the first drop-in", has("first.example"))

	ctx, cancel := context.WithCancel(t.Context())
	var writer sync.WaitGroup
	defer writer.Wait()
	defer cancel()
	writer.Go(func() {
		ticker := time.NewTicker(700 * time.Millisecond)
		defer ticker.Stop()
		for {
			if err := os.WriteFile(n.path("conf.d/.swap"), nil, 0o644); err != nil {
				t.Error(err)
			}
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	})
	n.write("conf.d/50-second.toml", n.table("second.example"))
	n.await(c, "the second drop-in", has("second.example"))
}

// The file that has root_dir is away while the daemon starts.
func TestRootDirStaysWhileItsFileIsAwayAroundARestart(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.write("conf.d/50-a.toml", n.table("a.example"))
	c, stop := n.run()
	n.await(c, "the driver", has("a.example"))
	stop()

	if err := os.Rename(n.path("config.toml"), n.path("aside")); err != nil {
		t.Fatal(err)
	}
	c, _ = n.run()
	n.await(c, "an answer", serves)
	registry := func() string {
		t.Helper()
		s, err := c.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return string(s.PluginsRegistry)
	}
	if got, want := registry(), filepath.Join(n.kubelet, "plugins_registry"); got != want {
		t.Errorf("publishes in %s, want %s", got, want)
	}
	if err := os.Rename(n.path("aside"), n.path("config.toml")); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Reload(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	if got, want := registry(), filepath.Join(n.kubelet, "plugins_registry"); got != want {
		t.Errorf("with its file it publishes in %s, want %s", got, want)
	}
}

// The files are read at most settle after the first hint, however many follow.
func TestHintsDoNotPutReadingOff(t *testing.T) {
	start := time.Now()
	var next time.Time
	for i := range 10 {
		next = rate.Earliest(next, start.Add(time.Duration(i)*100*time.Millisecond).Add(settle))
	}
	if !next.Equal(start.Add(settle)) {
		t.Errorf("read %s after the first hint", next.Sub(start))
	}
	next = rate.Earliest(next, time.Time{}) // no grace period
	if !next.Equal(start.Add(settle)) {
		t.Error("put off for ever")
	}
}

// A file system that does not answer holds up neither the start nor a reload.
func TestFilesThatCannotBeReadLeaveTheLastGoodConfiguration(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.write("conf.d/50-a.toml", n.table("a.example"))
	c, stop := n.run()
	n.await(c, "the driver", has("a.example"))
	stop()
	n.write("conf.d/50-b.toml", n.table("b.example"))

	answer := make(chan struct{})
	c, _ = n.runWith(func(s config.Source) *config.Result {
		<-answer
		return config.Load(s)
	})
	n.await(c, "the last good configuration, and what is wrong", func(s status.Document) bool {
		return has("a.example")(s) && strings.Contains(s.ConfigError, "does not answer")
	})
	if _, err := c.Reload(t.Context(), false); err == nil || !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("reload: %v", err)
	}
	time.Sleep(2 * settle) // usually long enough for the first hint, so that only the answer is one
	close(answer)
	n.await(c, "the files", func(s status.Document) bool { return has("b.example")(s) && s.ConfigError == "" })
}

// A broken drop-in is left out and reported at the first start, and takes effect when it is fixed.
func TestFirstStartWithABrokenDropIn(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.write("conf.d/20-a.toml", n.table("a.example"))
	n.write("conf.d/20-b.toml", n.table("b.example"))
	n.write("conf.d/60-b.toml", "[driver.\"b.example\"\nenabled = false\n")
	c, _ := n.run()
	n.await(c, "what is left", func(s status.Document) bool {
		return has("a.example")(s) && has("b.example")(s) && strings.Contains(s.ConfigError, "60-b.toml:1: is not valid TOML")
	})
	// The other files count as ever, and an error in one ends no registration.
	n.write("conf.d/70-c.toml", n.table("c.example"))
	n.await(c, "a file beside the broken one", has("c.example"))
	n.write("conf.d/20-a.toml", "[driver.\"a.example\"\n")
	n.write("conf.d/70-d.toml", n.table("d.example"))
	n.await(c, "another one", func(s status.Document) bool {
		return has("a.example")(s) && has("c.example")(s) && has("d.example")(s) && strings.Contains(s.ConfigError, "20-a.toml:1: ")
	})
	n.write("conf.d/20-a.toml", n.table("a.example"))
	n.write("conf.d/60-b.toml", "[driver.\"b.example\"]\nenabled = false\n")
	n.await(c, "the fixed drop-in", func(s status.Document) bool {
		d, _ := s.Driver("b.example")
		return d.State == status.Disabled && s.ConfigError == ""
	})
}

// A configuration that becomes complete is kept for the next start, also if it is the one in force.
func TestCompleteAfterABrokenDropIn(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.write("conf.d/20-a.toml", n.table("a.example"))
	n.write("conf.d/60-b.toml", "[driver.\"b.example\"\n")
	c, stop := n.run()
	n.await(c, "what is left", func(s status.Document) bool { return has("a.example")(s) && s.ConfigError != "" })
	n.write("conf.d/60-b.toml", "[driver.\"a.example\"]\nenabled = true\n")
	n.await(c, "no error", func(s status.Document) bool { return has("a.example")(s) && s.ConfigError == "" })
	stop()
	if _, err := config.LoadLastGood(filepath.Join(stateDir(RunDir(n.root)), lastGoodName(config.Source{}))); err != nil {
		t.Error(err)
	}
}

// TestLastConfigurationForLeftovers checks that a configuration replaces one whose leftovers are
// not removed yet.
func TestLastConfigurationForLeftovers(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	r := newReloader(worker.NewPool(), config.Source{Root: t.TempDir()}, config.Load)
	r.daemon, r.level = &daemon{log: log, agent: agent.New(log, nil, "test")}, &slog.LevelVar{}
	r.lastGood = filepath.Join(t.TempDir(), "last-good.json")
	before := &config.InForce{Config: config.Default()}
	for range 3 {
		r.apply(t.Context(), &config.InForce{Config: config.Default()}, before, true, nil)
	}
	if c := <-r.leftovers; c != r.inForce.Config {
		t.Error("not the last one")
	}
}

// TestErrorsAreLoggedOnce checks that the log has each error of the files once, and at most 20.
func TestErrorsAreLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	r := newReloader(worker.NewPool(), config.Source{Root: t.TempDir()}, config.Load)
	r.daemon = &daemon{log: slog.New(slog.NewTextHandler(&log, nil)), agent: agent.New(slog.New(slog.DiscardHandler), nil, "test")}
	res := &config.Result{Config: config.Default()}
	for i := range 23 {
		res.Errors = append(res.Errors, config.Error{File: "a.toml", Line: i + 1, Problem: "is wrong"})
	}
	for range 2 {
		r.report(res, &config.InForce{Config: config.Default()})
		if all, more := strings.Count(log.String(), "\n"), strings.Count(log.String(), "more=3"); all != 21 || more != 1 {
			t.Fatalf("%d entries:\n%s", all, &log)
		}
	}
	res.Errors = res.Errors[:1]
	if r.report(res, &config.InForce{Config: config.Default()}); strings.Count(log.String(), "\n") != 22 {
		t.Errorf("another error:\n%s", &log)
	}
}

// TestLogLevelAtAReload checks that log.level takes effect at once.
func TestLogLevelAtAReload(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	r := newReloader(worker.NewPool(), config.Source{Root: t.TempDir()}, config.Load)
	r.daemon, r.level = &daemon{log: log, agent: agent.New(log, nil, "test")}, &slog.LevelVar{}
	c := config.Default()
	c.Log.Level = "debug"
	if r.apply(t.Context(), &config.InForce{Config: c}, &config.InForce{Config: config.Default()}, false, nil); r.level.Level() != slog.LevelDebug {
		t.Errorf("%s", r.level.Level())
	}
}

// TestLastGoodOfEachConfiguration checks that a daemon with --config FILE does not begin with the
// last good configuration of another one.
func TestLastGoodOfEachConfiguration(t *testing.T) {
	names := []string{lastGoodName(config.Source{}), lastGoodName(config.Source{File: "/a"}), lastGoodName(config.Source{File: "/b"})}
	if slices.Sort(names); len(slices.Compact(names)) != 3 || !slices.Contains(names, "last-good.json") {
		t.Errorf("%q", names)
	}
}

// failingStore cannot forget the first time.
type failingStore struct{ names []string }

func (*failingStore) Keep(context.Context, string, syscall.Conn) error { return nil }
func (s *failingStore) Forget(_ context.Context, name string) error {
	if s.names = append(s.names, name); len(s.names) == 1 {
		return errors.New("PID 1 does not answer")
	}
	return nil
}

// TestLeftoversOfTheStoreAreTriedAgain checks that the names of listeners that are closed already
// are not lost with the first try.
func TestLeftoversOfTheStoreAreTriedAgain(t *testing.T) {
	store, log := &failingStore{}, slog.New(slog.DiscardHandler)
	dir := fake.ShortDir(t)
	p := &parts{
		daemon: &daemon{log: log}, stored: map[string][]*os.File{"a.example": nil}, kubelet: regsocket.NewProcess(nil, "", nil),
		options: regsocket.Options{Log: log, RunDir: dir, Store: store, Pool: worker.NewPool()},
	}
	if err := p.open(dir); err != nil {
		t.Fatal(err)
	}
	defer p.close(t.Context())
	r := &configReloader{daemon: &daemon{log: log, parts: p, ready: make(chan struct{})}, leftovers: make(chan *config.Config)}
	close(r.ready)
	ctx, end := context.WithCancel(t.Context())
	var removing sync.WaitGroup
	removing.Go(func() { r.removeLeftovers(ctx) })
	for range 3 { // the third is received when the second is done
		r.leftovers <- config.Default()
	}
	end()
	removing.Wait()
	if want := "registration-a.example"; !slices.Equal(store.names, []string{want, want}) {
		t.Errorf("forgotten: %q", store.names)
	}
}

// TestReloadWhileStopping checks that a request does not wait for a daemon that ends.
func TestReloadWhileStopping(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newReloader(worker.NewPool(), config.Source{Root: "/none"}, config.Load)
		close(r.ended)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := r.reload(ctx, false); err == nil || err.Error() != "the daemon is stopping" {
			t.Error(err)
		}
	})
}

// TestReloadAnswersThatTheDaemonStops checks that the code of the answer is not that of an error in
// the files, whatever the daemon ends for.
func TestReloadAnswersThatTheDaemonStops(t *testing.T) {
	for _, cause := range []error{nil, fmt.Errorf("hidden: %w", ErrSandbox), ErrRootDir} {
		for _, ended := range []bool{false, true} {
			ctx, fail := context.WithCancelCause(t.Context())
			fail(cause)
			r := newReloader(worker.NewPool(), config.Source{Root: "/none"}, config.Load)
			if ended {
				close(r.ended)
			}
			h := control.Handler(backend{reload: r.reload})
			for range 20 { // select is random
				w := httptest.NewRecorder()
				if h.ServeHTTP(w, httptest.NewRequestWithContext(ctx, "POST", "/v1/reload", nil)); w.Code != http.StatusServiceUnavailable {
					t.Errorf("%v, ended %t: %d %s", cause, ended, w.Code, w.Body)
				}
			}
		}
	}
}

// The status names a table or a file that was never in force. One that was in force is kept.
func TestNeverInForce(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		text    string
		invalid bool // a driver's row, else a file
	}{
		"a key":           {"[driver.\"a.example\"]\nsokt = \"/run/a.sock\"\n", true},
		"a value":         {"[driver.\"a.example\"]\nsocket = \"/run/a.sock\"\ntimeout = 5\n", true},
		"the table":       {"[drvier.\"a.example\"]\nsocket = \"/run/a.sock\"\n", false},
		"the syntax":      {"[driver.\"a.example\"\nsocket = \"/run/a.sock\"\n", false},
		"the name":        {"[driver.\"a example\"]\nsocket = \"/run/a.sock\"\n", false},
		"the first table": {"[kubelet]\nroot_dir = \"k\"\n[driver.\"a.example\"]\nsocket = \"/run/a.sock\"\n", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.write("conf.d/50-a.toml", c.text)
			client, _ := n.run()
			shown := func(s status.Document) bool {
				d, _ := s.Driver("a.example")
				return s.ConfigError != "" && (d.State == status.Invalid) == c.invalid &&
					slices.Equal(s.InvalidFiles, []safetext.Claim{safetext.Claim(n.path("conf.d/50-a.toml"))}) == !c.invalid
			}
			n.await(client, "the error at the start", shown)
			n.write("conf.d/50-a.toml", n.table("b.example"))
			n.await(client, "the corrected file", func(s status.Document) bool {
				return has("b.example")(s) && !has("a.example")(s) && len(s.InvalidFiles) == 0
			})
			n.write("conf.d/60-c.toml", c.text)
			n.await(client, "the error beside what is in force", func(s status.Document) bool {
				d, _ := s.Driver("a.example")
				return s.ConfigError != "" && has("b.example")(s) && (d.State == status.Invalid) == c.invalid &&
					slices.Equal(s.InvalidFiles, []safetext.Claim{safetext.Claim(n.path("conf.d/60-c.toml"))}) == !c.invalid
			})
			n.remove("conf.d/60-c.toml")
			n.await(client, "no error", func(s status.Document) bool { return s.ConfigError == "" })
			n.write("conf.d/50-a.toml", "[driver.\"b.example\"]\nsokt = \"/run/a.sock\"\n")
			n.await(client, "the error in what is in force", func(s status.Document) bool {
				d, _ := s.Driver("b.example")
				return s.ConfigError != "" && d.State != status.Invalid && strings.Contains(d.Reason, "50-a.toml:2: ") && len(s.InvalidFiles) == 0
			})
		})
	}
}

// A table without an error that errors elsewhere keep from being in force is named by the status as
// well: `wait` and /readyz must not report that all is well.
func TestNeverInForceBecauseOfAnotherFile(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.write("conf.d/50-a.toml", n.table("a.example"))
	c, _ := n.run()
	n.write("conf.d/70-c.toml", n.table("c.example"))
	n.await(c, "the drivers", func(s status.Document) bool { return has("a.example")(s) && has("c.example")(s) })
	n.write("conf.d/50-a.toml", "[driver.\"a.example\"\n")
	n.write("conf.d/60-b.toml", n.table("b.example"))
	n.write("conf.d/70-c.toml", n.table("c.example")+"enabled = false\n")
	n.await(c, "the tables beside the error", func(s status.Document) bool {
		b, _ := s.Driver("b.example")
		changed, _ := s.Driver("c.example")
		return b.State == status.Invalid && strings.Contains(b.Reason, "50-a.toml:1: ") &&
			changed.State == string(status.Absent) && strings.Contains(changed.Reason, "the table in the files is not in force: it takes effect when ")
	})
	n.write("conf.d/50-a.toml", n.table("a.example"))
	n.await(c, "the corrected file", func(s status.Document) bool {
		b, _ := s.Driver("b.example")
		changed, _ := s.Driver("c.example")
		return b.State == string(status.Absent) && changed.State == status.Disabled && s.ConfigError == ""
	})
}

// A driver whose table disappeared while the daemon was stopped is not registered again.
func TestGracePeriodAtStartIsForWhatTheStoreKept(t *testing.T) {
	good := &config.InForce{Config: config.Default(), RootDirFile: "/etc/csi-registrar/config.toml"}
	good.Drivers = []config.Driver{config.DefaultDriver("a.example", "/a"), config.DefaultDriver("b.example", "/b")}
	res := &config.Result{Config: config.Default()}
	grace := config.Grace{Period: config.GracePeriod}
	kept := grace.Keep(served(good, []string{"b.example"}), res, time.Now(), false, nil)
	if len(kept.Drivers) != 1 || kept.Drivers[0].Name != "b.example" || len(good.Drivers) != 2 {
		t.Errorf("kept %+v of %+v", kept.Drivers, good.Drivers)
	}
}

// A file behind a link that changes after it was read and before it is watched counts.
func TestChangeBeforeALinkIsWatched(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	target := filepath.Join(n.kubelet, "tables.toml")
	write := func(name string) {
		if err := os.WriteFile(target, []byte(n.table(name)), 0o644); err != nil {
			t.Error(err)
		}
	}
	write("a.example")
	if err := os.Symlink(target, n.path("conf.d/50-link.toml")); err != nil {
		t.Fatal(err)
	}
	var loads atomic.Int32
	c, _ := n.runWith(func(s config.Source) *config.Result {
		r := config.Load(s)
		if loads.Add(1) == 2 { // the first one that watches links
			write("b.example")
		}
		return r
	})
	n.await(c, "the changed file", has("b.example"))
}
