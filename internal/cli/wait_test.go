package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/test/fake"
)

// Without names `wait` fails at once if a table or file was never in force. `status` agrees.
func TestWaitInvalid(t *testing.T) {
	invalid := because(status.Driver{Name: "new.csi.example", State: status.Invalid, Driver: status.Absent, Registration: status.None}, "x.toml:2: sokt is not known")
	registered := driverIn("a.csi.example", "registered", hour)
	for name, c := range map[string]struct {
		drivers             []status.Driver
		file                safetext.Claim
		wait, named, status int
		stderr              string
	}{
		"nothing":     {nil, "", 0, 1, 0, "warning: no driver is configured"},
		"a table":     {[]status.Driver{registered, invalid}, "", 1, 0, 1, "new.csi.example: invalid: x.toml:2: sokt is not known"},
		"a file":      {[]status.Driver{registered}, "/etc/x.toml", 1, 0, 1, "/etc/x.toml: invalid"},
		"only a file": {nil, "/etc/x.toml", 1, 1, 1, "/etc/x.toml: invalid"},
	} {
		t.Run(name, func(t *testing.T) {
			root := fake.ShortDir(t)
			d := newFake(c.drivers...)
			if c.file != "" {
				d.set(func(s *status.Document) { s.InvalidFiles, s.ConfigError = []safetext.Claim{c.file}, string(c.file) })
			}
			d.serve(t, root)
			t.Chdir(root)
			if code, _, stderr := try(t, "wait", "--config-root", "."); code != c.wait || !strings.Contains(stderr, c.stderr) {
				t.Errorf("wait: %d %s", code, stderr)
			}
			if code, _, stderr := try(t, "wait", "a.csi.example", "--timeout", timeoutFor(c.named), "--config-root", "."); code != c.named {
				t.Errorf("wait a.csi.example: %d %s", code, stderr)
			}
			if code, stdout, stderr := try(t, "status", "--config-root", "."); code != c.status {
				t.Errorf("status: %d %s %s", code, stdout, stderr)
			}
		})
	}
}

// timeoutFor returns a --timeout: one that is used up only if the exit code is to be 1.
func timeoutFor(code int) string {
	if code == 0 {
		return "1m"
	}
	return "10ms"
}

// `wait` is satisfied with a driver that another registrar serves, `status` is not.
func TestWaitServedByAnother(t *testing.T) {
	conflict := because(driverIn("a.csi.example", "conflict", hour), "held by process 7")
	served := conflict
	served.ServedBy = status.ServedBy{PID: 7, Since: noon, AskedAt: noon}
	for name, c := range map[string]struct {
		driver status.Driver
		wait   int
	}{"served": {served, 0}, "only in conflict": {conflict, 1}} {
		t.Run(name, func(t *testing.T) {
			root := fake.ShortDir(t)
			newFake(c.driver).serve(t, root)
			t.Chdir(root)
			for _, args := range [][]string{{"wait"}, {"wait", "a.csi.example"}} {
				if code, _, stderr := try(t, append(args, "--timeout", timeoutFor(c.wait), "--config-root", ".")...); code != c.wait {
					t.Errorf("%q: %d %s", args, code, stderr)
				}
			}
			for _, args := range [][]string{{"status"}, {"status", "a.csi.example"}} {
				if code, _, stderr := try(t, append(args, "--config-root", ".")...); code != 1 {
					t.Errorf("%q: %d %s", args, code, stderr)
				}
			}
		})
	}
}

// The pause between two attempts does not grow with the time for which the daemon is down.
func TestWaitConnectsSoonAfterALongTime(t *testing.T) {
	fake.CheckLeaks(t)
	root := fake.ShortDir(t)
	t.Chdir(root)
	s, ended := newSession(), make(chan int, 1)
	go func() { ended <- s.run(t.Context(), "wait", "--config-root", ".") }()
	time.Sleep(1200 * time.Millisecond)
	start := time.Now()
	newFake(driverIn("a.csi.example", "registered", hour)).serve(t, root)
	if code := <-ended; code != 0 {
		t.Errorf("%d %s", code, s.stderr)
	}
	if took := time.Since(start); took > 800*time.Millisecond {
		t.Errorf("it took %s", took)
	}
}

// TestWaitNamesEachDriver checks that each driver that is not registered is named, not only the
// first.
func TestWaitNamesEachDriver(t *testing.T) {
	s := status.Document{Drivers: []status.Driver{
		{Name: "a.example", State: "absent"}, {Name: "b.example", State: string(status.Registered)}, {Name: "c.example", State: "refused", Reason: "why"},
	}}
	got := strings.Join(notRegistered(s, []string{"a.example", "b.example", "c.example", "d.example"}), "; ")
	if want := "a.example: absent; c.example: refused: why; d.example: not configured"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// A daemon that has not read the files yet, or ends because root_dir was changed, has no drivers:
// there is something to wait for.
func TestWaitForTablesThatAreNotRead(t *testing.T) {
	root := fake.ShortDir(t)
	file := filepath.Join(root, "etc/csi-registrar/conf.d/a.toml")
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("[driver.\"a.csi.example\"]\nsocket = \"/run/a.sock\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	d := newFake()
	d.serve(t, root)
	code, _, stderr := try(t, "wait", "--config-root", root, "--timeout", "300ms")
	if code != 1 || !strings.Contains(stderr, "the daemon has not yet read the files, which configure 1 driver") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	d.setDrivers(driverIn("a.csi.example", "registered", hour))
	if code, _, stderr := try(t, "wait", "--config-root", root); code != 0 || stderr != "" {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}
