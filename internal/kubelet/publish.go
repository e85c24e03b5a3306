package kubelet

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
)

// Publish puts a new socket in place that tells the announcement, instead of the one we
// had, if any. The kubelet sees the old one removed and the new one created. Nothing of
// anybody else is replaced: a ConflictError says who is in the way. After an error what
// was published before still is, unless its path was lost.
func (s *Socket) Publish(ctx context.Context, a status.Announcement) error {
	if !s.mayAnnounce(a) {
		return fmt.Errorf("cannot publish %s: the announcement names %q with endpoint %q and versions %q", s.name, a.Identity.Name, a.Endpoint, a.Versions)
	}
	was := s.current.Load()
	return s.change(ctx, func(ctx context.Context) error {
		if was == nil && s.current.Load() != nil {
			return nil // adopted late: the caller did not know of it and has to look again
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
	if err := errors.Join(s.pointLink(a), s.clear(ctx)); err != nil {
		return err
	}
	var own unixsock.FileID
	if p := s.current.Load(); p != nil {
		own = p.FileID
	}
	if err := s.r.others.check(ctx, s.name, own); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	err = s.publishFrom(ctx, s.r.dir.place(), dir, a)
	if errors.Is(err, os.ErrExist) { // somebody put something there at the same moment
		if err = s.clear(ctx); err == nil {
			err = s.heldBy("something that comes and goes")
		}
	}
	if _, conflict := errors.AsType[ConflictError](err); err == nil || conflict {
		return err
	}
	return fmt.Errorf("cannot publish %s: %w%s", s.path, err, unixsock.Hint(err))
}

// clear makes sure that the path is free or ours. A stale socket is removed, if it stays
// stale; everything else is somebody's.
func (s *Socket) clear(ctx context.Context) error {
	at, err := unixsock.Lstat(s.path)
	switch p := s.current.Load(); {
	case errors.Is(err, os.ErrNotExist), err == nil && p != nil && p.FileID == at.FileID:
		return nil
	case err != nil:
		return fmt.Errorf("cannot look at the registration socket: %w", err)
	case !at.IsSocket():
		return s.heldBy(at.Kind())
	}
	if err := s.removeStale(ctx, s.path); err != nil {
		return err
	}
	switch live, who, err := unixsock.Probe(ctx, s.path); {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return s.heldBy(fmt.Sprintf("a socket that cannot be asked (%v)", err))
	case live == unixsock.Missing:
		return nil
	case live == unixsock.Stale:
		return s.heldBy("a socket that is another one than a moment ago")
	default:
		return s.heldBy(who.String())
	}
}

// ConflictError says that somebody else has the path of a registration socket, or serves the
// same driver from another one; and who that is, for people.
type ConflictError string

func (e ConflictError) Error() string { return string(e) }

// Conflict marks the error for the registrar.
func (e ConflictError) Conflict() bool { return true }

// heldBy is the error for a path of ours that somebody else has.
func (s *Socket) heldBy(holder string) error {
	return ConflictError(fmt.Sprintf("%s is held by %s, which is left alone: stop or move it away (a node-driver-registrar sidecar of the driver?)", s.path, holder))
}

// removeStale removes what is at the paths if nobody listens there.
func (s *Socket) removeStale(ctx context.Context, paths ...string) error {
	removed, err := unixsock.RemoveStale(ctx, paths)
	for _, path := range removed {
		s.log.Info("stale registration socket removed", "path", path)
	}
	if err != nil {
		return fmt.Errorf("cannot remove the stale registration socket: %w", err)
	}
	return nil
}

// publishFrom binds in place and moves the socket to its path. A crash anywhere in it leaves
// at worst a stale temporary name, or the old socket stale: both are swept.
func (s *Socket) publishFrom(ctx context.Context, place string, dir unixsock.FileID, a status.Announcement) error {
	temporary := temporaryName(place)
	l, file, err := unixsock.Listen(ctx, temporary)
	if err != nil {
		// Without the temporary name: the same trouble must read the same each time.
		if errno, ok := errors.AsType[syscall.Errno](err); ok {
			err = errno
		}
		return fmt.Errorf("cannot make a socket in %s: %w", place, err)
	}
	p := newListener(s, l, dir, record{
		Path: s.path, Bound: l.Addr().String(), FileID: file.FileID, PublishedAt: time.Now(), Announced: a,
	})
	old := s.current.Load()
	s.keep(ctx, p)
	p.serve()
	err = s.moveIn(temporary, p, old)
	_, rerr := unixsock.Remove(temporary, p.FileID) // still there after an error, and after a link
	if err == nil {
		if old != nil {
			old.stop(true)
			if old.Announced.Endpoint != a.Endpoint {
				rerr = errors.Join(rerr, old.removeLink(s.name))
			}
		}
		if rerr != nil {
			s.log.Warn("published, but a temporary name is left", "error", rerr)
		}
		return nil
	}

	// Back to what it was.
	p.stop(false)
	s.current.Store(old)
	if old == nil {
		s.forget(ctx)
		s.removeRecord()
		return errors.Join(err, rerr)
	}
	s.keep(ctx, old)
	return errors.Join(err, rerr, s.save(old))
}

// moveIn gives p its path. The record is written and p is published before, for the kubelet
// may call as soon as the name is there.
func (s *Socket) moveIn(temporary string, p, old *listener) error {
	if old != nil {
		if _, err := unixsock.Remove(s.path, old.FileID); err != nil {
			return err
		}
	}
	s.current.Store(p)
	if err := s.save(p); err != nil {
		s.log.Warn("the registration socket is published without its record", "error", err)
	}
	if err := unixsock.MoveIntoPlace(temporary, s.path); err != nil {
		return fmt.Errorf("cannot put the socket in place: %w", err)
	}
	return nil
}

// temporaryPrefix begins the names that sockets are bound under before they get their
// own. A dot, so that the kubelet ignores them; eight hexadecimal digits follow. A socket
// keeps this name for life (getsockname), and none is used twice.
const temporaryPrefix = ".csi-reg-"

func temporaryName(dir string) string {
	return filepath.Join(dir, fmt.Sprintf("%s%08x", temporaryPrefix, rand.Uint32()))
}

func isTemporary(name string) bool {
	ok, _ := filepath.Match(temporaryPrefix+strings.Repeat("[0-9a-f]", 8), name) // the pattern is valid
	return ok
}
