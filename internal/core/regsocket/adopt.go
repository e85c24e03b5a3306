package kubelet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/unixsock"
)

// Adopt takes over the listeners that the store held for the driver while no process ran: one, or
// several if a process died between two. The record proves that a listener is ours and at its path:
// it has the name that the listener was bound to and the FileID of the path, and an open listener
// holds its inode, so no other file can have that FileID. The record also has the announcement and
// the kubelet's answer. A listener without that proof is closed and forgotten, and its socket
// removed, also below an earlier root_dir that is in the record. The Socket owns the files.
//
// A listener that cannot be adopted is logged, and is no error. After a *worker.NotAnswering the
// files are adopted before the next operation. Until then nobody else can take the path, because
// the store holds the listener.
func (s *Socket) Adopt(ctx context.Context, files []*os.File) error {
	if len(files) == 0 {
		return nil
	}
	s.toAdopt.Store(&files)
	return s.change(ctx, func(context.Context) error { return nil })
}

// adopt adopts the files of Adopt that are not adopted yet. It runs in the worker.
func (s *Socket) adopt(ctx context.Context) error {
	files := s.toAdopt.Swap(nil)
	if files == nil {
		return nil
	}
	rec, err := s.r.o.Host.readRecord(s.r.recordOf(s.name))
	errs, stale := []error{ignoreMissing(err)}, []string{s.path}
	for _, f := range *files {
		l, err := s.r.listenerOf(f)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		switch {
		case !s.proves(rec, l.Addr().String()):
			errs = append(errs, fmt.Errorf("the socket has no record, or %s is another one", s.path))
		case rec.Path != s.path:
			did, err := s.r.o.Host.RemoveFile(rec.Path, rec.FileID)
			if did {
				s.log.Info("registration socket of an earlier root_dir removed", "path", rec.Path)
			}
			errs = append(errs, err, rec.removeLink(s.r.o.Host, s.name))
			if isTemporary(filepath.Base(rec.Bound)) { // no scan looks there
				_, err := s.r.o.Host.RemoveFile(rec.Bound, rec.FileID)
				errs = append(errs, err)
			}
		case s.current.Load() == nil: // else it is a second descriptor of the same listener
			dir, _ := s.r.o.Host.Stat(s.r.dir.path) // zero if it was removed just now
			p := newListener(s, l, dir.FileID, rec)
			s.current.Store(p)
			p.serve()
			continue
		}
		errs = append(errs, l.Close())
		// If somebody else still has the listener, the scan removes its name.
		if bound := l.Addr().String(); isTemporary(filepath.Base(bound)) {
			stale = append(stale, bound)
		}
	}
	if p := s.current.Load(); p == nil {
		s.release(ctx)
		errs = append(errs, rec.removeLink(s.r.o.Host, s.name))
	} else if len(*files) > 1 {
		s.keep(ctx, p) // replaces all of that name
	}
	// Also if this is late: nobody serves them.
	removed, err := s.r.o.Host.RemoveStale(context.WithoutCancel(ctx), stale)
	for _, path := range removed {
		s.log.Info("stale registration socket removed", "path", path)
	}
	return errors.Join(append(errs, err)...)
}

// proves reports whether the record is that of the listener that was bound to this name, and
// whether that is at the path of the record. If the path cannot be examined, the name is enough,
// because no name is used twice: a transient error must not cost a registration, and Check
// examines it later.
func (s *Socket) proves(rec record, bound string) bool {
	if rec.Bound != bound || filepath.Base(rec.Path) != rootdir.SocketName(s.name) || !s.mayAnnounce(rec.Announced) {
		return false
	}
	at, err := s.r.o.Host.Lstat(rec.Path)
	return rec.FileID == at.FileID || err != nil && !isMissing(err)
}

// listenerOf returns the listener of a descriptor from the store, and closes the descriptor.
// The record proves that it listens.
func (r *Registry) listenerOf(f *os.File) (Listener, error) {
	defer f.Close()
	l, err := r.o.Host.FileListener(f) // a copy, not blocking, closed on exec
	if err != nil {
		return nil, fmt.Errorf("cannot use what the descriptor store kept: %w%s", err, unixsock.Hint(err))
	}
	if ul, ok := l.(Listener); ok && l.Addr().Network() == "unix" {
		return ul, nil
	}
	return nil, errors.Join(fmt.Errorf("what the descriptor store kept listens on %s, not on a Unix socket", l.Addr()), l.Close())
}
