package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"csi-registrar/internal/control"
	"csi-registrar/internal/trace"
	"csi-registrar/internal/unixsock"
)

const (
	// leasePause is between two requests for a lease that was lost: the daemon is being started
	// again, or took this process for frozen.
	leasePause = 100 * time.Millisecond
	// leaseRetry is how long a daemon that was started again may refuse: the driver has to be
	// published first.
	leaseRetry = 10 * time.Second
	// leaseGrace is how long a socket is still accepted from that the endpoint link no longer
	// points to: who found it there is about to connect.
	leaseGrace = 100 * time.Millisecond
)

// lease has the daemon point a driver's endpoint link at this process, again when the daemon was
// restarted. It is the listener of the recorder: the daemon chooses another path each time, and
// until the link points to the new one calls arrive at the old.
type lease struct {
	client  *control.Client
	driver  string
	notify  func(text string) // for the person
	socket  atomic.Value      // string: where the driver listens
	conns   chan net.Conn
	closed  chan struct{} // Accept and what feeds it end
	closing sync.Once
	feeds   sync.WaitGroup
}

func newLease(client *control.Client, driver string, notify func(string)) *lease {
	return &lease{client: client, driver: driver, notify: notify, conns: make(chan net.Conn), closed: make(chan struct{})}
}

// run holds the lease until ctx is done and the link points back at the driver. It returns an error
// if the daemon refuses it, or did not point back: then it does so when it starts again.
func (l *lease) run(ctx context.Context) error {
	var (
		current, next *net.UnixListener // where the link points, as far as is known; where it is to point
		lost          time.Time         // when the lease was lost; zero: it was never held, or is
	)
	defer func() { l.retire(current) }()
	if ctx.Err() != nil {
		return nil
	}
	for {
		err := l.hold(ctx, func(u *net.UnixListener) { next = u }, func() {
			l.retire(current)
			current, next, lost = next, nil, time.Time{}
			l.notify("the kubelet's calls to " + l.driver + " arrive here")
		})
		l.retire(next) // the link never pointed there
		next = nil
		refused, isRefusal := errors.AsType[*control.Error](err)
		switch {
		case err == nil, ctx.Err() != nil && current == nil: // it never held the lease
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("the endpoint link may still point here; the daemon points it back when it starts: %w", err)
		case isRefusal && refused.NotFound():
			return hinted(err, "csi-registrar status shows the drivers")
		case current == nil, isPermanent(err), isRefusal && !lost.IsZero() && time.Since(lost) > leaseRetry:
			return clientError(err)
		case lost.IsZero():
			lost = time.Now()
			l.notify("the daemon has ended, or taken the calls back; asking again")
		}
		select {
		case <-time.After(leasePause):
		case <-ctx.Done():
		}
	}
}

// hold asks for the lease once, and returns when it has ended.
func (l *lease) hold(ctx context.Context, listening func(*net.UnixListener), linked func()) error {
	doc, err := l.client.Status(ctx)
	if err != nil {
		return err
	}
	s, err := doc.Status()
	if err != nil {
		return err
	}
	d, _ := s.Driver(l.driver)
	l.socket.Store(d.Socket)
	return l.client.Trace(ctx, control.Recorder{
		Driver: l.driver,
		Listen: func(ctx context.Context, path string) error {
			u, file, err := unixsock.Listen(ctx, path)
			if err != nil {
				return fmt.Errorf("cannot listen for the kubelet's calls: %w", err)
			}
			listening(u)
			l.feeds.Go(func() {
				l.feed(u)
				_, _ = unixsock.Remove(path, file.FileID) // else the daemon does, when the lease ends
			})
			return nil
		},
		Linked: linked,
	})
}

// feed accepts connections until the listener is closed or its deadline is over.
func (l *lease) feed(u *net.UnixListener) {
	defer u.Close()
	for {
		c, err := u.Accept()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, net.ErrClosed):
			return
		case err != nil: // out of descriptors: the caller waits in the queue
			select {
			case <-time.After(leasePause):
			case <-l.closed:
				return
			}
			continue
		}
		select {
		case l.conns <- c:
		case <-l.closed:
			c.Close()
		}
	}
}

// retire accepts for a moment more what is on its way.
func (l *lease) retire(u *net.UnixListener) {
	if u != nil {
		_ = u.SetDeadline(time.Now().Add(leaseGrace)) // fails if it is closed
	}
}

// dial connects to the driver, where its table says that it listens.
func (l *lease) dial(ctx context.Context) (trace.Conn, error) {
	socket, _ := l.socket.Load().(string)
	return dialDriver(ctx, "unix", socket)
}

// Accept, Close, SetDeadline and Addr are for trace.Serve.
func (l *lease) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// SetDeadline ends Accept then.
func (l *lease) SetDeadline(t time.Time) error {
	time.AfterFunc(time.Until(t), func() { l.closing.Do(func() { close(l.closed) }) })
	return nil
}

// Close ends Accept, and waits for what feeds it: retired listeners.
func (l *lease) Close() error {
	l.closing.Do(func() { close(l.closed) })
	l.feeds.Wait()
	return nil
}

// Addr names the driver.
func (l *lease) Addr() net.Addr { return &net.UnixAddr{Net: "unix", Name: l.driver} }
