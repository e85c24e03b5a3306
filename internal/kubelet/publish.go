package kubelet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/status"
)

// Publish puts a new socket in place that tells the announcement, instead of the one we
// had, if any. The kubelet sees the old one removed and the new one created. Nothing of
// anybody else is replaced: a *ConflictError says who is in the way. After an error what
// was published before still is, unless its path was lost.
func (s *Socket) Publish(ctx context.Context, a status.Announcement) error {
	s.op.Lock()
	defer s.op.Unlock()
	if a.Identity.Name != s.name || a.Endpoint == "" || len(a.Versions) == 0 {
		return fmt.Errorf("cannot publish %s: the announcement names %q with endpoint %q and versions %q", s.name, a.Identity.Name, a.Endpoint, a.Versions)
	}
	folder, err := s.r.folder.ensure()
	if err != nil {
		return err
	}
	if err := s.clear(ctx); err != nil {
		return err
	}
	if err := s.r.rivals.check(ctx, s.name, s.current()); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	ctx, cancel := wholly(ctx)
	defer cancel()
	// Bound outside the watched folder, for the kubelet logs an error for each name that
	// comes and goes in it. Where that is another mount, or may not be written, a dot name
	// within has to do: the kubelet ignores those. A new socket that could not be moved in
	// is not even made, for the old one is removed before the move.
	places := []string{s.r.folder.path}
	if root := s.r.folder.root; root != "" && oneMount(root, s.r.folder.path) {
		places = slices.Insert(places, 0, root)
	}
	for i, place := range places {
		err = s.publishFrom(ctx, place, folder, a)
		if i == len(places)-1 || !otherPlaceMayDo(err) {
			break
		}
		s.log.Debug("published from within the plugin registry", "because", err)
	}
	if err != nil && !isConflict(err) {
		return fmt.Errorf("cannot publish %s: %w%s", s.path, err, hint(err))
	}
	return err
}

// changeTime is for one change; the service manager answers within milliseconds.
const changeTime = 5 * time.Second

// wholly is for a change that has begun: a daemon that is told to stop ends it, for half of
// it would leave the store and the folder at odds, and the next process could not go on.
func wholly(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), changeTime)
}

func otherPlaceMayDo(err error) bool {
	return errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EROFS) || errors.Is(err, os.ErrPermission)
}

func isConflict(err error) bool {
	_, ok := errors.AsType[*ConflictError](err)
	return ok
}

// hint says what to do about an error, where that is known.
func hint(err error) string {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return "; free space or inodes of that file system"
	case errors.Is(err, unix.EROFS):
		return "; it is read-only for the daemon: mount it writable, and for another root_dir add it to ReadWritePaths= of the unit"
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return "; " + acceptHint(err)
	}
	return ""
}

// clear makes sure that the path is free or ours. A dead socket is removed, if it stays
// dead; everything else is somebody's.
func (s *Socket) clear(ctx context.Context) error {
	for range 3 { // it may change while we look
		at, err := lookAt(s.path)
		switch {
		case errors.Is(err, os.ErrNotExist):
			return nil
		case err != nil:
			return fmt.Errorf("cannot see what is at the registration socket's path: %w", err)
		}
		if p := s.current(); p != nil && p.id == at.fileID {
			return nil
		}
		if s.r.wasLeft(s.path, at.fileID) { // nobody accepts on it
			if _, err := remove(s.path, at.fileID); err != nil {
				return fmt.Errorf("cannot remove our earlier registration socket: %w", err)
			}
			s.stored = true
			s.r.leave(s.path, fileID{})
			return nil
		}
		if !at.isSocket() {
			return &ConflictError{Driver: s.name, Path: s.path, Holder: at.kind(), Same: true}
		}
		switch a, who, err := knock(ctx, s.path); {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			return &ConflictError{Driver: s.name, Path: s.path, Holder: fmt.Sprintf("a socket that cannot be asked (%v)", err), Same: true}
		case a == alive:
			return &ConflictError{Driver: s.name, Path: s.path, Holder: process(who), Same: true}
		case a == dead:
			removed, err := removeDead(ctx, []string{s.path})
			if err != nil {
				return fmt.Errorf("cannot remove the dead registration socket: %w", err)
			}
			if len(removed) > 0 {
				s.log.Info("dead registration socket removed", "path", s.path)
			}
		}
	}
	return &ConflictError{Driver: s.name, Path: s.path, Holder: "a socket that keeps changing", Same: true}
}

// publishFrom binds in place and moves the socket to its path. A crash anywhere in it
// leaves at worst a dead temporary name, or the old socket dead: both are swept.
func (s *Socket) publishFrom(ctx context.Context, place string, folder fileID, a status.Announcement) error {
	p, temporary, err := bind(ctx, s, place)
	if err != nil {
		return err
	}
	p.announced, p.folder = a, folder
	old := s.current()
	oldStored := old != nil && old.inStore
	if oldStored || s.stored {
		// One name in the store is one listener: the next process has to tell by it.
		err := s.r.forget(ctx, s.name)
		if err != nil {
			s.log.Warn("cannot take the old listener out of the descriptor store", "error", err)
		} else if old != nil {
			old.inStore = false
		}
		s.stored = s.stored && err != nil
	}
	s.keep(ctx, p)
	go p.accept()
	err = s.moveIn(ctx, temporary, p, old)
	_, rerr := remove(temporary, p.id) // still there after an error, and after a link
	if err == nil {
		s.written = false // it is p's now
		if old != nil {
			rerr = errors.Join(rerr, old.stop(true))
		}
		if rerr != nil {
			s.log.Warn("published, but not all is tidy", "error", rerr)
		}
		return nil
	}

	// Back to what it was.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeGrace)
	defer cancel()
	errs := []error{err, rerr}
	if p.inStore {
		errs = append(errs, s.r.forget(ctx, s.name))
	}
	errs = append(errs, p.stop(false))
	s.setCurrent(old)
	if old == nil {
		errs = append(errs, s.removeRecord())
		return errors.Join(errs...)
	}
	if oldStored {
		s.keep(ctx, old)
	}
	errs = append(errs, s.save(old))
	return errors.Join(errs...)
}

// keep gives the listener to the store, if there is one. A registration that cannot
// outlive the process is better than none: see NotKept.
func (s *Socket) keep(ctx context.Context, p *publication) {
	var err error
	if s.r.store != nil {
		err = s.r.store.Keep(ctx, storeName(s.name), p.listener)
		p.inStore = err == nil
	}
	if err != nil {
		s.log.Warn("the registration will not survive a restart of csi-registrar: its socket is not in the descriptor store", "error", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notKept = err
}

// moveIn gives p its path. The record is written and p is current before, for the
// kubelet may call as soon as the name is there.
func (s *Socket) moveIn(ctx context.Context, temporary string, p, old *publication) error {
	if old != nil {
		if _, err := remove(s.path, old.id); err != nil {
			return err
		}
	}
	for range 3 { // somebody may put something there at the same moment, and may go again
		s.mu.Lock()
		p.publishedAt = time.Now()
		s.mu.Unlock()
		s.setCurrent(p)
		if err := s.save(p); err != nil {
			s.log.Warn("the registration socket is published without its record", "error", err)
		}
		err := renameNoReplace(temporary, s.path)
		if !errors.Is(err, os.ErrExist) {
			return err
		}
		s.setCurrent(old)
		if err := s.clear(ctx); err != nil {
			return err
		}
	}
	return &ConflictError{Driver: s.name, Path: s.path, Holder: "something that comes and goes", Same: true}
}

// renameNoReplace renames over nothing. Where the file system does not know how (EINVAL)
// a second name is made, which replaces nothing either; the first one is left.
func renameNoReplace(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if err == unix.EINVAL || err == unix.ENOSYS {
		return os.Link(from, to)
	}
	if err != nil {
		return fmt.Errorf("cannot put the socket in place: %w", err) // without the temporary name, which changes
	}
	return nil
}
