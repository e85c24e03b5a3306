package regsocket

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/unixsock"
)

// Publish implements registrar.Socket. The kubelet sees the old socket removed and the new one
// created. Sockets of others are not replaced: a ConflictError names the owner. After an error
// the old socket is still published, unless it was removed already.
func (s *Socket) Publish(ctx context.Context, a status.Announcement) error {
	if name := a.Identity.Name; name != s.name {
		return fmt.Errorf("cannot publish %s: the announcement names %q", s.name, name)
	}
	was := s.current.Load()
	return s.change(ctx, func(ctx context.Context) error {
		if was == nil && s.current.Load() != nil {
			// The caller looks again, and tries again if that is not what it wants.
			return errors.New("the socket of an earlier process was adopted late")
		}
		return s.publish(ctx, a)
	})
}

// Clear implements registrar.Socket.
func (s *Socket) Clear(ctx context.Context, a status.Announcement) error {
	return s.change(ctx, func(ctx context.Context) error { return s.clear(ctx, a) })
}

func (s *Socket) publish(ctx context.Context, a status.Announcement) error {
	if err := s.r.dir.ensure(); err != nil {
		return err
	}
	if err := s.clear(ctx, a); err != nil {
		return err
	}
	// The kubelet, too, sees only what it can read.
	if text, _ := s.servedElsewhere(ctx, surveyWait); text != "" {
		return ConflictError(text)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := s.replace(ctx, a); err != nil {
		return fmt.Errorf("cannot publish %s: %w%s", s.path, err, unixsock.Hint(err))
	}
	return nil
}

// clear returns nil if the path is free or ours. It removes a stale socket there, and that of a
// csi-registrar that yields to us.
func (s *Socket) clear(ctx context.Context, a status.Announcement) error {
	if p := s.current.Load(); p != nil {
		if f, err := s.r.o.Host.Lstat(s.path); err == nil && f.FileID == p.FileID {
			return nil
		}
	}
	held, err := s.vacate(ctx)
	if held != nil && held.Live {
		return s.askHolder(ctx, a, held)
	}
	s.held(holder{}, status.ServedBy{}, false)
	if held != nil {
		return s.heldBy(held.Holder)
	}
	if err != nil {
		return fmt.Errorf("cannot use the path of the registration socket: %w", err)
	}
	return nil
}

// vacate removes a stale socket at the path. It returns what else is there; nil: nothing.
func (s *Socket) vacate(ctx context.Context) (*unixsock.InUse, error) {
	removed, err := s.r.o.Host.Vacate(ctx, s.path)
	if removed {
		s.log.Info("stale registration socket removed", "path", s.path)
	}
	if held, ok := errors.AsType[*unixsock.InUse](err); ok {
		return held, nil
	}
	return nil, err
}

// ConflictError names another registrar that has the path of a registration socket, or that serves
// the same driver from another one.
type ConflictError string

func (e ConflictError) Error() string { return string(e) }

// Conflict marks the error for the registrar.
func (e ConflictError) Conflict() bool { return true }

// heldBy returns the error for a registration socket's path that somebody else has.
func (s *Socket) heldBy(holder string) error {
	return ConflictError(fmt.Sprintf("%s is held by %s, which is left alone: stop or move it away (a node-driver-registrar sidecar of the driver?)", s.path, holder))
}

// replace listens at the path, where the old socket is removed before. The record has the cookie
// before the kubelet can call, and the inode when it is known: one without it proves nothing to the
// next process, which publishes again.
func (s *Socket) replace(ctx context.Context, a status.Announcement) error {
	old, p := s.current.Load(), newListener(s, nil, record{Path: s.path, Publication: status.Publication{Announced: a}})
	l, file, err := s.r.o.Host.Listen(ctx, s.path, func(c syscall.Conn) error {
		err := s.prepare(ctx, p, c, old)
		if err == nil {
			old = nil
		}
		return err
	})
	if err != nil {
		if old == nil { // there was none, or it is removed
			s.current.Store(nil)
			s.release(ctx)
		}
		if errno, ok := errors.AsType[syscall.Errno](err); ok {
			err = errno // without the path, which Publish names
		}
		return fmt.Errorf("cannot replace the socket: %w", err)
	}
	p.Listener, p.FileID = l, file.FileID
	s.current.Store(p)
	p.serve()
	if err := s.save(p); err != nil {
		s.log.Warn("the registration socket is published without its record", "error", err)
	}
	return nil
}

// prepare makes room for p, whose socket c is not bound yet: it removes the old socket, and puts c
// into the store and the record. A file system without a free inode has one again only when nobody
// holds the old socket, so that is closed, and superseded in the store, before c is bound.
func (s *Socket) prepare(ctx context.Context, p *listener, c syscall.Conn, old *listener) (err error) {
	if p.Cookie, err = s.r.o.Host.Cookie(c); err != nil {
		return err
	}
	if old != nil {
		if _, err := s.r.o.Host.RemoveFile(s.path, old.FileID); err != nil {
			return err
		}
		old.stop()
	}
	p.PublishedAt = time.Now()
	s.keep(ctx, p, c)
	s.saving.Lock() // the kubelet may be reporting to the old socket
	defer s.saving.Unlock()
	_ = s.write(p) // else replace warns
	return nil
}

// listener is one listener of a Socket, with its announcement and the kubelet's answer.
// Republishing creates another one; the connections of the old one are still served, so that a
// pending Notify of the kubelet does not fail.
type listener struct {
	Listener
	s        *Socket
	serving  sync.WaitGroup // until it accepts no more
	warnings rate.Bucket    // guarded by s.mu
	unsaved  atomic.Bool    // the written record is not complete
	adopted  bool           // an earlier process published it

	record         // guarded by s.mu, but for Path, Cookie and FileID, set before it is current
	notKept string // why it is not in the descriptor store; guarded by s.mu
}

func newListener(s *Socket, l Listener, rec record) *listener {
	return &listener{Listener: l, s: s, record: rec, warnings: rate.Bucket{Burst: 1, Interval: warnPause}}
}

// serve answers the kubelet until the listener is stopped. Its goroutine is the only one of a
// published socket.
func (p *listener) serve() {
	p.serving.Go(func() { _ = p.s.r.server.Serve(p) }) // the error of Accept: it was stopped
}

const (
	// acceptPause is the time between attempts while there are no descriptors; the kubelet waits
	// in the listener's queue, for at most 1 s.
	acceptPause = 100 * time.Millisecond
	warnPause   = time.Minute // between two warnings of one listener about its callers
)

// stop closes the listener, if it is open. Accepted connections are still served. Those in its
// queue are reset if it is the last descriptor, after which the kubelet connects again; otherwise
// the next process accepts them.
func (p *listener) stop() {
	_ = p.Close() // fails if it is closed already
	p.serving.Wait()
}

// Accept implements net.Listener for gRPC. It fails only when the listener is stopped.
func (p *listener) Accept() (net.Conn, error) {
	for {
		c, err := p.Listener.Accept()
		switch {
		case err == nil:
			return p.s.r.callers.accept(p, c), nil
		case errors.Is(err, net.ErrClosed):
			return nil, net.ErrClosed
		default:
			p.warn("cannot accept connections of the kubelet; trying again", "error", fmt.Sprint(err, unixsock.Hint(err)))
			time.Sleep(acceptPause)
		}
	}
}

// warn logs what callers could cause at will, so not every time.
func (p *listener) warn(text string, args ...any) {
	p.s.mu.Lock()
	due := p.warnings.Allow(time.Now())
	p.s.mu.Unlock()
	if due {
		p.s.log.Warn(text, args...)
	}
}
