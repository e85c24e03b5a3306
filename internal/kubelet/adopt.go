package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"csi-registrar/internal/pluginreg"
	"csi-registrar/internal/unixsock"
)

// Adopt takes over the listeners that the store held for the driver while no process ran:
// one, or more if a process died between two. One is ours and at its path if the record names
// what it was bound to, and the file that is at the path: a living listener holds its inode, so
// no other file can have that identity. What it announced and what the kubelet said comes from
// the record too. A listener that is not proven so is closed and forgotten, and its socket
// removed, also under an earlier root_dir if the record has that. The files are the Socket's then.
// After a *worker.NotAnswering they are adopted before the next thing that is done with it: as
// long as the store holds a listener its path is taken, and nobody else can be at it.
func (s *Socket) Adopt(ctx context.Context, files []*os.File) error {
	if len(files) == 0 {
		return nil
	}
	s.mu.Lock()
	s.handed = files
	s.mu.Unlock()
	err := s.change(ctx, func(context.Context) error { return nil })
	if ctx.Err() != nil {
		err = errors.Join(err, s.closeHanded())
	}
	return err
}

// closeHanded leaves what was not adopted to the next process: the store has it.
func (s *Socket) closeHanded() error {
	var errs []error
	for _, f := range s.takeHanded() {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// takeHanded returns the files that were not adopted, once.
func (s *Socket) takeHanded() []*os.File {
	s.mu.Lock()
	defer s.mu.Unlock()
	files := s.handed
	s.handed = nil
	return files
}

// adoptHanded is for the worker.
func (s *Socket) adoptHanded(ctx context.Context) error {
	if files := s.takeHanded(); len(files) > 0 {
		return s.adopt(ctx, files)
	}
	return nil
}

func (s *Socket) adopt(ctx context.Context, files []*os.File) error {
	rec := s.r.readRecord(s.name)
	var errs []error
	for _, f := range files {
		l, err := listenerOf(f)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		bound := l.Addr().String()
		switch proven := s.proves(rec, bound); {
		case proven && rec.Path == s.path && s.published() == nil:
			s.takeOver(l, rec)
			continue
		case proven && rec.Path == s.path: // the same listener once more
		case proven: // of an earlier root_dir
			did, err := unixsock.Remove(rec.Path, rec.FileID)
			if did {
				s.log.Info("registration socket of an earlier root_dir removed", "path", rec.Path)
			}
			errs = append(errs, err)
		default:
			errs = append(errs, fmt.Errorf("cannot go on with the registration socket of an earlier process: there is no record of it, or %s is another one", s.path))
		}
		errs = append(errs, l.Close())
	}
	if p := s.published(); p == nil {
		s.forget(ctx)
		errs = append(errs, s.removeRecord())
	} else if len(files) > 1 {
		s.keep(ctx, p) // it replaces all of the name
	}
	removed, err := unixsock.RemoveStale(ctx, []string{s.path})
	for _, path := range removed {
		s.log.Info("stale registration socket removed", "path", path)
	}
	return errors.Join(append(errs, err)...)
}

// proves reports whether the record is of the listener that was bound to this name, and whether
// that is at the path of the record. Where the path cannot be looked at the name has to do, for
// it is never used twice: Check will find out, and a registration is not lost for a moment's error.
func (s *Socket) proves(rec record, bound string) bool {
	if rec.Bound != bound || !pluginreg.IsSocketOf(rec.Path, s.name) || !s.mayAnnounce(rec.Announced) {
		return false
	}
	at, err := unixsock.Lstat(rec.Path)
	return rec.FileID == at.FileID || err != nil && !isMissing(err)
}

// takeOver publishes a kept listener as the record has it. A time yet to come was written under a
// wall clock that was ahead; nobody could count from it.
func (s *Socket) takeOver(l *net.UnixListener, rec record) {
	now := time.Now()
	for _, at := range []*time.Time{&rec.PublishedAt, &rec.GetInfoAt, &rec.Notification.At, &rec.FirstAcceptedAt} {
		if at.After(now) {
			*at = now
		}
	}
	dir, err := unixsock.Stat(s.r.dir.path)
	if err != nil { // it went this very moment
		s.log.Debug("cannot look at the plugins_registry", "error", err)
	}
	p := newListener(s, l, dir.FileID, rec)
	s.setPublished(p)
	p.serve()
}

// listenerOf makes a listener of a descriptor that was handed over, and closes that. Whether it
// listens is not asked: the record proves that.
func listenerOf(f *os.File) (*net.UnixListener, error) {
	defer f.Close()
	l, err := net.FileListener(f) // a copy, not blocking, closed on exec
	if err != nil {
		return nil, fmt.Errorf("cannot use what the descriptor store kept: %w%s", err, unixsock.Hint(err))
	}
	ul, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("what the descriptor store kept listens on %s, not on a Unix socket", l.Addr()), l.Close())
	}
	return ul, nil
}
