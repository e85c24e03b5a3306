package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/harness"
	"csi-registrar/internal/test/fake"
)

var hostileNames = map[string]string{
	"upwards":    "../../x",
	"dot":        ".x",
	"space":      "a b",
	"underscore": "Under_score!",
	"long":       strings.Repeat("a", 64),
	"newline":    "a\nb",
	"nul":        "a\x00b",
}

var unusualNames = map[string]string{
	"capitals": "Foo.Example",
	"longest":  strings.Repeat("a", 59) + ".com",
}

// startNamed starts `run` with node-driver-registrar's flags, so that the driver reports its name.
func startNamed(n *harness.Node, socket string) *harness.Daemon {
	return n.StartWithFlags("--csi-address", socket, "--kubelet-registration-path", socket, "--plugin-registration-path", n.Registry())
}

func TestHostileNamesThroughFlags(t *testing.T) {
	t.Parallel()
	for what, name := range hostileNames {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			n := harness.New(t)
			d := n.NewDriver("it")
			d.Set(func(b *fake.Answers) { b.Name = name })
			d.Start()
			before := files(t, n.Dir)
			c := startNamed(n, d.Socket)
			harness.Eventually(t, soon, "a reason", func() string {
				for _, s := range c.Status().Drivers {
					if strings.Contains(s.Reason, "name") {
						return ""
					}
				}
				return fmt.Sprintf("%+v", c.Status().Drivers)
			})
			harness.Never(t, 1500*time.Millisecond, "a file appeared", func() string { return appeared(t, n, before) })
			if strings.ContainsAny(c.Log(), "\x00") || strings.Contains(c.Log(), "a\nb") {
				t.Errorf("the log repeats the name as it is: %q", c.Log())
			}
			// The daemon does not give up: the driver may be fixed.
			d.Kill()
			d.Set(func(b *fake.Answers) { b.Name = "fixed.example" })
			d.Start()
			if _, ok := harness.WhenAccepts(n.RegSocket("fixed.example"), soon); !ok {
				t.Errorf("not published after it was fixed: %+v", c.Status().Drivers)
			}
		})
	}
}

// appeared returns the name of a file that is neither the daemon's control socket nor its state.
func appeared(t *testing.T, n *harness.Node, before map[string]bool) string {
	for f := range files(t, n.Dir) {
		if !before[f] && !strings.HasPrefix(f, filepath.Join(n.Etc, "run")) {
			return f
		}
	}
	if _, err := os.Lstat(filepath.Join(n.Dir, "x-reg.sock")); err == nil {
		return "x-reg.sock, outside plugins_registry"
	}
	return ""
}

func files(t *testing.T, root string) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
		if err == nil {
			all[path] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestUnusualNamesRegisterThroughFlags(t *testing.T) {
	t.Parallel()
	for what, name := range unusualNames {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			n := harness.New(t)
			d := n.DriverAt(name, n.Run+"/it.sock")
			d.Start()
			k := n.StartKubelet()
			startNamed(n, d.Socket)
			k.Registered(0, name, soon)
		})
	}
}

func TestNamesInFiles(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	for what, name := range hostileNames {
		n.Write("conf.d/50-"+what+".toml", harness.Table(name, n.Run+"/"+what+".sock"))
	}
	k := n.StartKubelet()
	for what, name := range unusualNames {
		d := n.DriverAt(name, n.Run+"/"+what+".sock")
		n.Configure(name, d.Socket)
		d.Start()
	}
	c := n.StartDaemon()
	for _, name := range unusualNames {
		k.Registered(0, name, soon)
	}
	out, errs, code := n.RunCommand("config", "check", "--config-root", n.Etc)
	if code != 78 {
		t.Errorf("config check exits with %d, want 78", code)
	}
	for what := range hostileNames {
		contains(t, "config check", out+errs, "50-"+what+".toml")
		contains(t, "config_error", c.Status().ConfigError, "50-"+what+".toml")
	}
	n.WaitSockets(len(unusualNames))
}
