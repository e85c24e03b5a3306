package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/test/fake"
)

// A root_dir that cannot replace the one in force is an error in the files, at a reload and at a
// start.
func TestRootDirThatCannotReplace(t *testing.T) {
	t.Parallel()
	other := filepath.Join(fake.ShortDir(t), "l")
	for name, c := range map[string]struct {
		breaks  func(*testing.T, *node)
		problem string
	}{
		"missing": {func(*testing.T, *node) {}, "no such file or directory (create it, and see csi-registrar config check"},
		"a file": {func(t *testing.T, n *node) {
			if err := os.WriteFile(other, nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}, "not a directory"},
		"volumes in use": {func(t *testing.T, n *node) {
			if err := os.Mkdir(other, 0o755); err != nil {
				t.Fatal(err)
			}
			n.publish("a.example")
		}, "a.example has 1 volume in use there, which the kubelet could not unmount (it takes effect when they are unmounted"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.write("conf.d/50-a.toml", n.table("a.example"))
			n.serve("a.example")
			client, stop := n.run()
			n.await(client, "the driver", published("a.example"))
			c.breaks(t, n)
			defer os.RemoveAll(other)
			n.write("config.toml", fmt.Sprintf("[kubelet]\nroot_dir = %q\n", other))
			if _, err := client.Reload(t.Context(), false); err == nil || !strings.Contains(err.Error(), n.path("config.toml")+":2: kubelet.root_dir: "+other+" cannot replace "+n.kubelet+": "+c.problem) &&
				!strings.Contains(err.Error(), c.problem) {
				t.Errorf("reload: %v", err)
			}
			kept := func(s status.Document) bool {
				return string(s.PluginsRegistry) == filepath.Join(n.kubelet, "plugins_registry") && published("a.example")(s) && strings.Contains(s.ConfigError, c.problem)
			}
			n.await(client, "what was in force, and the reason", kept)
			if name == "volumes in use" { // by force only the lack of a service manager counts
				if _, err := client.Reload(t.Context(), true); err == nil || strings.Contains(err.Error(), "in use") || !strings.Contains(err.Error(), "restart it") {
					t.Errorf("reload --force: %v", err)
				}
			}
			stop()
			client, _ = n.run()
			n.await(client, "the same after a restart", kept)
		})
	}
}

// A root_dir that is created later is noticed without a change of the files.
func TestRootDirIsCheckedAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.period = 100 * time.Millisecond
	c, _ := n.run()
	n.await(c, "the daemon", serves)
	other := filepath.Join(fake.ShortDir(t), "l")
	n.write("config.toml", fmt.Sprintf("[kubelet]\nroot_dir = %q\n", other))
	n.await(c, "the missing directory", func(s status.Document) bool { return strings.Contains(s.ConfigError, "no such file") })
	if err := os.Mkdir(other, 0o755); err != nil {
		t.Fatal(err)
	}
	n.await(c, "the directory", func(s status.Document) bool {
		return strings.Contains(s.ConfigError, "while the daemon runs (restart it)")
	})
}

// Without a service manager another root_dir takes effect at the next start, with the sockets below
// the earlier one removed.
func TestRootDirWithoutAServiceManager(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.write("conf.d/50-a.toml", n.table("a.example"))
	n.serve("a.example")
	c, stop := n.run()
	n.await(c, "the driver", published("a.example"))
	other := filepath.Join(fake.ShortDir(t), "l")
	if err := os.Mkdir(other, 0o755); err != nil {
		t.Fatal(err)
	}
	n.write("config.toml", fmt.Sprintf("[kubelet]\nroot_dir = %q\n", other))
	if _, err := c.Reload(t.Context(), false); err == nil || !strings.Contains(err.Error(), "cannot replace "+n.kubelet+" while the daemon runs (restart it)") {
		t.Errorf("reload: %v", err)
	}
	stop()
	c, _ = n.run()
	n.await(c, "the driver below the other root_dir", func(s status.Document) bool {
		return string(s.PluginsRegistry) == filepath.Join(other, "plugins_registry") && published("a.example")(s) && s.ConfigError == ""
	})
	if left, err := os.ReadDir(filepath.Join(n.kubelet, "plugins_registry")); err != nil || len(left) > 0 {
		t.Errorf("left below the earlier root_dir: %v (%v)", left, err)
	}
}

// The longest root_dir that the files may have for a driver is one below which its registration
// socket can be bound; a name that is one byte longer is an error in the files.
func TestLongestRootDir(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.serve("ab")
	rest := unixsock.MaxPath - len("/plugins_registry/ab-reg.sock") - len(n.kubelet) - 1
	long := filepath.Join(n.kubelet, strings.Repeat("x", rest))
	if err := os.Mkdir(long, 0o755); err != nil {
		t.Fatal(err)
	}
	n.write("config.toml", fmt.Sprintf("[kubelet]\nroot_dir = %q\n", long))
	n.write("conf.d/50-ab.toml", n.table("ab"))
	n.write("conf.d/60-abc.toml", n.table("abc"))
	c, _ := n.run()
	n.await(c, "the driver with the shorter name", func(s status.Document) bool {
		refused, _ := s.Driver("abc")
		return published("ab")(s) && refused.State == status.Invalid && strings.Contains(refused.Reason, "would have 108 bytes, a Unix socket's has at most 107")
	})
	if info, err := os.Lstat(filepath.Join(long, "plugins_registry/ab-reg.sock")); err != nil || info.Mode().Type() != os.ModeSocket {
		t.Errorf("%v, %v", info, err)
	}
}
