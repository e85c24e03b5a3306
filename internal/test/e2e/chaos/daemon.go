package chaos

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/test/fake"
)

const (
	startsWithin = 15 * time.Second // TimeoutStartSec= of the unit
	stopsWithin  = 10 * time.Second
	watchdog     = 6 * time.Second
)

// Daemon is one process of csi-registrar.
type Daemon struct {
	cmd    *exec.Cmd
	ended  chan struct{} // closed when it has ended and its log was read
	err    error         // of Wait, when ended is closed
	began  time.Time
	before int // how many READY=1 were sent before
	frozen bool

	readyAt time.Time // when its READY=1 was first seen
}

func (d *Daemon) startedAt() time.Time {
	if d == nil {
		return time.Time{}
	}
	return d.began
}

// spawner starts daemons one after the other, as a service manager does.
type spawner struct {
	binary  string
	root    string // --config-root
	manager *fake.Manager
	line    func(string) // each line of the log
}

// start starts the next daemon with what the store holds.
func (s *spawner) start(args ...string) (*Daemon, error) {
	if err := s.settle(); err != nil {
		return nil, err
	}
	cmd := s.manager.Command(context.Background(), s.binary, append([]string{"run", "--config-root", s.root}, args...)...)
	cmd.Env = slices.DeleteFunc(cmd.Env, func(kv string) bool {
		return strings.HasPrefix(kv, "WATCHDOG_") || strings.HasPrefix(kv, "JOURNAL_STREAM=")
	})
	cmd.Env = append(cmd.Env, fmt.Sprintf("WATCHDOG_USEC=%d", watchdog.Microseconds()))
	errs, err := cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	d := &Daemon{cmd: cmd, ended: make(chan struct{}), began: time.Now(), before: s.manager.State().Ready}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(d.ended)
		lines := bufio.NewScanner(errs)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			s.line(lines.Text())
		}
		d.err = errors.Join(lines.Err(), cmd.Wait())
	}()
	return d, nil
}

// settle waits until the manager has processed all messages of the last process: it must not pass a
// descriptor that is just being removed from the store.
func (s *spawner) settle() error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: s.manager.SocketPath(), Net: "unixgram"})
	if err != nil {
		return errors.Join(err, w.Close())
	}
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err != nil {
		return errors.Join(err, w.Close())
	}
	var serr error
	err = raw.Write(func(fd uintptr) bool {
		serr = unix.Sendmsg(int(fd), []byte("BARRIER=1"), unix.UnixRights(int(w.Fd())), nil, 0)
		return serr != unix.EAGAIN
	})
	if err := errors.Join(err, serr, w.Close()); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, r)
	return err
}

func (d *Daemon) running() bool {
	select {
	case <-d.ended:
		return false
	default:
		return true
	}
}

func (d *Daemon) signal(s syscall.Signal) error {
	if err := d.cmd.Process.Signal(s); !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// kill kills the daemon and waits for its end.
func (d *Daemon) kill() error {
	err := d.signal(syscall.SIGKILL)
	<-d.ended
	return err
}

// terminate sends SIGTERM. It returns an error if the daemon does not end, or fails.
func (d *Daemon) terminate(wasReady bool) error {
	if err := d.signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-d.ended:
	case <-time.After(stopsWithin):
		return errors.Join(fmt.Errorf("the daemon did not end within %s after TERM", stopsWithin), d.kill())
	}
	// Before it is ready, the process may still be the shell that executes the daemon.
	if d.err != nil && wasReady {
		return fmt.Errorf("the daemon ended badly after TERM: %w", d.err)
	}
	return nil
}

// descriptors counts the daemon's open descriptors.
func (d *Daemon) descriptors() (int, []string, error) {
	dir := fmt.Sprintf("/proc/%d/fd", d.cmd.Process.Pid)
	entries, err := os.ReadDir(dir)
	var open []string
	for _, e := range entries {
		to, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err == nil {
			open = append(open, to)
		}
	}
	slices.Sort(open)
	return len(open), open, err
}

// api is a client of the control socket.
type api struct{ client *http.Client }

func newAPI(root string) api {
	path := filepath.Join(root, "run", "csi-registrar", "control.sock")
	return api{&http.Client{
		Timeout: 5 * time.Second,
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}},
	}}
}

func (a api) do(method, path string) (string, error) {
	req, err := http.NewRequest(method, "http://control"+path, nil)
	if err != nil {
		return "", err
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

// document is the part of the status document that is read here.
type document struct {
	ConfigError string         `json:"config_error"`
	Drivers     []driverStatus `json:"drivers"`
	Stuck       []struct {
		Path string `json:"path"`
	} `json:"stuck"`
}

type driverStatus struct {
	Name         string            `json:"name"`
	State        string            `json:"state"`
	Driver       string            `json:"driver"`
	Registration string            `json:"registration"`
	Reason       string            `json:"reason"`
	NodeID       string            `json:"node_id"`
	Topology     map[string]string `json:"topology"`
	Limit        int64             `json:"max_volumes_per_node"`
	DampedUntil  time.Time         `json:"damped_until"`
}

func (a api) status() (s document, err error) {
	body, err := a.do(http.MethodGet, "/v1/status")
	if err == nil {
		if err = json.Unmarshal([]byte(body), &s); err != nil {
			err = fmt.Errorf("%w in %.200q", err, body)
		}
	}
	return s, err
}

func (s document) driver(name string) (found driverStatus) {
	for _, d := range s.Drivers {
		if d.Name == name {
			return d
		}
	}
	return found
}

func (a api) goroutines() (int, string, error) {
	body, err := a.do(http.MethodGet, "/debug/pprof/goroutine?debug=1")
	if err != nil {
		return 0, "", err
	}
	var n int
	_, err = fmt.Sscanf(body, "goroutine profile: total %d", &n)
	return n, body, err
}

// entry is a line of the daemon's log.
type entry struct {
	at     time.Time
	level  string
	msg    string
	fields map[string]string
}

var pair = regexp.MustCompile(`([A-Za-z_][A-Za-z_0-9.]*)=("(?:[^"\\]|\\.)*"|[^ ]*)`)

// parse reads a line of slog's text format; false if it is none.
func parse(line string) (entry, bool) {
	if !strings.HasPrefix(line, "time=") {
		return entry{}, false
	}
	e := entry{fields: map[string]string{}}
	for _, m := range pair.FindAllStringSubmatch(line, -1) {
		v := m[2]
		if s, err := strconv.Unquote(v); err == nil {
			v = s
		}
		if _, twice := e.fields[m[1]]; !twice {
			e.fields[m[1]] = v
		}
	}
	at, err := time.Parse(time.RFC3339Nano, e.fields["time"])
	at = at.Add(ms - 1) // the log has whole milliseconds, rounded down
	e.at, e.level, e.msg = at, e.fields["level"], e.fields["msg"]
	return e, err == nil
}
