package kubelet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
	"csi-registrar/internal/worker"
)

// How long the worker of a Socket may take before it is abandoned. A publication waits for a
// scan, for the descriptor store and, at times, for a stale socket.
const (
	checkTime  = time.Second
	changeTime = 3 * time.Second
	closeTime  = time.Second
)

// Socket is the registration socket of one driver. It satisfies registrar.Socket. What looks
// at files or changes them runs in a worker, one at a time.
type Socket struct {
	r      *Registry
	name   string
	path   string
	log    *slog.Logger
	watch  Watch
	worker *worker.Slot

	saving sync.Mutex // one writer of the record at a time

	mu      sync.Mutex // guards what follows, and the fields of listeners; held for moments
	current *listener  // what is published, or nil
	seen    seen
	counts  struct{ accepted, refusals uint64 }
	notKept error
	unsaved bool // the record could not be written; Check tries again
}

// seen is what the worker found at the path last.
type seen struct {
	place      status.Place
	dirMissing bool
	recreated  bool // the directory
}

func newSocket(r *Registry, name, path string) *Socket {
	s := &Socket{r: r, name: name, path: path, log: r.log.With("driver", name), seen: seen{place: status.Missing}}
	s.watch = r.watch(path)
	s.worker = r.pool.Slot(path, s.watch.Hint)
	return s
}

// Path is <plugins_registry>/<driver>-reg.sock.
func (s *Socket) Path() string { return s.path }

// Hints receives when it is worth a Check, or the kubelet called.
func (s *Socket) Hints() <-chan struct{} { return s.watch.Hints() }

// do runs f in the Socket's worker. A change that has begun is ended, whatever becomes of ctx:
// half of it would leave store and directory in disagreement, and the next process could not
// go on.
func (s *Socket) do(ctx context.Context, limit time.Duration, f func(context.Context) error) error {
	whole := context.WithoutCancel(ctx)
	err, late := worker.Do(ctx, s.worker, limit, func() error {
		limited, cancel := context.WithTimeout(whole, limit)
		defer cancel()
		return f(limited)
	}, nil)
	return errors.Join(late, err)
}

// Look returns what is known, from memory.
func (s *Socket) Look() status.Socket {
	s.mu.Lock()
	defer s.mu.Unlock()
	look := status.Socket{
		Path: s.path, Place: s.seen.place, DirMissing: s.seen.dirMissing, DirRecreated: s.seen.recreated,
		Accepted: s.counts.accepted, Refusals: s.counts.refusals,
	}
	var own unixsock.FileID
	if p := s.current; p != nil {
		own = p.id
		look.Up, look.Announced = true, p.announced
		look.PublishedAt, look.GetInfoAt, look.Notification, look.FirstAcceptedAt = p.publishedAt, p.getInfoAt, p.notification, p.firstAcceptedAt
		if s.notKept != nil {
			look.NotKept = s.notKept.Error()
		}
		look.AlsoServed = s.r.others.describe(s.name, own)
	}
	return look
}

// Check looks at the path, and tries again to write a record that could not be written. After
// an error Look says what was seen before.
func (s *Socket) Check(ctx context.Context) error {
	return s.do(ctx, checkTime, func(context.Context) error {
		s.saveAgain()
		return s.check()
	})
}

// check is for the worker.
func (s *Socket) check() error {
	now := seen{recreated: s.r.dir.note()}
	f, err := unixsock.Lstat(s.path)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		now.place = status.Missing
		_, err = unixsock.Stat(s.r.dir.path)
		now.dirMissing = errors.Is(err, os.ErrNotExist)
	} else if err != nil {
		return fmt.Errorf("cannot look at the registration socket: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if now.place == "" {
		now.place = status.Foreign
		if p := s.current; p != nil && p.id == f.FileID {
			now.place = status.Ours
		}
	}
	s.seen = now
	return nil
}

// Acknowledge notes that the kubelet has learned this identity from the driver itself.
func (s *Socket) Acknowledge(ctx context.Context, i status.Identity) error {
	return s.do(ctx, changeTime, func(context.Context) error {
		p := s.published()
		if p == nil {
			return nil
		}
		s.mu.Lock()
		p.announced.Identity = i
		s.mu.Unlock()
		return s.save(p)
	})
}

// published is what is published, or nil.
func (s *Socket) published() *listener {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current
}

// setPublished makes p, or nothing, what is published. Only that is recorded.
func (s *Socket) setPublished(p *listener) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current != nil {
		s.current.live = false
	}
	s.current = p
	if p != nil {
		p.live = true
	} else {
		s.notKept = nil
	}
}

// Withdraw takes the socket away: the path if it is ours, then its place in the store, the
// record and the listener. What is not ours stays. Connections that the kubelet has are still
// served, so that its Notify does not fail. Without anything published it does nothing. If the
// path cannot be removed everything stays as it is (Look: Up).
func (s *Socket) Withdraw(ctx context.Context) error { return s.do(ctx, changeTime, s.withdraw) }

func (s *Socket) withdraw(ctx context.Context) error {
	p := s.published()
	if p == nil {
		return nil
	}
	if _, err := unixsock.Remove(s.path, p.id); err != nil {
		return fmt.Errorf("cannot withdraw the registration socket: %w", err)
	}
	// From here on it is withdrawn, whatever else fails.
	s.setPublished(nil)
	s.forget(ctx)
	if err := s.removeRecord(); err != nil {
		s.log.Warn("cannot remove the record of the registration", "error", err)
	}
	return errors.Join(p.stop(true), s.check())
}

// Close ends the Socket at the end of the process, or when it is withdrawn. A listener that
// the store took is left as it is with Options.KeepSockets, path and record too: the next
// process adopts it, and who connects meanwhile waits in its queue. Otherwise it is withdrawn.
// Calls in flight go on until Registry.Close. With whatever error, the name is free for another
// Socket.
func (s *Socket) Close(ctx context.Context) error {
	defer s.r.drop(s)
	defer s.watch.Close()
	return s.do(ctx, closeTime, func(ctx context.Context) error {
		p := s.published()
		if p == nil {
			return nil
		}
		if s.r.keepSockets && p.kept {
			s.saveAgain()
			return p.stop(false) // its record stays live: a Notify in flight is still recorded
		}
		err := s.withdraw(ctx)
		if s.published() != nil { // the path could not be removed
			s.setPublished(nil)
			err = errors.Join(err, p.stop(false))
		}
		return err
	})
}

// keep gives the listener to the descriptor store, if there is one, in place of the one that it
// has of this driver. A registration that cannot outlive the process is better than none.
func (s *Socket) keep(ctx context.Context, p *listener) {
	if s.r.store == nil {
		return
	}
	err := s.r.store.Keep(ctx, StoreName(s.name), p)
	p.kept = err == nil
	if err != nil {
		s.log.Warn("the registration will not survive a restart of csi-registrar: its socket is not in the descriptor store", "error", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notKept = err
}

// forget takes the driver's listener out of the descriptor store.
func (s *Socket) forget(ctx context.Context) {
	if s.r.store == nil {
		return
	}
	if err := s.r.store.Forget(ctx, StoreName(s.name)); err != nil {
		s.log.Warn("the descriptor store still has the registration socket", "error", err)
	}
}
