package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/facts"
)

// Adopt takes over a listener that the store held while no process ran. It is served at
// once and proved by its path. What it announced and what the kubelet said comes from the
// record; without one that describes this very file nothing is known of it (Look: Up,
// Announced is empty), and it has to be published anew. A listener that is not proved is
// closed and forgotten, and its socket removed where it can be proved under an earlier
// root_dir. f is closed in any case.
func (s *Socket) Adopt(ctx context.Context, f *os.File) error {
	s.op.Lock()
	defer s.op.Unlock()
	rec := s.r.readRecord(s.name)
	p, err := s.adopt(ctx, f, rec)
	if err == nil {
		s.setCurrent(p)
		if s.forgot {
			s.keep(ctx, p)
		}
		return nil
	}
	errs := []error{fmt.Errorf("cannot adopt the kept listener of %s: %w", s.name, err)}
	if p != nil {
		errs = append(errs, p.takeAway(ctx, earlierPaths(s, p.listener, rec)), p.stop(false))
	}
	// The store forgets by name, so another listener of the name has to be kept again.
	errs = append(errs, s.r.forget(ctx, s.name))
	s.forgot = true
	if now := s.current(); now != nil && now.inStore {
		s.keep(ctx, now)
	}
	return errors.Join(errs...)
}

// adopt returns the publication, served, also with an error that came after that.
func (s *Socket) adopt(ctx context.Context, f *os.File, rec record) (*publication, error) {
	l, err := listenerOf(f)
	if err != nil {
		return nil, err
	}
	p := newPublication(s, l)
	p.inStore = true // passing it on does not take it out
	// Who waits in the queue is answered from the record before the proof, so look first.
	at, err := lookAt(s.path)
	known := err == nil && rec.Path == s.path && rec.fileID == at.fileID && rec.Announced.Identity.Name == s.name
	if known {
		p.announced, p.publishedAt, p.getInfoAt, p.word = rec.Announced, rec.PublishedAt, rec.GetInfoAt, rec.Word
	}
	if folder, err := lookThrough(s.r.folder.path); err == nil {
		p.folder = folder.fileID
	}
	p.live = known // a Notify of now is written down
	p.id = at.fileID
	go p.accept()
	if s.current() != nil {
		return p, errors.New("it has one already")
	}
	proved, err := p.prove(ctx, s.path)
	if err != nil {
		return p, err
	}
	if proved != p.id {
		return p, fmt.Errorf("%s changed meanwhile", s.path)
	}
	return p, nil
}

// WithdrawLeftover takes away what the store kept for a driver that is no longer
// configured: its path, also under an earlier root_dir, if it leads to this very listener;
// then its place in the store, the record, and the listener. f is closed in any case.
func (r *Registry) WithdrawLeftover(ctx context.Context, name string, f *os.File) error {
	if err := facts.CheckName(name); err != nil { // no path is made of it
		return errors.Join(err, f.Close(), r.forget(ctx, name))
	}
	s := r.newSocket(name, newUnwatched)
	l, err := listenerOf(f)
	if err != nil {
		return errors.Join(fmt.Errorf("cannot withdraw the kept listener of %s: %w", name, err), r.forget(ctx, name))
	}
	p := newPublication(s, l)
	go p.accept()
	paths := append(earlierPaths(s, l, r.readRecord(name)), s.path)
	return errors.Join(p.takeAway(ctx, paths), r.forget(ctx, name), s.removeRecord(), p.stop(true))
}

// listenerOf makes a listener of a descriptor that was handed over, and closes that.
func listenerOf(f *os.File) (*net.UnixListener, error) {
	defer f.Close()
	l, err := net.FileListener(f) // a copy, not blocking, closed on exec
	if err != nil {
		return nil, fmt.Errorf("it is no listening socket: %w", err)
	}
	ul, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("it listens on %s, not on a Unix socket", l.Addr()), l.Close())
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
		err = errors.New("it is a socket that does not listen")
	}
	if err != nil {
		return nil, errors.Join(err, ul.Close())
	}
	return ul, nil
}

// proofTime is for one proof; what was in the queue before is accepted first.
const proofTime = 2 * time.Second

// proof is a connection of ours that should come out of the listener.
type proof struct {
	address string
	arrived chan struct{}
}

// is tells whether it came; only the accept loop asks.
func (p *proof) is(a net.Addr) bool {
	if p == nil || a.String() != p.address {
		return false
	}
	close(p.arrived)
	return true
}

// wait waits until it came. The time is counted in small pieces: a process that was stopped,
// or had no CPU, for all of it has not accepted anything, and proved nothing.
func (p *proof) wait(ctx context.Context) error {
	const pieces = 20
	piece := time.NewTicker(proofTime / pieces)
	defer piece.Stop()
	for range pieces {
		select {
		case <-p.arrived:
			return nil
		case <-ctx.Done():
			return fmt.Errorf("was not proved in time: %w", context.Cause(ctx))
		case <-piece.C:
		}
	}
	return errOther
}

var errOther = errors.New("does not lead to it, but to somebody else")

// prove makes sure that path leads to this listener, and returns the file it is. The
// inode of the socket is not that of its file, so there is nothing to compare: dial, from
// an address that nobody can guess, and see who comes. Somebody else is told at once: a
// socket keeps the name that it was bound under, and no two are bound under one of ours.
func (p *publication) prove(ctx context.Context, path string) (fileID, error) {
	before, err := lookAt(path)
	if err != nil {
		return fileID{}, err
	}
	if !before.isSocket() {
		return fileID{}, fmt.Errorf("%s is %s", path, before.kind())
	}
	pr := &proof{address: ownAddress(), arrived: make(chan struct{})}
	p.proof.Store(pr)
	defer p.proof.Store(nil)
	dialling, cancel := context.WithTimeout(ctx, proofTime)
	defer cancel()
	c, err := p.dialFull(dialling, pr.address, path)
	if err != nil {
		return fileID{}, err
	}
	defer c.Close()
	if c.RemoteAddr().String() != p.listener.Addr().String() {
		return fileID{}, fmt.Errorf("%s %w", path, errOther)
	}
	if err := pr.wait(ctx); err != nil {
		return fileID{}, fmt.Errorf("%s %w", path, err)
	}
	after, err := lookAt(path)
	if err == nil && after.fileID != before.fileID {
		err = fmt.Errorf("%s changed meanwhile", path)
	}
	return after.fileID, err
}

// dialFull dials, and waits where the queue is full: nobody accepted while we were away.
// Only our own queue is waited for.
func (p *publication) dialFull(ctx context.Context, from, path string) (*net.UnixConn, error) {
	const sure = 5 // looks at our queue: it may just have been emptied
	for empty := 0; ; {
		c, err := dial(ctx, from, path)
		if !errors.Is(err, unix.EAGAIN) {
			return c, err
		}
		if p.someWait() {
			empty = 0
		} else if empty++; empty == sure {
			return nil, fmt.Errorf("%s %w", path, errOther)
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// takeAway removes those of the paths that lead to this listener.
func (p *publication) takeAway(ctx context.Context, paths []string) error {
	var errs []error
	for _, path := range paths {
		id, err := p.prove(ctx, path)
		if err != nil {
			continue // not ours, or not there
		}
		did, err := remove(path, id)
		if did {
			p.s.log.Info("kept registration socket withdrawn", "path", path)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
