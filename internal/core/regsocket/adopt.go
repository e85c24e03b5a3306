package regsocket

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/unixsock"
)

// Adopt takes over the listeners that the store held for the driver while no process ran: one, or
// several if a process died between two. The record proves that a listener is ours and at its path:
// it has the cookie of the listener and the FileID of the path, and an open listener holds its
// inode, so no other file can have that FileID. The record also has the announcement and the
// kubelet's answer. A listener without that proof is closed and forgotten, and its socket removed,
// also below an earlier root_dir that is in the record. The Socket owns the files. A stale socket
// at the path, which a crash or a power cut left behind, is removed: the kubelet would dial it, and
// then back off for up to two minutes.
//
// A listener that cannot be adopted is logged, and is no error. After a *worker.NotAnswering the
// files are adopted before the next operation. Until then nobody else can take the path, because
// the store holds the listener.
func (s *Socket) Adopt(ctx context.Context, files []*os.File) error {
	s.toAdopt.Store(&files)
	return s.change(ctx, func(context.Context) error { return nil })
}

// adopt adopts the files of Adopt that are not adopted yet. It runs in the worker.
func (s *Socket) adopt(ctx context.Context) error {
	files := s.toAdopt.Swap(nil)
	if files == nil {
		return nil
	}
	var rec record
	var err error
	if len(*files) > 0 {
		rec, err = s.r.o.Host.readRecord(s.r.recordOf(s.name))
	}
	errs := []error{err}
	var listeners []Listener
	for _, f := range *files {
		l, err := s.r.o.Host.FileListener(f) // a copy, not blocking, closed on exec
		if err == nil {
			listeners = append(listeners, l)
		} else {
			errs = append(errs, fmt.Errorf("cannot use what the descriptor store kept: %w%s", err, unixsock.Hint(err)))
		}
	}
	if err := errors.Join(errs...); isShortage(err) {
		for _, l := range listeners {
			err = errors.Join(err, l.Close())
		}
		s.toAdopt.Store(files)
		s.checkAgain()
		return err
	}
	errs[0] = ignoreMissing(errs[0])
	for _, f := range *files {
		errs = append(errs, f.Close())
	}
	for _, l := range listeners {
		switch {
		case !s.proves(rec, l):
			if _, err := s.r.o.Host.Lstat(s.path); isMissing(err) { // it is published again
				s.log.Debug("cannot adopt the registration socket of an earlier process: it was removed", "path", s.path)
			} else {
				errs = append(errs, fmt.Errorf("the socket has no record, or %s is another one", s.path))
			}
		case rec.Path != s.path:
			did, err := s.r.o.Host.RemoveFile(rec.Path, rec.FileID)
			if did {
				s.log.Info("registration socket of an earlier root_dir removed", "path", rec.Path)
			}
			errs = append(errs, err)
		case s.current.Load() == nil: // else it is a second descriptor of the same listener
			p := newListener(s, l, rec)
			p.adopted = true
			s.current.Store(p)
			p.serve()
			continue
		}
		errs = append(errs, l.Close())
	}
	switch p := s.current.Load(); {
	case len(*files) == 0:
	case p == nil:
		s.release(ctx)
	case len(*files) > 1:
		s.keep(ctx, p, p.Listener) // replaces all of that name
	}
	// also if this is late
	_, err = s.vacate(context.WithoutCancel(ctx))
	return errors.Join(append(errs, err)...)
}

// proves reports whether the record is that of the listener, and whether that is at the path of the
// record. If the path cannot be examined, the cookie is enough: a transient error must not cost a
// registration, and Check examines it later.
func (s *Socket) proves(rec record, l Listener) bool {
	cookie, err := s.r.o.Host.Cookie(l)
	names := filepath.Base(rec.Path) == rootdir.SocketName(s.name) && rec.Announced.Identity.Name == s.name
	if err != nil || rec.Cookie != cookie || rec.Ino == 0 || !names {
		return false
	}
	at, err := s.r.o.Host.Lstat(rec.Path)
	return rec.FileID == at.FileID || err != nil && !isMissing(err)
}

// isShortage reports whether there are no descriptors or no memory, so that nothing is known of the
// registration: it must not be lost for that.
func isShortage(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}
