package daemon

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/core/control"
	"csi-registrar/internal/test/fake"
	"csi-registrar/internal/node/status"
)

// node is a configuration root with a kubelet's root directory beside it.
type node struct {
	t       *testing.T
	root    string       // --config-root
	kubelet string       // root_dir
	log     bytes.Buffer // of the daemons; complete when they are stopped
}

func newNode(t *testing.T) *node {
	t.Helper()
	dir := fake.ShortDir(t)
	n := &node{t: t, root: filepath.Join(dir, "r"), kubelet: filepath.Join(dir, "k")}
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
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- run(ctx, Options{Source: config.Source{Root: n.root}, Version: "test", Getenv: func(string) string { return "" }, Stderr: &n.log}, load)
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

// The last good configuration of an earlier package counts after the upgrade.
func TestLastGoodConfigurationOfAnEarlierPackage(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.write("conf.d/50-a.toml", n.table("a.example"))
	c, stop := n.run()
	n.await(c, "the driver", has("a.example"))
	stop()

	runDir := RunDir(n.root)
	if err := os.Rename(filepath.Join(stateDir(runDir), "last-good.json"), filepath.Join(runDir, "last-good.json")); err != nil {
		t.Fatal(err)
	}
	n.write("conf.d/50-a.toml", "[driver.\"a.example\"\n")
	c, _ = n.run()
	n.await(c, "the driver of the broken file", has("a.example"))
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
		return s.PluginsRegistry
	}
	if got, want := registry(), filepath.Join(n.kubelet, "plugins_registry"); got != want {
		t.Errorf("publishes in %s, want %s", got, want)
	}
	if err := os.Rename(n.path("aside"), n.path("config.toml")); err != nil {
		t.Fatal(err)
	}
	if err := c.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, want := registry(), filepath.Join(n.kubelet, "plugins_registry"); got != want {
		t.Errorf("with its file it publishes in %s, want %s", got, want)
	}
}

// The files are read at most settle after the first hint, however many follow.
func TestHintsDoNotPutReadingOff(t *testing.T) {
	start := time.Now()
	var s schedule
	for i := range 10 {
		s.noLater(start.Add(time.Duration(i) * 100 * time.Millisecond).Add(settle))
	}
	if !s.at.Equal(start.Add(settle)) {
		t.Errorf("read %s after the first hint", s.at.Sub(start))
	}
	s.noLater(time.Time{}) // no grace period
	if !s.at.Equal(start.Add(settle)) {
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

	answer := make(chan struct{})
	c, _ = n.runWith(func(s config.Source) *config.Result {
		<-answer
		return config.Load(s)
	})
	n.await(c, "the last good configuration, and what is wrong", func(s status.Document) bool {
		return has("a.example")(s) && strings.Contains(s.ConfigError, "does not answer")
	})
	if err := c.Reload(t.Context()); err == nil || !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("reload: %v", err)
	}
	n.write("conf.d/50-b.toml", n.table("b.example"))
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

// A driver whose table disappeared while the daemon was stopped is not registered again.
func TestGracePeriodAtStartIsForWhatTheStoreKept(t *testing.T) {
	good := &config.InForce{Config: config.Default(), RootDirFile: "/etc/csi-registrar/config.toml"}
	good.Drivers = []config.Driver{config.DefaultDriver("a.example", "/a"), config.DefaultDriver("b.example", "/b")}
	res := &config.Result{Config: config.Default()}
	var grace config.Grace
	kept := grace.Keep(served(good, []string{"b.example"}), res, time.Now(), nil)
	if len(kept.Drivers) != 1 || kept.Drivers[0].Name != "b.example" || len(good.Drivers) != 2 {
		t.Errorf("kept %+v of %+v", kept.Drivers, good.Drivers)
	}
}
