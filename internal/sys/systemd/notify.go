// Package systemd implements the communication with the service manager: readiness, watchdog,
// passed descriptors, the descriptor store, the unit's job, and the journal.
package systemd

import (
	"fmt"
	"net"
	"strings"
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
// successfully. It keeps no connection: the socket may be recreated.
// May be used by several goroutines.
type Notifier struct {
	addr string
}

// NewNotifier returns the notifier for $NOTIFY_SOCKET, nil if that is not set. getenv is
// os.Getenv.
func NewNotifier(getenv func(string) string) *Notifier {
	if addr := getenv("NOTIFY_SOCKET"); addr != "" {
		return &Notifier{addr: addr}
	}
	return nil
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
	if err := n.send(message, -1, time.Now().Add(limit)); err != nil {
		what, _, _ := strings.Cut(message, "=")
		return fmt.Errorf("cannot send %s to the service manager: %w", what, err)
	}
	return nil
}

// send sends a message, with a descriptor unless that is negative. go-systemd's SdNotify
// sends no descriptors and has no deadline.
func (n *Notifier) send(message string, fd int, deadline time.Time) error {
	// A leading @ means an abstract socket, to systemd and to package net.
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: n.addr, Net: "unixgram"})
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetWriteDeadline(deadline); err != nil {
		return err
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	// WriteMsgUnix refuses connected datagram sockets, so sendmsg by hand.
	var sent error
	err = raw.Write(func(to uintptr) bool {
		sent = unix.EINTR
		for sent == unix.EINTR {
			sent = unix.Sendmsg(int(to), []byte(message), rights, nil, unix.MSG_NOSIGNAL)
		}
		return sent != unix.EAGAIN
	})
	if err != nil {
		return err
	}
	return sent
}
