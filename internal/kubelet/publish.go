package kubelet

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
)

// Publish puts a new socket in place that tells the announcement, instead of the one we
// had, if any. The kubelet sees the old one removed and the new one created. Nothing of
// anybody else is replaced: a *ConflictError says who is in the way. After an error what
// was published before still is, unless its path was lost.
func (s *Socket) Publish(ctx context.Context, a status.Announcement) error {
	if !s.mayAnnounce(a) {
		return fmt.Errorf("cannot publish %s: the announcement names %q with endpoint %q and versions %q", s.name, a.Identity.Name, a.Endpoint, a.Versions)
	}
	was := s.published()
	return s.change(ctx, func(ctx context.Context) error {
		if was == nil && s.published() != nil {
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
	if err := s.clear(ctx); err != nil {
		return err
	}
	var own unixsock.FileID
	if p := s.published(); p != nil {
		own = p.FileID
	}
	if err := s.r.others.check(ctx, s.name, own); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	// Bound outside the watched directory, for the kubelet logs an error for each name that
	// comes and goes in it. Where that is another mount, or may not be written, a dot name
	// within has to do: the kubelet ignores those. A new socket that could not be moved in
	// is not even made, for the old one is removed before the move.
	places := []string{s.r.dir.path}
	if root := s.r.dir.root; root != "" && unixsock.SameMount(root, s.r.dir.path) {
		places = slices.Insert(places, 0, root)
	}
	for i, place := range places {
		err = s.publishFrom(ctx, place, dir, a)
		if i == len(places)-1 || !otherPlaceMayDo(err) {
			break
		}
		s.log.Debug("published from within the plugins_registry", "because", err)
	}
	if err != nil && !isConflict(err) {
		return fmt.Errorf("cannot publish %s: %w%s", s.path, err, unixsock.Hint(err))
	}
	return err
}

func otherPlaceMayDo(err error) bool {
	return errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EROFS) || errors.Is(err, os.ErrPermission)
}

func isConflict(err error) bool {
	_, ok := errors.AsType[*ConflictError](err)
	return ok
}

// clear makes sure that the path is free or ours. A stale socket is removed, if it stays
// stale; everything else is somebody's.
func (s *Socket) clear(ctx context.Context) error {
	at, err := unixsock.Lstat(s.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("cannot look at the registration socket: %w", err)
	}
	if p := s.published(); p != nil && p.FileID == at.FileID {
		return nil
	}
	if !at.IsSocket() {
		return s.heldBy(at.Kind())
	}
	switch live, who, err := unixsock.Probe(ctx, s.path); {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return s.heldBy(fmt.Sprintf("a socket that cannot be asked (%v)", err))
	case live == unixsock.Live:
		return s.heldBy(process(who))
	case live == unixsock.Missing:
		return nil
	}
	removed, err := unixsock.RemoveStale(ctx, []string{s.path})
	switch {
	case err != nil:
		return fmt.Errorf("cannot remove the stale registration socket: %w", err)
	case len(removed) == 0:
		return s.heldBy("a socket that was stale a moment ago")
	}
	s.log.Info("stale registration socket removed", "path", s.path)
	return nil
}

func (s *Socket) heldBy(holder string) error {
	return &ConflictError{Driver: s.name, Path: s.path, Holder: holder, Same: true}
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
	old := s.published()
	s.keep(ctx, p)
	p.serve()
	err = s.moveIn(ctx, temporary, p, old)
	_, rerr := unixsock.Remove(temporary, p.FileID) // still there after an error, and after a link
	if err == nil {
		if old != nil {
			old.stop(true)
		}
		if rerr != nil {
			s.log.Warn("published, but what was there before is not removed completely", "error", rerr)
		}
		return nil
	}

	// Back to what it was.
	p.stop(false)
	errs := []error{err, rerr}
	s.setPublished(old)
	if old == nil {
		s.forget(ctx)
		errs = append(errs, s.removeRecord())
		return errors.Join(errs...)
	}
	s.keep(ctx, old)
	return errors.Join(append(errs, s.save(old))...)
}

// moveIn gives p its path. The record is written and p is published before, for the kubelet
// may call as soon as the name is there.
func (s *Socket) moveIn(ctx context.Context, temporary string, p, old *listener) error {
	if old != nil {
		if _, err := unixsock.Remove(s.path, old.FileID); err != nil {
			return err
		}
	}
	s.setPublished(p)
	if err := s.save(p); err != nil {
		s.log.Warn("the registration socket is published without its record", "error", err)
	}
	err := unixsock.MoveIntoPlace(temporary, s.path)
	if err == nil {
		return nil
	}
	s.setPublished(old)
	if !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("cannot put the socket in place: %w", err)
	}
	if err := s.clear(ctx); err != nil { // somebody put something there at the same moment
		return err
	}
	return s.heldBy("something that comes and goes")
}

// temporaryPrefix begins the names that sockets are bound under before they get their
// own. A dot, so that the kubelet ignores them; eight hexadecimal digits follow. A socket
// keeps this name for life (getsockname), and none is used twice.
const (
	temporaryPrefix = ".csi-reg-"
	temporaryDigits = 8
)

func temporaryName(dir string) string {
	b := make([]byte, temporaryDigits/2)
	rand.Read(b) // never fails
	return filepath.Join(dir, temporaryPrefix+hex.EncodeToString(b))
}

func isTemporary(name string) bool {
	digits, ok := strings.CutPrefix(name, temporaryPrefix)
	_, err := hex.DecodeString(digits)
	return ok && len(digits) == temporaryDigits && err == nil
}
