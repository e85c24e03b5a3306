package e2e

import (
	"syscall"
	"testing"

	"csi-registrar/internal/test/e2e/harness"
)

// Each case is a drop-in with an error, and the texts that the report must have.
var configErrors = map[string]struct {
	text  string
	words []string
}{
	"syntax":    {"[driver.\"bad.example\"\n", []string{"60-bad.toml:1"}},
	"key":       {"[driver.\"bad.example\"]\nsocket = \"/x/a.sock\"\nsockt = 1\n", []string{"60-bad.toml:3", "sockt"}},
	"type":      {"[driver.\"bad.example\"]\nsocket = 5\n", []string{"60-bad.toml:2", "socket"}},
	"relative":  {"[driver.\"bad.example\"]\nsocket = \"a.sock\"\n", []string{"60-bad.toml:2", "socket"}},
	"duration":  {"[driver.\"bad.example\"]\nsocket = \"/x/a.sock\"\ntimeout = \"5 parsecs\"\n", []string{"60-bad.toml:3", "timeout"}},
	"no socket": {"[driver.\"bad.example\"]\nenabled = true\n", []string{"60-bad.toml", "socket"}},
}

func namesTheError(t *testing.T, n *harness.Node, c *harness.Daemon, words []string) {
	t.Helper()
	harness.Eventually(t, soon, "config_error", func() string {
		if c.Status().ConfigError == "" {
			return "it is not set"
		}
		return ""
	})
	contains(t, "status", c.Status().ConfigError, words...)
	_, body := c.Get("/readyz")
	contains(t, "/readyz", body, words...)
	contains(t, "the log", c.Log(), words...)
	out, errs, _ := n.RunCommand("status", "--config-root", n.Etc)
	contains(t, "the status command", out+errs, words...)
}

func TestErrorBesideGoodTablesAtStart(t *testing.T) {
	t.Parallel()
	for what, m := range configErrors {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			n := harness.New(t)
			names := numbered("good%d.example", 2)
			for _, name := range names {
				n.AddDriver(name).Start()
			}
			n.Write("conf.d/60-bad.toml", m.text)
			k := n.StartKubelet()
			c := n.Manager().StartDaemon()
			for _, name := range names {
				k.Registered(0, name, soon)
			}
			namesTheError(t, n, c, m.words)
		})
	}
}

func TestErrorAtReloadLosesNothing(t *testing.T) {
	t.Parallel()
	for what, m := range configErrors {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			n := harness.New(t)
			names := numbered("good%d.example", 2)
			for _, name := range names {
				n.AddDriver(name).Start()
			}
			k := n.StartKubelet()
			manager := n.Manager()
			c := manager.StartDaemon()
			for _, name := range names {
				k.Registered(0, name, soon)
				c.WaitState(name, "registered", soon)
			}
			unchanged(t, n, k, names, func() {
				n.Write("conf.d/60-bad.toml", m.text)
				// A valid driver beside it changes nothing either: the old configuration is in
				// force.
				n.Configure("late.example", n.Run+"/late.sock")
				out, errs, code := n.RunCommand("reload", "--config-root", n.Etc)
				if code == 0 {
					t.Errorf("reload succeeds: %s", out)
				}
				contains(t, "reload", out+errs, m.words...)
				namesTheError(t, n, c, m.words)
				if s := c.Driver("late.example"); s.Name != "" {
					t.Errorf("a driver of the refused configuration runs: %+v", s)
				}
			})
			// A crash with the error in place: the last good configuration is used.
			unchanged(t, n, k, names, func() {
				c = manager.Restart(c, syscall.SIGKILL)
				for _, name := range names {
					c.WaitState(name, "registered", soon)
				}
				namesTheError(t, n, c, m.words)
			})
			// Fixed: applied without a command.
			unchanged(t, n, k, names, func() {
				n.Write("conf.d/60-bad.toml", "")
				harness.Eventually(t, soon, "the fixed configuration", func() string {
					if s := c.Status(); s.ConfigError != "" {
						return s.ConfigError
					}
					if c.Driver("late.example").Name == "" {
						return "late.example is not there"
					}
					return ""
				})
			})
		})
	}
}

// A changed log level touches no socket, a changed endpoint only that driver's.
func TestReloadTouchesOnlyWhatChanged(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	a, b := n.AddDriver("a.example"), n.AddDriver("b.example")
	a.Start()
	b.Start()
	k := n.StartKubelet()
	c := n.StartDaemon()
	for _, d := range []*harness.Driver{a, b} {
		k.Registered(0, d.Name, soon)
		c.WaitState(d.Name, "registered", soon)
	}
	unchanged(t, n, k, []string{a.Name, b.Name}, func() {
		n.Write("conf.d/70-log.toml", "[log]\nlevel = \"info\"\n")
		if out, errs, code := n.RunCommand("reload", "--config-root", n.Etc); code != 0 {
			t.Errorf("reload: %d %s%s", code, out, errs)
		}
	})
	mark := k.Mark()
	other := n.DriverAt(a.Name, n.Run+"/other.sock") // the same driver at a second socket
	other.Start()
	ino := n.Inode(n.RegSocket(b.Name))
	n.Configure(a.Name, a.Socket, `endpoint = "`+other.Socket+`"`)
	c.Signal(syscall.SIGHUP)
	if e := k.Registered(mark, a.Name, soon); e.Endpoint != other.Socket {
		t.Errorf("registered with endpoint %s, want %s", e.Endpoint, other.Socket)
	}
	if k.Count(mark, "deregister", b.Name)+k.Count(mark, "register", b.Name) != 0 || n.Inode(n.RegSocket(b.Name)) != ino {
		t.Error("b.example was touched")
	}
}
