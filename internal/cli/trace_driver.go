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

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/tool/trace"
	"csi-registrar/internal/sys/unixsock"
)

const (
	// leaseRetry is how long a restarted daemon may refuse: it has to publish the driver first.
	leaseRetry = 10 * time.Second
	// leaseGrace is how long a socket still accepts connections after the endpoint link was moved,
	// for callers that resolved the link before that.
	leaseGrace = 100 * time.Millisecond
)

// lease makes the daemon point a driver's endpoint link at this process, also after a restart of
// the daemon. It is the recorder's listener: the daemon chooses a new path each time, and calls
// arrive at the old path until the link points to the new one.
type lease struct {
	client *control.Client
	driver string
	notify func(text string) // prints a message for the user
	beat   atomic.Value      // time.Time: the last moment at which the lease was held
	socket atomic.Value      // string: where the driver listens
	conns  chan net.Conn
	closed <-chan struct{} // ends Accept and feed
	close  context.CancelFunc
	feeds  sync.WaitGroup
}

func newLease(client *control.Client, driver string, notify func(string)) *lease {
	ctx, cancel := context.WithCancel(context.Background())
	return &lease{client: client, driver: driver, notify: notify, conns: make(chan net.Conn), closed: ctx.Done(), close: cancel}
}

// run holds the lease until ctx is done and the link points back at the driver. It returns an error
// if the daemon refuses, or could not move the link back; it then does so at its next start.
func (l *lease) run(ctx context.Context, rec *trace.Recorder) error {
	var (
		current, next *net.UnixListener // where the link points, and where it is about to point
		lost          time.Time         // when its loss was noticed; zero if it is held
		last          time.Time         // the last moment at which it was held; zero as above
		missed        time.Duration     // total time without the lease, until last
	)
	count := func() {
		if !last.IsZero() {
			now := time.Now()
			missed, last = missed+now.Sub(last), now
			rec.Missed(missed)
		}
	}
	defer func() { count(); l.retire(current) }()
	if ctx.Err() != nil {
		return nil
	}
	for {
		err := l.hold(ctx, func(u *net.UnixListener) {
			count() // before the next call
			next = u
		}, func() {
			count()
			l.retire(current)
			current, next, lost, last = next, nil, time.Time{}, time.Time{}
			l.notify("the kubelet's calls to " + l.driver + " are recorded here")
		})
		l.retire(next) // the link never pointed there
		next = nil
		refusal, refused := errors.AsType[*control.Error](err)
		switch {
		case err == nil, ctx.Err() != nil && current == nil: // it never held the lease
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("the endpoint link may still point here; the daemon points it back when it starts: %w", err)
		case refused && refusal.NotFound():
			return hinted(err, "csi-registrar status lists the drivers")
		case current == nil, isPermanent(err), refused && !lost.IsZero() && time.Since(lost) > leaseRetry:
			return clientError(err)
		case lost.IsZero():
			lost = time.Now()
			last, _ = l.beat.Load().(time.Time)
			l.notify("the daemon has ended or revoked the recording; trying again")
		}
		select { // the daemon restarts, or it revoked the lease because this process was frozen
		case <-time.After(retryPause):
		case <-ctx.Done():
		}
	}
}

// hold requests the lease once and returns when it has ended.
func (l *lease) hold(ctx context.Context, listening func(*net.UnixListener), linked func()) error {
	s, err := l.client.Status(ctx)
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
				// If this fails, the daemon removes it when the lease ends.
				_, _ = unixsock.Remove(path, file.FileID)
			})
			return nil
		},
		Linked: linked,
		Held:   func() { l.beat.Store(time.Now()) },
	})
}

// feed accepts connections until the listener is closed or its deadline has passed.
func (l *lease) feed(u *net.UnixListener) {
	defer u.Close()
	for {
		c, err := u.Accept()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, net.ErrClosed):
			return
		case err != nil: // no descriptors left: the caller stays in the backlog
			select {
			case <-time.After(retryPause):
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

// retire closes the listener after leaseGrace.
func (l *lease) retire(u *net.UnixListener) {
	if u != nil {
		_ = u.SetDeadline(time.Now().Add(leaseGrace)) // fails if it is closed
	}
}

// dial connects to the driver's configured socket.
func (l *lease) dial(ctx context.Context) (trace.Conn, error) {
	socket, _ := l.socket.Load().(string)
	return dialDriver(ctx, "unix", socket)
}

// Accept implements trace.Listener.
func (l *lease) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// SetDeadline ends Accept at the given time.
func (l *lease) SetDeadline(t time.Time) error {
	time.AfterFunc(time.Until(t), l.close)
	return nil
}

// Close ends Accept and waits for the goroutines that feed it.
func (l *lease) Close() error {
	l.close()
	l.feeds.Wait()
	return nil
}

// Addr returns the driver's name.
func (l *lease) Addr() net.Addr { return &net.UnixAddr{Net: "unix", Name: l.driver} }
