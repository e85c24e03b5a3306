package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/test/fake"
)

// asProgram makes the test binary behave as csi-registrar.
const asProgram = "CSI_REGISTRAR_TEST_AS_PROGRAM"

// withRun makes a program in a mount namespace of its own see another directory as /run.
const withRun = "CSI_REGISTRAR_TEST_RUN"

func TestMain(m *testing.M) {
	if run := os.Getenv(withRun); run != "" {
		if err := unix.Mount(run, "/run", "", unix.MS_BIND, ""); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	if os.Getenv(asProgram) != "" {
		os.Exit(Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// fakeDaemon is a control.Backend with a state set by the test.
type fakeDaemon struct {
	mu          sync.Mutex
	status      status.Document
	changed     chan struct{}
	reloadErr   error
	reloadNotes []string
}

func newFake(drivers ...status.Driver) *fakeDaemon {
	return &fakeDaemon{changed: make(chan struct{}), status: status.Document{
		Version: "1.2.3", StartedAt: noon.Add(-time.Hour), ConfigFiles: []safetext.Claim{}, PluginsRegistry: "/var/lib/kubelet/plugins_registry", Drivers: drivers,
	}}
}

func (d *fakeDaemon) Status() status.Document {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.status
}

func (d *fakeDaemon) Changed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.changed
}

func (d *fakeDaemon) set(f func(*status.Document)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f(&d.status)
	close(d.changed)
	d.changed = make(chan struct{})
}

func (d *fakeDaemon) setDrivers(drivers ...status.Driver) {
	d.set(func(s *status.Document) { s.Drivers = drivers })
}

func (d *fakeDaemon) Reload(context.Context, bool) ([]string, error) {
	return d.reloadNotes, d.reloadErr
}
func (d *fakeDaemon) Reregister(context.Context, string, bool) error { return nil }
func (d *fakeDaemon) Alive(context.Context) error                    { return nil }
func (d *fakeDaemon) Live(context.Context, string) error             { return nil }

// serve serves the control socket below the root until stop or the end of the test.
func (d *fakeDaemon) serve(t *testing.T, root string) (stop func()) {
	t.Helper()
	ln, err := control.Listen(t.Context(), control.Path(root))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func(ln net.Listener) { ended <- control.Serve(ctx, ln, d, slog.New(slog.DiscardHandler)) }(ln)
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// noon is the current time in tests of texts.
var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

// output is a stream that can be read while it is written to.
type output struct {
	mu      sync.Mutex
	buf     bytes.Buffer
	written chan struct{} // capacity one
}

func newOutput() *output { return &output{written: make(chan struct{}, 1)} }

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	select {
	case o.written <- struct{}{}:
	default:
	}
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// await waits until the stream has the text.
func (o *output) await(t *testing.T, text string) {
	t.Helper()
	late := time.After(10 * time.Second)
	for !strings.Contains(o.String(), text) {
		select {
		case <-o.written:
		case <-late:
			t.Fatalf("no %q in %q", text, o.String())
		}
	}
}

// session runs command lines.
type session struct {
	env            *env
	stdout, stderr *output
}

func newSession(vars ...string) *session {
	s := &session{stdout: newOutput(), stderr: newOutput()}
	s.env = &env{
		stdin: strings.NewReader(""), stdout: s.stdout, stderr: s.stderr,
		now:      func() time.Time { return noon },
		terminal: func(io.Writer) (int, bool) { return 0, false },
		getenv: func(name string) string {
			for _, v := range vars {
				if value, ok := strings.CutPrefix(v, name+"="); ok {
					return value
				}
			}
			return ""
		},
	}
	return s
}

func (s *session) run(ctx context.Context, args ...string) int {
	return s.env.report(dispatch(ctx, s.env, commands(), args))
}

// try runs a command line and returns its exit code and output.
func try(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	s := newSession()
	code = s.run(t.Context(), args...)
	return code, s.stdout.String(), s.stderr.String()
}

// golden compares with a file below testdata. With UPDATE_GOLDEN=1 it writes the file.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(got), 0o644)); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s: got\n%s\nwant\n%s", path, got, want)
	}
}

// driverIn returns a driver as the daemon reports it, in a state since ago before noon.
func driverIn(name, state string, ago time.Duration) status.Driver {
	d := status.Driver{
		Name: name, Socket: safetext.Claim("/run/" + name + "/csi.sock"), Endpoint: safetext.Claim("/run/" + name + "/csi.sock"), State: state,
		Driver: status.Ready, Registration: status.None, Since: noon.Add(-ago),
		RegistrationSocket: safetext.Claim("/var/lib/kubelet/plugins_registry/" + name + "-reg.sock"),
	}
	switch state {
	case "absent", "starting", "mismatch":
		d.Driver = status.DriverState(state)
	case status.Disabled:
		d.Driver, d.Since, d.RegistrationSocket = status.Absent, time.Time{}, ""
		d.Reason = "disabled in the configuration"
	case "ready":
	default:
		d.Registration = status.RegistrationState(state)
	}
	if state == "registered" {
		d.RegisteredAt, d.LastGetInfoAt = noon.Add(-ago), noon.Add(-ago)
	}
	return d
}

func because(d status.Driver, reason string) status.Driver {
	d.Reason = reason
	return d
}

// daemonNode is a node on which the test binary runs as the daemon, with a fake service manager.
type daemonNode struct {
	*testing.T
	root    string
	manager *fake.Manager
	daemon  *exec.Cmd
	log     *output
	prepare func(*exec.Cmd) // before it starts; may be nil
}

// start starts the daemon and waits for READY=1.
func (n *daemonNode) start(env ...string) {
	n.Helper()
	ready := n.manager.State().Ready
	n.daemon = n.manager.Command(context.WithoutCancel(n.Context()), os.Args[0], "run", "--keep-sockets", "--config-root", n.root)
	n.daemon.Env = append(append(n.daemon.Env, asProgram+"=1"), env...)
	n.daemon.Stderr = n.log
	if n.prepare != nil {
		n.prepare(n.daemon)
	}
	if err := n.daemon.Start(); err != nil {
		n.Fatal(err)
	}
	daemon := n.daemon
	n.Cleanup(func() { _ = daemon.Process.Kill() })
	n.eventually("the daemon is ready", func() bool { return n.manager.State().Ready > ready })
}

func (n *daemonNode) eventually(what string, holds func() bool) {
	n.Helper()
	for deadline := time.Now().Add(time.Minute); !holds(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			n.Fatalf("timed out waiting until %s\n%s", what, n.log)
		}
	}
}
