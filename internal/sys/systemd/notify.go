// Package systemd implements the communication with the service manager: readiness, watchdog,
// passed descriptors, the descriptor store, the unit's job, and the journal.
package systemd

import (
	"cmp"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// The manager's queue is full while it is busy or re-executes. The daemon must not block then, so a
// message fails after sendTimeout. READY=1 has more time: without it the start fails, and
// TimeoutStartSec= is a minute.
const (
	sendTimeout  = time.Second
	readyTimeout = 10 * time.Second
)

// Notifier sends the messages of sd_notify(3). All methods of a nil Notifier do nothing,
// successfully. It keeps one socket, because a process without free descriptors must be able to
// feed its watchdog. May be used by several goroutines.
type Notifier struct {
	to unix.Sockaddr

	mu     sync.Mutex // held for one message, for at most its time limit
	socket *os.File
	err    error // why there is no socket
}

// NewNotifier returns the notifier for $NOTIFY_SOCKET, nil if that is not set. getenv is
// os.Getenv.
func NewNotifier(getenv func(string) string) *Notifier {
	addr := getenv("NOTIFY_SOCKET")
	if addr == "" {
		return nil
	}
	// a leading @ means an abstract socket, to systemd and here
	n := &Notifier{to: &unix.SockaddrUnix{Name: addr}}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if n.err = err; err == nil {
		n.socket = os.NewFile(uintptr(fd), "NOTIFY_SOCKET")
	}
	return n
}

// Close closes the socket.
func (n *Notifier) Close() error {
	if n == nil || n.err != nil {
		return nil
	}
	return n.socket.Close()
}

// Ready reports to the manager that the service is up.
func (n *Notifier) Ready() error { return n.report("READY=1", readyTimeout) }

// Stopping reports that the service begins to shut down.
func (n *Notifier) Stopping() error { return n.report("STOPPING=1", sendTimeout) }

// Status sets the line that systemctl status shows. Line breaks become spaces.
func (n *Notifier) Status(text string) error {
	return n.report("STATUS="+strings.NewReplacer("\n", " ", "\r", " ").Replace(text), sendTimeout)
}

// Watchdog reports that the service is alive.
func (n *Notifier) Watchdog() error { return n.report("WATCHDOG=1", sendTimeout) }

func (n *Notifier) report(message string, limit time.Duration) error {
	if n == nil {
		return nil
	}
	if err := n.send(message, -1, limit); err != nil {
		what, _, _ := strings.Cut(message, "=")
		return fmt.Errorf("cannot send %s to the service manager: %w", what, err)
	}
	return nil
}

// send sends a message, with a descriptor unless that is negative. go-systemd's SdNotify
// sends no descriptors and has no deadline.
func (n *Notifier) send(message string, fd int, limit time.Duration) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.err != nil {
		return n.err
	}
	if err := n.socket.SetWriteDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	raw, err := n.socket.SyscallConn()
	if err != nil {
		return err
	}
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	connected := false
	var sent error
	err = raw.Write(func(socket uintptr) bool {
		if !connected { // for each message, as the manager's socket may have been recreated
			connected = true
			if sent = unix.Connect(int(socket), n.to); sent != nil {
				return true
			}
		}
		sent = unix.EINTR
		for sent == unix.EINTR {
			sent = unix.Sendmsg(int(socket), []byte(message), rights, nil, unix.MSG_NOSIGNAL)
		}
		return sent != unix.EAGAIN
	})
	return cmp.Or(err, sent)
}
