package e2e

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/harness"
)

// away is longer than the directories must be unchanged, and shorter than the grace period.
const away = 3 * time.Second

// aside moves a configuration file away and returns a function that moves it back.
func aside(t *testing.T, path string) (back func()) {
	t.Helper()
	other := filepath.Join(t.TempDir(), "aside")
	if err := os.Rename(path, other); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := os.Rename(other, path); err != nil {
			t.Error(err)
		}
	}
}

// A driver that is missing from the files for 10 s is withdrawn. One that is back before, as after
// a change by an editor or a package manager, stays registered. reload does not wait.
func TestVanishedTable(t *testing.T) {
	t.Parallel()
	n, d, c, k := registered(t, "a.example")
	unchanged(t, n, k, []string{d.Name}, func() {
		n.Write("conf.d/50-a.example.toml", "")
		time.Sleep(3 * time.Second) // longer than the directories must be unchanged
		n.Configure(d.Name, d.Socket)
	})
	mark := k.Mark()
	n.Write("conf.d/50-a.example.toml", "")
	k.Deregistered(mark, d.Name, 20*time.Second)

	n.Configure(d.Name, d.Socket)
	mark = k.Mark()
	k.Registered(mark, d.Name, soon)
	c.WaitState(d.Name, "registered", soon)
	mark = k.Mark()
	n.Configure(d.Name, d.Socket, "enabled = false")
	if out, errs, code := n.RunCommand("reload", "--config-root", n.Etc); code != 0 {
		t.Errorf("reload: %d %s%s", code, out, errs)
	}
	k.Deregistered(mark, d.Name, 5*time.Second)
	if s := c.Driver(d.Name); s.State != "disabled" {
		t.Errorf("state %q, want disabled", s.State)
	}
}

// The file with root_dir is missing for a moment: no socket is moved.
func TestVanishedRootDir(t *testing.T) {
	t.Parallel()
	n, d, c, k := registered(t, "a.example")
	for range 2 {
		unchanged(t, n, k, []string{d.Name}, func() {
			back := aside(t, n.ConfigFile("config.toml"))
			time.Sleep(away)
			back()
		})
		if out, errs, code := n.RunCommand("reload", "--config-root", n.Etc); code != 0 {
			t.Errorf("reload: %d %s%s", code, out, errs)
		}
	}
	if s := c.Status(); s.PluginsRegistry != n.Registry() {
		t.Errorf("publishes in %s", s.PluginsRegistry)
	}
}

// A restart does not end the grace period: the driver stays registered meanwhile. A syntax error
// prolongs it, because the file exists.
func TestVanishedOverARestart(t *testing.T) {
	t.Parallel()
	n, d, m, c, k := registeredViaStore(t, "a.example")
	file := n.ConfigFile("conf.d/50-a.example.toml")
	unchanged(t, n, k, []string{d.Name}, func() {
		back := aside(t, file)
		c = m.Restart(c, syscall.SIGTERM)
		time.Sleep(away)
		c.WaitState(d.Name, "registered", soon)
		n.Write("conf.d/50-a.example.toml", "[driver.\"a.example\"\n")
		time.Sleep(10 * time.Second)
		back()
		harness.Eventually(t, soon, "the fixed configuration", func() string { return c.Status().ConfigError })
	})
	// The file stays away: the driver is withdrawn after the grace period, in whichever process.
	mark := k.Mark()
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	c = m.Restart(c, syscall.SIGKILL)
	k.Deregistered(mark, d.Name, 20*time.Second)
}

// A drop-in may be a link. An edit of its target is a change.
func TestLinkedDropIn(t *testing.T) {
	t.Parallel()
	n, d, c, _ := registered(t, "a.example")
	file := n.ConfigFile("conf.d/50-a.example.toml")
	target := filepath.Join(n.Dir, "elsewhere.toml")
	if err := os.Rename(file, target); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(target, file); err != nil {
		t.Fatal(err)
	}
	edit := func(extra string) {
		text := harness.Table(d.Name, d.Socket, extra)
		if err := os.WriteFile(target, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	edit("")
	time.Sleep(away) // the daemon notices the link itself by the change of the directory
	edit("enabled = false")
	c.WaitState(d.Name, "disabled", 10*time.Second)
	edit("enabled = true")
	c.WaitState(d.Name, "registered", soon)
}
