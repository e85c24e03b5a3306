package cli

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/control"
	"csi-registrar/internal/status"
)

// waiting runs `wait` beside the test.
func waiting(t *testing.T, args ...string) (s *session, ended chan int) {
	s, ended = newSession(), make(chan int, 1)
	go func() { ended <- s.run(t.Context(), append([]string{"wait"}, args...)...) }()
	return s, ended
}

func result(t *testing.T, s *session, ended chan int) int {
	t.Helper()
	select {
	case code := <-ended:
		return code
	case <-time.After(20 * time.Second):
		t.Fatalf("it still waits: %s", s.stderr)
		return 0
	}
}

func TestWait(t *testing.T) {
	leaks(t)
	root := newRoot(t)
	d := newFake(driverIn("a.csi.example", "registered", hour), driverIn("off.csi.example", status.Disabled, 0))
	d.serve(t, root)
	for _, args := range [][]string{{}, {"a.csi.example"}} {
		code, stdout, stderr := try(t, append([]string{"wait", "--config-root", root}, args...)...)
		if code != 0 || stdout+stderr != "" {
			t.Errorf("%v: %d %s%s", args, code, stdout, stderr)
		}
	}
}

func TestWaitForADriverThatIsNotConfiguredYet(t *testing.T) {
	leaks(t)
	root := newRoot(t)
	d := newFake(driverIn("a.csi.example", "registered", hour))
	d.serve(t, root)
	s, ended := waiting(t, "a.csi.example", "b.csi.example", "--config-root", root)
	d.setDrivers(driverIn("a.csi.example", "registered", hour), driverIn("b.csi.example", "absent", hour))
	select {
	case code := <-ended:
		t.Fatalf("it did not wait: %d %s", code, s.stderr)
	default:
	}
	d.setDrivers(driverIn("a.csi.example", "registered", hour), driverIn("b.csi.example", "registered", hour))
	if code := result(t, s, ended); code != 0 {
		t.Errorf("%d %s", code, s.stderr)
	}
}

// It waits for a daemon that is not running, whether its directory is there or not, and also
// if another one starts and stops there meanwhile.
func TestWaitForADaemonThatIsNotRunningYet(t *testing.T) {
	leaks(t)
	for name, prepare := range map[string]func(root string) error{
		"nothing":   func(string) error { return nil },
		"directory": func(root string) error { return os.MkdirAll(filepath.Dir(control.Path(root)), 0o755) },
	} {
		root := newRoot(t)
		if err := prepare(root); err != nil {
			t.Fatal(err)
		}
		s, ended := waiting(t, "a.csi.example", "--config-root", root)
		newFake().serve(t, root)() // comes and goes
		newFake(driverIn("a.csi.example", "registered", hour)).serve(t, root)
		if code := result(t, s, ended); code != 0 {
			t.Errorf("%s: %d %s", name, code, s.stderr)
		}
	}
}

// waitInVain is wait with a time limit that is as short as the machine allows: long enough for an
// answer of the daemon. The limit is LIMIT in what it returns.
func waitInVain(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	for limit := 50 * time.Millisecond; ; limit *= 2 {
		code, stdout, stderr = try(t, append([]string{"wait", "--timeout", limit.String()}, args...)...)
		if !strings.Contains(stderr, "the daemon has not answered") {
			return code, stdout, strings.Replace(stderr, limit.String(), "LIMIT", 1)
		}
	}
}

func TestWaitTimeout(t *testing.T) {
	leaks(t)
	root := newRoot(t)
	const hint = "hint: csi-registrar doctor finds out why a driver is not registered\n"
	code, stdout, stderr := waitInVain(t, "--config-root", root)
	if code != 1 || stdout != "" || stderr != "error: timed out after LIMIT:\n  cannot get the status: csi-registrar is not running (there is no "+control.Path(root)+")\n"+hint {
		t.Errorf("no daemon: %d %s", code, stderr)
	}
	d := newFake(
		driverIn("a.csi.example", "registered", hour),
		because(driverIn("b.csi.example", "absent", hour), "no such file\x1b[2J"),
		driverIn("off.csi.example", status.Disabled, 0),
	)
	d.serve(t, root)
	code, _, stderr = waitInVain(t, "--config-root", root)
	if code != 1 || stderr != "error: timed out after LIMIT:\n  b.csi.example: absent: no such file\\x1b[2J\n"+hint {
		t.Errorf("all: %d %s", code, stderr)
	}
	d.set(func(s *status.Document) { s.ConfigError = "x.toml:1: wrong" })
	code, _, stderr = waitInVain(t, "off.csi.example", "a.csi.example", "c.csi.example", "--config-root", root)
	if code != 1 || stderr != "error: timed out after LIMIT:\n  off.csi.example: disabled: disabled in the configuration\n  c.csi.example: not configured; the configuration has errors: x.toml:1: wrong\n"+hint {
		t.Errorf("named: %d %s", code, stderr)
	}
}

func TestReloadAndReregister(t *testing.T) {
	leaks(t)
	root := newRoot(t)
	for _, args := range []string{"reload", "reregister a.csi.example"} {
		if code, _, stderr := try(t, append(strings.Fields(args), "--config-root", root)...); code != 3 || !strings.Contains(stderr, "hint: start it") {
			t.Errorf("%s without a daemon: %d %s", args, code, stderr)
		}
	}
	d := newFake(driverIn("a.csi.example", "registered", hour))
	d.serve(t, root)
	for _, args := range []string{"reload", "reregister a.csi.example"} {
		if code, stdout, stderr := try(t, append(strings.Fields(args), "--config-root", root)...); code != 0 || stdout+stderr != "" {
			t.Errorf("%s: %d %s%s", args, code, stdout, stderr)
		}
	}
	code, _, stderr := try(t, "reregister", "b.csi.example", "--config-root", root)
	if code != 1 || stderr != "error: cannot register b.csi.example again: no driver of that name is configured\nhint: csi-registrar status lists the drivers\n" {
		t.Errorf("an unknown driver: %d %s", code, stderr)
	}
	d.reloadErr = errors.New("a.toml:1: wrong\nb.toml:2: wrong")
	code, _, stderr = try(t, "reload", "--config-root", root)
	if code != 1 || stderr != "error: cannot reload the configuration, the old one stays in force:\n  a.toml:1: wrong\n  b.toml:2: wrong\n" {
		t.Errorf("errors: %d %s", code, stderr)
	}
}

// After a long wait a daemon that comes is noticed by the file system's notification, not
// by the net below it; also with a root that is relative.
func TestWaitIsWokenByTheSocket(t *testing.T) {
	leaks(t)
	root := newRoot(t)
	t.Chdir(root)
	s, ended := waiting(t, "--config-root", ".")
	time.Sleep(1200 * time.Millisecond) // the pause between two looks has grown to a second
	came := time.Now()
	newFake(driverIn("a.csi.example", "registered", hour)).serve(t, root)
	if code := result(t, s, ended); code != 0 {
		t.Errorf("%d %s", code, s.stderr)
	}
	if took := time.Since(came); took > 500*time.Millisecond {
		t.Errorf("it took %s", took)
	}
}
