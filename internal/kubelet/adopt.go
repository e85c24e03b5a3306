package kubelet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/status"
)

// Adopt takes over a listener that the store held while no process ran. It is served at
// once and proved by its path. What it announced and what the kubelet said comes from the
// record; without one that describes this very file nothing is known of it (Look: Up,
// Announced is empty), and it has to be published anew. A listener that is not proved is
// closed and forgotten, and its socket removed where it can be proved under an earlier
// root_dir. Where this process has not got what the proof takes, as descriptors, the record
// is believed, or it is tried again for a moment. f is closed in any case.
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
		errs = append(errs, p.takeAway(ctx, earlierPaths(s, p.listener, rec), rec), p.stop(false))
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
	l, err := listenerOf(ctx, f)
	if err != nil {
		return nil, err
	}
	p := newPublication(s, l)
	p.inStore = true // passing it on does not take it out
	// Who waits in the queue is answered from the record before the proof, so look first.
	at, err := lookAt(s.path)
	known := err == nil && rec.Path == s.path && rec.fileID == at.fileID && rec.Announced.Identity.Name == s.name
	if known {
		p.announced, p.publishedAt, p.getInfoAt = rec.Announced, rec.PublishedAt, rec.GetInfoAt
		p.word, p.firstYesAt = rec.Word, rec.FirstYesAt
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
	proved, err := p.prove(ctx, s.path, rec)
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
	if err := status.CheckName(name); err != nil { // no path is made of it
		return errors.Join(err, f.Close(), r.forget(ctx, name))
	}
	s := r.newSocket(name, newUnwatched)
	l, err := listenerOf(ctx, f)
	if err != nil {
		return errors.Join(fmt.Errorf("cannot withdraw the kept listener of %s: %w", name, err), r.forget(ctx, name))
	}
	p := newPublication(s, l)
	go p.accept()
	rec := r.readRecord(name)
	paths := append(earlierPaths(s, l, rec), s.path)
	return errors.Join(p.takeAway(ctx, paths, rec), r.forget(ctx, name), s.removeRecord(), p.stop(true))
}

// listenerOf makes a listener of a descriptor that was handed over, and closes that.
func listenerOf(ctx context.Context, f *os.File) (*net.UnixListener, error) {
	defer f.Close()
	var l net.Listener
	err := insist(ctx, func() (err error) {
		l, err = net.FileListener(f) // a copy, not blocking, closed on exec
		return err
	})
	switch {
	case lacking(err):
		return nil, fmt.Errorf("cannot copy its descriptor: %w: %s", err, acceptHint(err))
	case err != nil:
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

const (
	// proofTime is for one proof; what was in the queue before is accepted first.
	proofTime = 2 * time.Second
	// recordedTime is for one where the record is believed if the proof does not come: any
	// number of these comes before the daemon is ready.
	recordedTime = 100 * time.Millisecond
	// lackTime is how long it is tried again to do without what others may give back.
	lackTime = 100 * time.Millisecond
)

var (
	errOther   = errors.New("does not lead to it, but to somebody else")
	errUnheard = errors.New("was not proved: our connection has not arrived in time")
)

// lacking tells whether this process, or the node, had not got what a proof takes, so that
// the error says nothing of the path: descriptors, memory, time to accept.
func lacking(err error) bool {
	return slices.ContainsFunc([]error{unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOBUFS, unix.EAGAIN, context.DeadlineExceeded, errUnheard},
		func(lack error) bool { return errors.Is(err, lack) })
}

// insist tries again for a moment what fails because something is lacking.
func insist(ctx context.Context, try func() error) error {
	const pause = 5 * time.Millisecond
	for end := time.Now().Add(lackTime); ; {
		err := try()
		if !lacking(err) || time.Now().After(end) {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return err
		}
	}
}

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
func (p *proof) wait(ctx context.Context, patience time.Duration) error {
	const pieces = 20
	piece := time.NewTicker(patience / pieces)
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
	return errUnheard
}

// prove makes sure that path leads to this listener, and returns the file it is. What is
// lacking here says nothing of the path: then the record is believed, if it tells of the
// very file, for no other file can have got its identity.
func (p *publication) prove(ctx context.Context, path string, rec record) (id fileID, err error) {
	err = insist(ctx, func() error {
		before, err := lookAt(path)
		if err != nil {
			return err
		}
		if !before.isSocket() {
			return fmt.Errorf("%s is %s", path, before.kind())
		}
		recorded, patience := rec.Path == path && rec.fileID == before.fileID, proofTime
		if recorded {
			patience = recordedTime
		}
		err = p.dialItself(ctx, path, patience)
		if recorded && lacking(err) {
			p.s.log.Warn("the kept registration socket is taken to be ours, because its record says so: it cannot be proved", "path", path, "error", err)
			err = nil
		}
		if err != nil {
			return err
		}
		after, err := lookAt(path)
		if err == nil && after.fileID != before.fileID {
			err = fmt.Errorf("%s changed meanwhile", path)
		}
		id = after.fileID
		return err
	})
	return id, err
}

// dialItself proves that path leads to this listener. The inode of the socket is not that
// of its file, so there is nothing to compare: dial, from an address that nobody can guess,
// and see who comes. Somebody else is told at once: a socket keeps the name that it was
// bound under, and no two are bound under one of ours.
func (p *publication) dialItself(ctx context.Context, path string, patience time.Duration) error {
	pr := &proof{address: ownAddress(), arrived: make(chan struct{})}
	p.proof.Store(pr)
	defer p.proof.Store(nil)
	dialling, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c, err := p.dialFull(dialling, pr.address, path)
	if err != nil {
		return err
	}
	defer c.Close()
	if c.RemoteAddr().String() != p.listener.Addr().String() {
		return fmt.Errorf("%s %w", path, errOther)
	}
	if err := pr.wait(ctx, patience); err != nil {
		return fmt.Errorf("%s %w", path, err)
	}
	return nil
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
func (p *publication) takeAway(ctx context.Context, paths []string, rec record) error {
	var errs []error
	for _, path := range paths {
		id, err := p.prove(ctx, path, rec)
		if lacking(err) {
			errs = append(errs, err)
		}
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
