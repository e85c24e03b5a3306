package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/pluginreg"
	"csi-registrar/internal/unixsock"
)

// Adopt takes over the listeners that the store held for the driver while no process ran:
// one, or more if a process died between two. One is ours and at its path if the record names
// what it was bound to, and the file that is at the path: a living listener holds its inode, so
// no other file can have that identity. What it announced and what the kubelet said comes from
// the record too. A listener that is not proven so is closed and forgotten, and its socket
// removed, also under an earlier root_dir. The files are closed in any case.
func (s *Socket) Adopt(ctx context.Context, files []*os.File) error {
	if len(files) == 0 {
		return nil
	}
	return s.do(ctx, changeTime, func(ctx context.Context) error { return s.adopt(ctx, files) })
}

func (s *Socket) adopt(ctx context.Context, files []*os.File) error {
	rec := s.r.readRecord(s.name)
	stale := []string{s.path}
	var errs []error
	for _, f := range files {
		l, err := listenerOf(ctx, f)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		bound := l.Addr().String()
		at, err := unixsock.Lstat(rec.Path)
		recorded := err == nil && rec.Bound == bound && rec.FileID == at.FileID && pluginreg.IsSocketOf(rec.Path, s.name)
		switch {
		case recorded && rec.Path == s.path && s.published() == nil:
			s.takeOver(l, rec)
			continue
		case recorded: // of an earlier root_dir
			did, err := unixsock.Remove(rec.Path, rec.FileID)
			if did {
				s.log.Info("registration socket of an earlier root_dir removed", "path", rec.Path)
			}
			errs = append(errs, err)
		default:
			errs = append(errs, fmt.Errorf("cannot go on with the registration socket of an earlier process: there is no record of it, or %s is another one", s.path))
			stale = append(stale, earlierPath(s.name, bound)...)
		}
		errs = append(errs, l.Close())
	}
	if p := s.published(); p != nil {
		if len(files) > 1 {
			s.keep(ctx, p) // it replaces all of the name
		}
		return errors.Join(append(errs, s.check())...)
	}
	s.forget(ctx)
	removed, err := unixsock.RemoveStale(ctx, stale)
	for _, path := range removed {
		s.log.Info("stale registration socket removed", "path", path)
	}
	return errors.Join(append(errs, err, s.check())...)
}

// takeOver publishes a kept listener as the record has it.
func (s *Socket) takeOver(l *net.UnixListener, rec record) {
	p := newListener(s, l)
	p.id, p.kept = rec.FileID, true
	p.announced, p.publishedAt, p.getInfoAt = rec.Announced, rec.PublishedAt, rec.GetInfoAt
	p.notification, p.firstAcceptedAt = rec.Notification, rec.FirstAcceptedAt
	if dir, err := unixsock.Stat(s.r.dir.path); err == nil {
		p.dir = dir.FileID
	}
	s.setPublished(p)
	go p.accept()
}

// earlierPath is where a listener without a record may have been published, as the temporary
// name says under which it was bound.
func earlierPath(name, bound string) []string {
	if !filepath.IsAbs(bound) || !strings.HasPrefix(filepath.Base(bound), temporaryPrefix) {
		return nil
	}
	dir := filepath.Dir(bound)
	if filepath.Base(dir) != pluginreg.DirName {
		dir = pluginreg.Dir(dir)
	}
	path, err := pluginreg.SocketPath(dir, name)
	if err != nil {
		return nil
	}
	return []string{path}
}

// listenerOf makes a listener of a descriptor that was handed over, and closes that.
func listenerOf(ctx context.Context, f *os.File) (*net.UnixListener, error) {
	defer f.Close()
	l, err := net.FileListener(f) // a copy, not blocking, closed on exec
	for tries := 0; lacking(err) && tries < 20 && ctx.Err() == nil; tries++ {
		time.Sleep(lackingPause)
		l, err = net.FileListener(f)
	}
	switch {
	case lacking(err):
		return nil, fmt.Errorf("cannot copy a kept listener: %w: %s", err, acceptHint(err))
	case err != nil:
		return nil, fmt.Errorf("what the descriptor store kept is no listening socket: %w", err)
	}
	ul, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("what the descriptor store kept listens on %s, not on a Unix socket", l.Addr()), l.Close())
	}
	raw, err := ul.SyscallConn()
	listening := 0
	if err == nil {
		cerr := raw.Control(func(fd uintptr) {
			listening, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
		})
		err = errors.Join(err, cerr)
	}
	if err == nil && listening == 0 {
		err = errors.New("what the descriptor store kept is a socket that does not listen")
	}
	if err != nil {
		return nil, errors.Join(err, ul.Close())
	}
	return ul, nil
}

// lackingPause is between tries to do without what others may give back.
const lackingPause = 5 * time.Millisecond

// lacking reports whether this process, or the node, is out of descriptors or memory.
func lacking(err error) bool {
	return slices.ContainsFunc([]error{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOBUFS}, func(lack error) bool { return errors.Is(err, lack) })
}
