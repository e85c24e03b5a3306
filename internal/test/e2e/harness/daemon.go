package harness

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/built"
)

// Status has the fields of `status --json` that tests read.
type Status struct {
	Version         string    `json:"version"`
	StartedAt       time.Time `json:"started_at"`
	ConfigFiles     []string  `json:"config_files"`
	ConfigError     string    `json:"config_error"`
	PluginsRegistry string    `json:"plugins_registry"`
	Drivers         []DriverStatus
}

// DriverStatus is one driver of the status document.
type DriverStatus struct {
	Name               string            `json:"name"`
	Socket             string            `json:"socket"`
	Endpoint           string            `json:"endpoint"`
	State              string            `json:"state"`
	Driver             string            `json:"driver"`
	Registration       string            `json:"registration"`
	Since              time.Time         `json:"since"`
	Reason             string            `json:"reason"`
	RegistrationSocket string            `json:"registration_socket"`
	NodeID             string            `json:"node_id"`
	Topology           map[string]string `json:"topology"`
	MaxVolumes         int64             `json:"max_volumes_per_node"`
	DriverVersion      string            `json:"driver_version"`
	RegisteredAt       time.Time         `json:"registered_at"`
	LastGetInfoAt      time.Time         `json:"last_get_info_at"`
	KubeletError       string            `json:"kubelet_error"`
	Republications     int               `json:"republications"`
	DampedUntil        time.Time         `json:"damped_until"`
}

// Daemon is a running csi-registrar.
type Daemon struct {
	*process
	node   *Node
	client *http.Client
}

// Command returns a command of csi-registrar for this node.
func (n *Node) Command(args ...string) *exec.Cmd {
	n.T.Helper()
	cmd := exec.Command(built.Registrar(n.T), args...)
	cmd.Env = append(cleanEnv(), unitEnv(n.T)...)
	return cmd
}

// unitEnv is the unit's Environment= without the size of the descriptor store, so that memory is
// measured with the shipped settings.
func unitEnv(t testing.TB) (env []string) {
	text, err := os.ReadFile(filepath.Join(built.Root(t), "systemd", "csi-registrar.service"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), "Environment=GO"); ok {
			env = append(env, strings.Fields("GO"+value)...)
		}
	}
	return env
}

// cleanEnv is the environment without the variables of a service manager that runs the test.
func cleanEnv() []string {
	return slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		switch name {
		case "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID",
			"JOURNAL_STREAM", "INVOCATION_ID", role:
			return true
		}
		return false
	})
}

// StartDaemon starts `csi-registrar run` with the node's configuration and waits until it
// answers on its control socket.
func (n *Node) StartDaemon(args ...string) *Daemon {
	n.T.Helper()
	d := n.startDaemon(n.Command(append([]string{"run", "--config-root", n.Etc}, args...)...))
	d.Ready(10 * time.Second)
	return d
}

// StartDaemonVia starts the daemon through a command that executes its arguments, such as one that
// sets a limit or creates a namespace.
func (n *Node) StartDaemonVia(cmd *exec.Cmd) *Daemon {
	n.T.Helper()
	d := n.LaunchVia(cmd)
	d.Ready(10 * time.Second)
	return d
}

// LaunchVia is StartDaemonVia without waiting for the daemon.
func (n *Node) LaunchVia(cmd *exec.Cmd) *Daemon {
	n.T.Helper()
	cmd.Args = append(cmd.Args, built.Registrar(n.T), "run", "--config-root", n.Etc)
	cmd.Env = cleanEnv()
	return n.startDaemon(cmd)
}

// StartDaemonBehind starts a second daemon with the same configuration. The first daemon has the
// control socket as long as it runs.
func (n *Node) StartDaemonBehind() *Daemon {
	n.T.Helper()
	return n.startDaemon(n.Command("run", "--config-root", n.Etc))
}

// StartWithFlags starts `csi-registrar run` with flags of node-driver-registrar, which exclude
// --config-root. It gets its own /run, so that it does not meet a daemon of this machine.
func (n *Node) StartWithFlags(args ...string) *Daemon {
	n.T.Helper()
	cmd := exec.Command("/bin/sh", append([]string{"-c", `mount -t tmpfs tmpfs /run && exec "$0" "$@"`, built.Registrar(n.T), "run"}, args...)...)
	cmd.Env = cleanEnv()
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	d := n.startDaemonAt(cmd, func(pid int) string {
		return fmt.Sprintf("/proc/%d/root/run/csi-registrar/control.sock", pid)
	})
	d.Ready(10 * time.Second)
	return d
}

func (n *Node) startDaemon(cmd *exec.Cmd) *Daemon {
	n.T.Helper()
	return n.startDaemonAt(cmd, func(int) string { return n.ControlSocket() })
}

// ControlSocket is where the node's daemon listens for commands.
func (n *Node) ControlSocket() string {
	return filepath.Join(n.Etc, "run", "csi-registrar", "control.sock")
}

func (n *Node) startDaemonAt(cmd *exec.Cmd, control func(pid int) string) *Daemon {
	n.T.Helper()
	d := &Daemon{node: n}
	d.process = start(n.T, fmt.Sprintf("csi-registrar %d", n.daemons+1), cmd)
	d.client = unixClient(control(d.PID()))
	n.daemons++
	n.T.Cleanup(func() {
		if d.running() && !n.T.Failed() {
			d.noLeaks()
			d.Stop()
		}
		d.client.CloseIdleConnections()
	})
	return d
}

func unixClient(path string) *http.Client {
	return &http.Client{
		Timeout: 10 * time.Second,
		Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}},
	}
}

// Ready waits until the daemon's control socket answers.
func (d *Daemon) Ready(limit time.Duration) {
	d.t.Helper()
	Eventually(d.t, limit, "the daemon's control socket", func() string {
		if !d.running() {
			d.t.Fatalf("%s ended: %v", d.what, d.err)
		}
		resp, err := d.client.Get("http://control/healthz")
		if err != nil {
			return err.Error()
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return resp.Status
		}
		return ""
	})
}

// Hush closes the test's connections to the daemon, which could wake it up.
func (d *Daemon) Hush() { d.client.CloseIdleConnections() }

// Get sends a GET request to the control socket.
func (d *Daemon) Get(path string) (int, string) {
	d.t.Helper()
	resp, err := d.client.Get("http://control" + path)
	if err != nil {
		d.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		d.t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// Status returns the document of GET /v1/status.
func (d *Daemon) Status() Status {
	d.t.Helper()
	code, body := d.Get("/v1/status")
	var s Status
	if err := json.Unmarshal([]byte(body), &s); err != nil || code != http.StatusOK {
		d.t.Fatalf("GET /v1/status: %d %v: %s", code, err, body)
	}
	return s
}

// Driver returns the status of one driver, or an empty one if the document does not have it.
func (d *Daemon) Driver(name string) DriverStatus {
	d.t.Helper()
	for _, s := range d.Status().Drivers {
		if s.Name == name {
			return s
		}
	}
	return DriverStatus{}
}

// WaitState waits until a driver is in a state, and returns its status.
func (d *Daemon) WaitState(driver, state string, limit time.Duration) DriverStatus {
	d.t.Helper()
	return d.WaitStatus(driver, "state "+state, limit, func(s DriverStatus) bool { return s.State == state })
}

// WaitStatus waits until the status of a driver satisfies a condition.
func (d *Daemon) WaitStatus(driver, what string, limit time.Duration, is func(DriverStatus) bool) DriverStatus {
	d.t.Helper()
	var s DriverStatus
	Eventually(d.t, limit, driver+": "+what, func() string {
		if s = d.Driver(driver); is(s) {
			return ""
		}
		return fmt.Sprintf("state %q, driver %q, registration %q, reason %q", s.State, s.Driver, s.Registration, s.Reason)
	})
	return s
}

// Stop ends the daemon with SIGTERM. Its exit code must be 0.
func (d *Daemon) Stop() {
	d.t.Helper()
	if code := d.end(syscall.SIGTERM, 10*time.Second); code != 0 {
		d.t.Errorf("csi-registrar ended with %d after TERM", code)
	}
}

// Kill ends the daemon with SIGKILL.
func (d *Daemon) Kill() {
	d.t.Helper()
	d.end(syscall.SIGKILL, 10*time.Second)
}

// Signal sends a signal to the daemon.
func (d *Daemon) Signal(s syscall.Signal) { d.signal(s) }

// Running reports whether the daemon runs.
func (d *Daemon) Running() bool { return d.running() }

// Wait waits for the end of the daemon and returns its exit code.
func (d *Daemon) Wait(limit time.Duration) int { d.t.Helper(); return d.wait(limit) }

// Log returns the daemon's standard error so far.
func (d *Daemon) Log() string { return d.log.String() }

// PID returns the daemon's process ID.
func (d *Daemon) PID() int { return d.cmd.Process.Pid }

// Run runs a command of csi-registrar on the node to its end: output of both kinds, code.
func (n *Node) RunCommand(args ...string) (stdout, stderr string, code int) {
	n.T.Helper()
	cmd := n.Command(args...)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if cmd.ProcessState == nil {
		n.T.Fatalf("cannot run csi-registrar: %v", err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}
