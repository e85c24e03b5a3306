package harness

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"csi-registrar/internal/e2e/built"

	"golang.org/x/sys/unix"
)

// Manager plays systemd's part for a daemon: it hears what the daemon notifies, keeps the
// descriptors that it stores, and hands them to the next one. (The system tests use a
// real systemd; this is for what must be repeated often. Module csi-registrar has a
// stand-in too, but importing it would lift the kubelet's dependencies to other
// versions than its release has.)
type Manager struct {
	node *Node
	addr string
	conn *net.UnixConn

	mu     sync.Mutex
	stored []stored
	status string
	ready  int // how often READY=1 came
}

type stored struct {
	name string
	dev  uint64
	ino  uint64
	file *os.File
}

// Manager starts a descriptor store for the node's daemons.
func (n *Node) Manager() *Manager {
	n.T.Helper()
	m := &Manager{node: n, addr: filepath.Join(n.Dir, "notify")}
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: m.addr, Net: "unixgram"})
	if err != nil {
		n.T.Fatal(err)
	}
	m.conn = conn
	done := make(chan struct{})
	go func() {
		defer close(done)
		m.serve()
	}()
	n.T.Cleanup(func() {
		conn.Close()
		<-done
		m.Empty()
	})
	return m
}

func (m *Manager) serve() {
	msg, oob := make([]byte, 4096), make([]byte, 1024)
	for {
		k, oobn, _, _, err := m.conn.ReadMsgUnix(msg, oob)
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				m.node.T.Errorf("manager: %v", err)
			}
			return
		}
		files, err := received(oob[:oobn])
		if err != nil {
			m.node.T.Errorf("manager: %v", err)
		}
		m.hear(string(msg[:k]), files)
	}
}

func received(oob []byte) ([]*os.File, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var files []*os.File
	for _, c := range msgs {
		if c.Header.Type != unix.SCM_RIGHTS {
			continue
		}
		fds, err := unix.ParseUnixRights(&c)
		if err != nil {
			return files, err
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "stored"))
		}
	}
	return files, nil
}

func (m *Manager) hear(msg string, files []*os.File) {
	m.mu.Lock()
	defer m.mu.Unlock()
	said := map[string]string{}
	for line := range strings.Lines(msg) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), "=")
		said[k] = v
	}
	if s, ok := said["STATUS"]; ok {
		m.status = s
	}
	if said["READY"] == "1" {
		m.ready++
	}
	switch {
	case said["FDSTOREREMOVE"] == "1":
		m.remove(said["FDNAME"])
	case said["FDSTORE"] == "1":
		for _, f := range files {
			m.keep(said["FDNAME"], f)
		}
		return
	}
	for _, f := range files { // of a BARRIER=1: closing it is the answer
		f.Close()
	}
}

func (m *Manager) keep(name string, f *os.File) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		m.node.T.Errorf("manager: %v", err)
		f.Close()
		return
	}
	for _, s := range m.stored {
		if s.dev == st.Dev && s.ino == st.Ino { // stored already: systemd keeps the first
			f.Close()
			return
		}
	}
	m.stored = append(m.stored, stored{name, st.Dev, st.Ino, f})
}

func (m *Manager) remove(name string) {
	var rest []stored
	for _, s := range m.stored {
		if s.name == name {
			s.file.Close()
		} else {
			rest = append(rest, s)
		}
	}
	m.stored = rest
}

// Empty closes what is stored, as systemd does when the service is stopped.
func (m *Manager) Empty() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.stored {
		s.file.Close()
	}
	m.stored = nil
}

// Stored lists the names of what is stored.
func (m *Manager) Stored() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var names []string
	for _, s := range m.stored {
		names = append(names, s.name)
	}
	return names
}

// StatusText is the last STATUS=.
func (m *Manager) StatusText() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.status
}

// StartDaemon starts the daemon as systemd does it with the shipped unit: with
// --keep-sockets, $NOTIFY_SOCKET and what is stored. It waits for READY=1.
func (m *Manager) StartDaemon(args ...string) *Daemon {
	n := m.node
	n.T.Helper()
	m.mu.Lock()
	before := m.ready
	var files []*os.File
	var names []string
	for _, s := range m.stored {
		files, names = append(files, s.file), append(names, s.name)
	}
	m.mu.Unlock()
	// Only the process itself knows its number in time.
	sh := append([]string{"-c", `LISTEN_PID=$$ exec "$0" "$@"`, built.Registrar(n.T), "run", "--keep-sockets", "--config-root", n.Etc}, args...)
	cmd := exec.Command("/bin/sh", sh...)
	cmd.Env = append(cleanEnv(), "NOTIFY_SOCKET="+m.addr)
	if len(files) > 0 {
		cmd.ExtraFiles = files
		cmd.Env = append(cmd.Env, "LISTEN_FDS="+strconv.Itoa(len(files)), "LISTEN_FDNAMES="+strings.Join(names, ":"))
	}
	d := n.startDaemon(cmd)
	Eventually(n.T, 15*time.Second, "READY=1", func() string {
		if !d.running() {
			n.T.Fatalf("%s ended: %v", d.what, d.err)
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.ready == before {
			return "not said yet; " + fmt.Sprintf("status %q", m.status)
		}
		return ""
	})
	d.Ready(5 * time.Second)
	return d
}

// Restart ends the daemon with a signal and starts the next.
func (m *Manager) Restart(d *Daemon, by syscall.Signal) *Daemon {
	m.node.T.Helper()
	d.end(by, 10*time.Second)
	return m.StartDaemon()
}
