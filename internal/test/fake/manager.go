package fake

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Manager is a service manager for one service, on a machine without systemd or without root: it
// reads the messages that the service sends to $NOTIFY_SOCKET, keeps the descriptors of its store,
// and passes them to the next process. Its methods may be called by several goroutines.
type Manager struct {
	conn   *net.UnixConn
	path   string
	done   chan struct{} // closed when serve has returned
	events chan string

	mu      sync.Mutex
	stopped chan struct{} // closed by Continue; nil: not stopped
	delay   time.Duration
	most    int
	store   []stored
	state   State
}

// State is the state that the service has reported.
type State struct {
	Ready    int // how often it sent READY=1
	Watchdog int // how often WATCHDOG=1
	Stopping bool
	Status   string
}

type stored struct {
	name string
	file *os.File
}

// StartManager starts a manager that listens at the socket "notify" in dir until Close. The path
// must be short enough for a Unix socket.
func StartManager(dir string) (*Manager, error) {
	path := filepath.Join(dir, "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("cannot start the fake service manager: %w", err)
	}
	m := &Manager{most: 512, conn: conn, path: path, done: make(chan struct{}), events: make(chan string, 64)}
	go m.serve()
	return m, nil
}

// FillDatagrams sends to a datagram socket until its queue is full for every sender, not only for
// one whose buffer is full.
func FillDatagrams(path string) error {
	to := &unix.SockaddrUnix{Name: path}
	for {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		sent := 0
		for err = nil; err == nil; sent++ {
			err = unix.Sendto(fd, []byte("X=1"), 0, to)
		}
		_ = unix.Close(fd) // what it sent stays in the queue
		if err != unix.EAGAIN {
			return fmt.Errorf("cannot fill the queue of %s: %w", path, err)
		}
		if sent == 1 { // nothing of this sender fits
			return nil
		}
	}
}

// SocketPath returns the value of NOTIFY_SOCKET.
func (m *Manager) SocketPath() string { return m.path }

// SetMost sets FileDescriptorStoreMax=; the default is 512. Like systemd, the manager silently
// drops descriptors above that.
func (m *Manager) SetMost(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.most = n
}

// SetDelay sets how long each message takes.
func (m *Manager) SetDelay(d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.delay = d
}

// Stop makes the manager process no more messages until Continue. They wait in the kernel's queue
// until it is full, except for one, which is read at once.
func (m *Manager) Stop() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stopped == nil {
		m.stopped = make(chan struct{})
	}
}

// Continue ends Stop.
func (m *Manager) Continue() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stopped != nil {
		close(m.stopped)
		m.stopped = nil
	}
}

// Events receives each line that the service sends ("READY=1", "STATUS=…") except watchdog and
// barriers. It drops lines when 64 are waiting. Close closes it.
func (m *Manager) Events() <-chan string { return m.events }

// State returns the state of the service, counted over all its processes.
func (m *Manager) State() State {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.state
}

// Stored lists the names in the store, in the order of their arrival.
func (m *Manager) Stored() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	names := make([]string, len(m.store))
	for i, s := range m.store {
		names[i] = s.name
	}
	return names
}

// Drop empties the store, as systemd does when a service is stopped.
func (m *Manager) Drop() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var errs []error
	for _, s := range m.store {
		errs = append(errs, s.file.Close())
	}
	m.store = nil
	return errors.Join(errs...)
}

// Close stops listening and empties the store.
func (m *Manager) Close() error {
	err := m.conn.Close() // also removes the path
	m.Continue()
	<-m.done
	return errors.Join(err, m.Drop())
}

// Command prepares the next process of the service: NOTIFY_SOCKET is set, and the stored
// descriptors follow those in extra, by name. The caller starts it and waits for it.
// A shell sets LISTEN_PID, which must be the process's own number, and replaces itself.
func (m *Manager) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	const script = `export LISTEN_PID=$$; exec "$@"`
	cmd := exec.CommandContext(ctx, "/bin/sh", append([]string{"-c", script, "sh", name}, args...)...)
	m.mu.Lock()
	defer m.mu.Unlock()
	var names []string
	for _, s := range m.store {
		names = append(names, s.name)
		cmd.ExtraFiles = append(cmd.ExtraFiles, s.file)
	}
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+m.path)
	if len(names) > 0 {
		cmd.Env = append(cmd.Env, "LISTEN_FDS="+strconv.Itoa(len(names)), "LISTEN_FDNAMES="+strings.Join(names, ":"))
	}
	return cmd
}

func (m *Manager) serve() {
	defer close(m.done)
	defer close(m.events)
	message, rights := make([]byte, 4096), make([]byte, unix.CmsgSpace(4*768))
	for {
		n, oobn, _, _, err := m.conn.ReadMsgUnix(message, rights)
		if err != nil {
			return // closed
		}
		files := received(rights[:oobn])
		m.mu.Lock()
		stopped, delay := m.stopped, m.delay
		m.mu.Unlock()
		if stopped != nil {
			<-stopped
		}
		time.Sleep(delay)
		kept := m.hear(strings.Split(string(message[:n]), "\n"), files)
		if !kept { // closing it is the answer to a barrier
			for _, f := range files {
				_ = f.Close() // a copy that is not kept
			}
		}
	}
}

// hear processes one message and reports whether its descriptors were stored.
func (m *Manager) hear(lines []string, files []*os.File) (kept bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	name := "stored"
	if i := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, "FDNAME=") }); i >= 0 {
		name = strings.TrimPrefix(lines[i], "FDNAME=")
	}
	for _, line := range lines {
		key, value, _ := strings.Cut(line, "=")
		switch key {
		case "READY":
			m.state.Ready++
		case "STOPPING":
			m.state.Stopping = true
		case "STATUS":
			m.state.Status = value
		case "FDSTORE":
			// Without FDPOLL=0 PID 1 drops a listener at the first error or hangup: here at once.
			kept = len(m.store)+len(files) <= m.most && slices.Contains(lines, "FDPOLL=0")
			for _, f := range files {
				if kept {
					m.store = append(m.store, stored{name, f})
				}
			}
		case "FDSTOREREMOVE":
			m.store = slices.DeleteFunc(m.store, func(s stored) bool {
				if s.name == name {
					_ = s.file.Close() // only the manager has it, and nothing was written
				}
				return s.name == name
			})
		case "WATCHDOG":
			m.state.Watchdog++
			continue
		case "BARRIER":
			continue
		}
		select {
		case m.events <- line:
		default:
		}
	}
	return kept
}

// received returns the descriptors of a message as files.
func received(rights []byte) []*os.File {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil // not from sendmsg with SCM_RIGHTS
	}
	var files []*os.File
	for _, c := range messages {
		fds, err := unix.ParseUnixRights(&c)
		if err != nil {
			continue // credentials
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "handed in"))
		}
	}
	return files
}
