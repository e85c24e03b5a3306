package kubelet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"csi-registrar/internal/status"
)

// Socket is the registration socket of one driver. It satisfies registrar.Socket.
type Socket struct {
	r     *Registry
	name  string
	path  string
	log   *slog.Logger
	watch Watch

	op sync.Mutex // one change at a time; guards what follows

	forgot  bool // the store was told to forget the name while another listener may have it
	stored  bool // the store may have a withdrawn listener of the name
	written bool // the record of a withdrawn one may be left

	saving sync.Mutex // one writer of the record at a time

	mu       sync.Mutex // guards what follows, and the fields of publications; held for moments
	pub      *publication
	accepted uint64
	refusals uint64
	notKept  error
	unsaved  bool // the record could not be written; see saveAgain
}

// Path is <plugins_registry>/<driver>-reg.sock.
func (s *Socket) Path() string { return s.path }

// Hints receives when it is worth looking again: the path changed, as Hint says, or the
// kubelet called. Capacity one: a hint is never lost, many are one.
func (s *Socket) Hints() <-chan struct{} { return s.watch.Hints() }

// Hint says that it is worth looking again.
func (s *Socket) Hint() { s.watch.Hint() }

// NotKept tells why the published listener is not in the store, so that the registration
// will not outlive this process; nil if it is, or if there is no store.
func (s *Socket) NotKept() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.notKept
}

// current is what is published, or nil.
func (s *Socket) current() *publication {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pub
}

// Look tells what is at the path and what the kubelet said: one stat of the path, one of
// the folder. A record that could not be written is tried again. It may be called at any time.
func (s *Socket) Look() status.Socket {
	if err := s.saveAgain(); err != nil { // a warning said so the first time
		s.log.Debug("the record of the registration can still not be written", "error", err)
	}
	look := status.Socket{Path: s.path, Place: status.Missing, FolderAnew: s.r.folder.anew()}
	at, err := lookAt(s.path)
	s.mu.Lock()
	defer s.mu.Unlock()
	look.Accepted, look.Refusals = s.accepted, s.refusals
	switch p := s.pub; {
	// A path that cannot be seen is missing as well: whoever publishes then is told why.
	case err != nil:
	case p != nil && p.id == at.fileID:
		look.Place = status.Ours
	default:
		look.Place = status.Foreign
	}
	if p := s.pub; p != nil {
		look.Up = true
		look.Announced = p.announced
		look.PublishedAt, look.GetInfoAt, look.Word, look.FirstYesAt = p.publishedAt, p.getInfoAt, p.word, p.firstYesAt
	}
	return look
}

// Withdraw takes the socket away: the path if it is ours, then its place in the store,
// the record and the listener. What is not ours stays. Connections that the kubelet has
// are still served, so that its Notify does not fail. Without anything published it does
// nothing. If the path cannot be removed everything stays as it is (Look: Up). After any
// other error it is withdrawn, and what is left in the store or of the record goes with the
// next Withdraw, Publish or Close, each of which may follow an error.
func (s *Socket) Withdraw(ctx context.Context) error {
	s.op.Lock()
	defer s.op.Unlock()
	return s.withdraw(ctx)
}

func (s *Socket) withdraw(ctx context.Context) error {
	ctx, cancel := wholly(ctx)
	defer cancel()
	p := s.current()
	if p == nil {
		return s.tidy(ctx)
	}
	if _, err := remove(s.path, p.id); err != nil {
		return fmt.Errorf("cannot withdraw the registration socket: %w", err)
	}
	// From here on it is withdrawn, whatever else fails.
	s.setCurrent(nil)
	s.stored, s.written = s.stored || p.inStore, true
	return errors.Join(s.tidy(ctx), p.stop(true))
}

// tidy takes away what is left of what was withdrawn, while nothing is published.
func (s *Socket) tidy(ctx context.Context) error {
	var errs []error
	if s.stored {
		err := s.r.forget(ctx, s.name)
		if err != nil {
			errs = append(errs, fmt.Errorf("cannot take %s out of the descriptor store: %w", storeName(s.name), err))
		}
		s.stored = err != nil
	}
	if s.written {
		err := s.removeRecord()
		if err != nil {
			errs = append(errs, fmt.Errorf("cannot remove the record of %s: %w", s.name, err))
		}
		s.written = err != nil
	}
	return errors.Join(errs...)
}

// setCurrent makes p, or nothing, what is published. Only a live publication is recorded.
func (s *Socket) setCurrent(p *publication) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pub != nil {
		s.pub.live = false
	}
	s.pub = p
	if p != nil {
		p.live = true
	} else {
		s.notKept = nil
	}
}

// Close ends the Socket at the end of the process, or when the driver is no longer
// configured (after Withdraw). A listener that the store took is left as it is with
// Options.KeepSockets, path and record too: the next process adopts it, and who connects
// meanwhile waits in its queue. Otherwise it is withdrawn. Calls in flight go on until
// Registry.Close. With whatever error, the name is free for another Socket, which replaces
// what this one left behind.
func (s *Socket) Close(ctx context.Context) (kept bool, err error) {
	s.op.Lock()
	defer s.op.Unlock()
	defer s.r.drop(s)
	s.watch.Close()
	p := s.current()
	if p == nil {
		return false, s.withdraw(ctx)
	}
	if s.r.keepSockets && p.inStore {
		s.r.leave(s.path, p.id)
		return true, errors.Join(s.saveAgain(), p.stop(false)) // its record stays live: a Notify in flight is still recorded
	}
	err = s.withdraw(ctx)
	if s.current() != nil { // the path could not be removed
		if p.inStore {
			s.r.leave(s.path, p.id)
		}
		s.setCurrent(nil)
		err = errors.Join(err, p.stop(false))
	}
	return false, err
}
