package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

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
	s.handed.Store(&files)
	return s.change(ctx, func(context.Context) error { return nil })
}

// adopt adopts what was handed over and not yet adopted. It is for the worker.
func (s *Socket) adopt(ctx context.Context) error {
	files := s.handed.Swap(nil)
	if files == nil {
		return nil
	}
	rec, err := readRecord(s.r.recordOf(s.name))
	errs, stale := []error{ignoreMissing(err)}, []string{s.path}
	for _, f := range *files {
		l, err := listenerOf(f)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		switch {
		case !s.proves(rec, l.Addr().String()):
			errs = append(errs, fmt.Errorf("cannot go on with the registration socket of an earlier process: there is no record of it, or %s is another one", s.path))
		case rec.Path != s.path:
			did, err := unixsock.Remove(rec.Path, rec.FileID)
			if did {
				s.log.Info("registration socket of an earlier root_dir removed", "path", rec.Path)
			}
			errs = append(errs, err, rec.removeLink(s.name))
		case s.current.Load() == nil: // else it is the same listener once more
			dir, _ := unixsock.Stat(s.r.dir.path) // zero if it went this very moment
			p := newListener(s, l, dir.FileID, rec)
			s.current.Store(p)
			p.serve()
			continue
		}
		errs = append(errs, l.Close())
		if bound := l.Addr().String(); isTemporary(filepath.Base(bound)) { // it never came to its path
			stale = append(stale, bound)
		}
	}
	if p := s.current.Load(); p == nil {
		s.forget(ctx)
		s.removeRecord()
	} else if len(*files) > 1 {
		s.keep(ctx, p) // it replaces all of the name
	}
	return errors.Join(append(errs, s.removeStale(ctx, stale...))...)
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

// listenerOf makes a listener of a descriptor that was handed over, and closes that. Whether it
// listens is not asked: the record proves that.
func listenerOf(f *os.File) (*net.UnixListener, error) {
	defer f.Close()
	l, err := net.FileListener(f) // a copy, not blocking, closed on exec
	if err != nil {
		return nil, fmt.Errorf("cannot use what the descriptor store kept: %w%s", err, unixsock.Hint(err))
	}
	if ul, ok := l.(*net.UnixListener); ok {
		return ul, nil
	}
	return nil, errors.Join(fmt.Errorf("what the descriptor store kept listens on %s, not on a Unix socket", l.Addr()), l.Close())
}
