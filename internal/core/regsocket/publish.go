package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/unixsock"
)

// Publish implements registrar.Socket. The kubelet sees the old socket removed and the new one
// created. Sockets of others are not replaced: a ConflictError names the owner. After an error
// the old socket is still published, unless its path was lost.
func (s *Socket) Publish(ctx context.Context, a status.Announcement) error {
	if !s.mayAnnounce(a) {
		return fmt.Errorf("cannot publish %s: the announcement names %q with endpoint %q and versions %q", s.name, a.Identity.Name, a.Endpoint, a.Versions)
	}
	was := s.current.Load()
	return s.change(ctx, func(ctx context.Context) error {
		if was == nil && s.current.Load() != nil {
			return nil // adopted late: the caller has to look again
		}
		return s.publish(ctx, a)
	})
}

func (s *Socket) mayAnnounce(a status.Announcement) bool {
	return a.Identity.Name == s.name && a.Endpoint != "" && len(a.Versions) > 0
}

func (s *Socket) publish(ctx context.Context, a status.Announcement) error {
	dir, err := s.r.dir.ensure()
	if err != nil {
		return err
	}
	if err := errors.Join(s.pointLink(a, true), s.clear(ctx)); err != nil {
		return err
	}
	var own unixsock.FileID
	if p := s.current.Load(); p != nil {
		own = p.FileID
	}
	if err := s.r.foreign.check(ctx, s.name, own); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	err = s.replace(ctx, dir, a)
	if errors.Is(err, os.ErrExist) { // somebody put a file there at the same time
		if err = s.clear(ctx); err == nil {
			err = s.heldBy("something that appears and disappears")
		}
	}
	if _, conflict := errors.AsType[ConflictError](err); err == nil || conflict {
		return err
	}
	return fmt.Errorf("cannot publish %s: %w%s", s.path, err, unixsock.Hint(err))
}

// clear returns nil if the path is free or ours. It removes a stale socket there.
func (s *Socket) clear(ctx context.Context) error {
	if p := s.current.Load(); p != nil {
		if f, err := s.r.o.Host.Lstat(s.path); err == nil && f.FileID == p.FileID {
			return nil
		}
	}
	removed, err := s.r.o.Host.Vacate(ctx, s.path)
	if removed {
		s.log.Info("stale registration socket removed", "path", s.path)
	}
	if held, ok := errors.AsType[*unixsock.InUse](err); ok {
		return s.heldBy(held.Holder)
	}
	if err != nil {
		return fmt.Errorf("cannot use the path of the registration socket: %w", err)
	}
	return nil
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

// replace binds a socket to a temporary name in the directory and moves it to its path: if binding
// fails, the old one is still there. A crash in between leaves at worst a stale temporary name,
// which the next process's scan removes, or a stale old socket, which its Sweep removes.
func (s *Socket) replace(ctx context.Context, dir unixsock.FileID, a status.Announcement) error {
	temporary := temporaryName(s.r.dir.path)
	l, file, err := s.r.o.Host.Listen(ctx, temporary)
	if err != nil {
		// Without the temporary name: the same problem must read the same each time.
		if op, ok := errors.AsType[*net.OpError](err); ok {
			err = &net.OpError{Op: op.Op, Net: op.Net, Err: op.Err}
		} else if errno, ok := errors.AsType[syscall.Errno](err); ok {
			err = errno
		}
		return fmt.Errorf("cannot make a socket in %s: %w", s.r.dir.path, err)
	}
	p := newListener(s, l, dir, record{
		Path: s.path, Bound: l.Addr().String(), FileID: file.FileID, Publication: status.Publication{PublishedAt: time.Now(), Announced: a},
	})
	old := s.current.Load()
	if !s.discarded.Load() {
		s.keep(ctx, p)
	}
	p.serve()
	if err = s.moveIn(temporary, p, old); err == nil {
		if old != nil {
			old.stop(true)
			s.removeTemporary(old)
			if old.Announced.Endpoint != a.Endpoint {
				if err := old.removeLink(s.r.o.Host, s.name); err != nil {
					s.log.Warn("published, but the previous endpoint link is left", "error", err)
				}
			}
		}
		return nil
	}

	// Restore the previous state.
	_, rerr := s.r.o.Host.RemoveFile(temporary, p.FileID)
	p.stop(false)
	s.current.Store(old)
	if old == nil || s.discarded.Load() {
		if !s.anotherRecorded() {
			s.release(ctx)
		}
		return errors.Join(err, rerr)
	}
	s.keep(ctx, old)
	return errors.Join(err, rerr, s.save(old))
}

// moveIn moves p to its path. The record is written and p is current before that, because the
// kubelet may call as soon as the name is there.
func (s *Socket) moveIn(temporary string, p, old *listener) error {
	if old != nil {
		if _, err := s.r.o.Host.RemoveFile(s.path, old.FileID); err != nil {
			return err
		}
	}
	// It was discarded while this call hung: another Socket of the driver, below another root_dir,
	// may have its place in the store and in the record by now.
	if s.discarded.Load() {
		return net.ErrClosed
	}
	s.current.Store(p)
	if s.anotherRecorded() { // p took its place in the store
		s.removeRecord()
	}
	if err := s.save(p); err != nil {
		s.log.Warn("the registration socket is published without its record", "error", err)
	}
	if err := s.r.o.Host.MoveIntoPlace(temporary, s.path); err != nil {
		return fmt.Errorf("cannot put the socket in place: %w", err)
	}
	return nil
}
