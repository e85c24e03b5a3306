// Package systemd is what the daemon says to the service manager and gets from it:
// readiness, watchdog, sockets handed over, the descriptor store, the job that is at
// work on the unit, and the journal.
package systemd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// sendTimeout bounds one message. The manager's queue is full only while it is busy or
// executing itself anew; a daemon must not hang with it.
const sendTimeout = 5 * time.Second

// Notifier sends the messages of sd_notify(3). All methods of a nil Notifier do nothing,
// successfully. It keeps no connection: the socket may be made anew under it.
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

// Ready tells that the service is up, or that a reload announced by Reloading is done.
func (n *Notifier) Ready() error { return n.send("READY=1") }

// Reloading tells that a reload begins. Ready must follow.
func (n *Notifier) Reloading() error {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return fmt.Errorf("cannot read the monotonic clock: %w", err)
	}
	return n.send("RELOADING=1", "MONOTONIC_USEC="+strconv.FormatInt(now.Nano()/1000, 10))
}

// Stopping tells that the service begins to shut down.
func (n *Notifier) Stopping() error { return n.send("STOPPING=1") }

// Status sets the line that systemctl status shows. Line breaks become blanks.
func (n *Notifier) Status(text string) error {
	return n.send("STATUS=" + strings.NewReplacer("\n", " ", "\r", " ").Replace(text))
}

// Watchdog tells that the service is alive (see WatchdogInterval).
func (n *Notifier) Watchdog() error { return n.send("WATCHDOG=1") }

// ExtendTimeout asks for at least d more, from now, for the start or stop at work.
func (n *Notifier) ExtendTimeout(d time.Duration) error {
	return n.send("EXTEND_TIMEOUT_USEC=" + strconv.FormatInt(d.Microseconds(), 10))
}

// Barrier waits until the manager has read everything sent before.
func (n *Notifier) Barrier(ctx context.Context) error {
	if n == nil {
		return nil
	}
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("cannot wait for the service manager: %w", err)
	}
	defer r.Close()
	err = n.sendDescriptor("BARRIER=1", w)
	// Ours must be closed, or the end of the pipe would never come.
	if err := errors.Join(err, w.Close()); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = r.SetReadDeadline(time.Unix(1, 0)) }) // fails only on a closed file
	defer stop()
	// The manager closes its copy of w when it comes to this message.
	switch _, err := r.Read(make([]byte, 1)); {
	case ctx.Err() != nil:
		return fmt.Errorf("the service manager does not read its messages: %w", context.Cause(ctx))
	case err == nil:
		return errors.New("cannot wait for the service manager: it wrote to the barrier")
	}
	return nil
}

func (n *Notifier) send(lines ...string) error {
	if n == nil {
		return nil
	}
	return n.transmit(strings.Join(lines, "\n"), nil)
}

// sendDescriptor sends a message with a descriptor. It borrows the descriptor with
// Control: File and Fd would set the shared socket blocking.
func (n *Notifier) sendDescriptor(message string, c syscall.Conn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return fmt.Errorf("cannot send a descriptor to the service manager: %w", err)
	}
	var sent error
	if err := raw.Control(func(fd uintptr) { sent = n.transmit(message, unix.UnixRights(int(fd))) }); err != nil {
		return fmt.Errorf("cannot send a descriptor to the service manager: %w", err)
	}
	return sent
}

func (n *Notifier) transmit(message string, rights []byte) (err error) {
	defer func() {
		if err != nil {
			what, _, _ := strings.Cut(message, "=")
			err = fmt.Errorf("cannot send %s to the service manager: %w", what, err)
		}
	}()
	// A leading @ means an abstract socket, to systemd and to package net.
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: n.addr, Net: "unixgram"})
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
		return err
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	// WriteMsgUnix refuses connected datagram sockets, so sendmsg by hand.
	var sent error
	err = raw.Write(func(fd uintptr) bool {
		for {
			sent = unix.Sendmsg(int(fd), []byte(message), rights, nil, unix.MSG_NOSIGNAL)
			if sent != unix.EINTR {
				break
			}
		}
		return sent != unix.EAGAIN
	})
	return cmpErr(err, sent)
}

// cmpErr returns the first error that is one.
func cmpErr(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// WatchdogInterval returns how often the manager wants to hear Watchdog at the least
// ($WATCHDOG_USEC); call it at half of that. False if it does not watch this process.
// getenv is os.Getenv.
func WatchdogInterval(getenv func(string) string) (time.Duration, bool) {
	usec, err := strconv.ParseInt(getenv("WATCHDOG_USEC"), 10, 64)
	if err != nil || usec <= 0 || usec > int64(365*24*time.Hour/time.Microsecond) {
		return 0, false
	}
	if pid := getenv("WATCHDOG_PID"); pid != "" && pid != strconv.Itoa(os.Getpid()) {
		return 0, false
	}
	return time.Duration(usec) * time.Microsecond, true
}
