package kubelet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
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
	closeGrace = 2 * time.Second // for calls in flight, at the end of the process
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

	current atomic.Pointer[listener]   // what is published, or about to be; nil: nothing
	handed  atomic.Pointer[[]*os.File] // of the store, to be adopted
	closed  atomic.Bool

	saving sync.Mutex // one writer of the record at a time

	mu   sync.Mutex    // guards what follows, and the fields of listeners; held for moments
	seen status.Socket // without what is in current
	// A recorder has, or is about to have, the calls to the driver; recorder is where it listens.
	recording bool
	recorder  string
}

// Hints receives when it is worth a Check, or the kubelet called.
func (s *Socket) Hints() <-chan struct{} { return s.watch.Hints() }

// do runs f in the Socket's worker. What has begun when ctx ends is given closeTime to end:
// half of it would leave store and directory in disagreement, and the next process could not
// go on.
func (s *Socket) do(ctx context.Context, limit time.Duration, f func(context.Context) error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	whole := context.WithoutCancel(ctx)
	waiting, stop := context.WithCancelCause(whole)
	defer stop(nil)
	defer context.AfterFunc(ctx, func() { time.AfterFunc(closeTime, func() { stop(context.Cause(ctx)) }) })()
	err, late := worker.Do(waiting, s.worker, limit, func() error {
		limited, cancel := context.WithTimeout(whole, limit)
		defer cancel()
		err := errors.Join(s.adopt(limited), f(limited))
		if s.closed.Load() { // meanwhile: this was abandoned, and Close did not wait for it
			err = errors.Join(err, s.end(limited))
		}
		return err
	}, func(err error) { s.log.Debug("what was abandoned has ended", "error", err) })
	return cmp.Or(late, err)
}

// change runs f in the Socket's worker and looks at what came of it.
func (s *Socket) change(ctx context.Context, f func(context.Context) error) error {
	return s.do(ctx, changeTime, func(ctx context.Context) error {
		err := f(ctx)
		if checkErr := s.check(); err == nil { // else both would say the same
			err = checkErr
		}
		return err
	})
}

// Look returns what is known, from memory.
func (s *Socket) Look() status.Socket {
	s.mu.Lock()
	defer s.mu.Unlock()
	look := s.seen
	if p := s.current.Load(); p != nil {
		look.Up, look.Announced, look.NotKept = true, p.Announced, p.notKept
		look.PublishedAt, look.GetInfoAt, look.Notification, look.FirstAcceptedAt = p.PublishedAt, p.GetInfoAt, p.Notification, p.FirstAcceptedAt
		look.Traced = s.recorder != ""
		look.AlsoServed = s.r.others.describe(s.name, p.FileID)
	}
	return look
}

// Check looks at the path, and writes what the record lacks. After an error Look says what was
// seen before.
func (s *Socket) Check(ctx context.Context) error {
	return s.do(ctx, checkTime, func(context.Context) error {
		s.saveAgain()
		return s.check()
	})
}

// check is for the worker.
func (s *Socket) check() error {
	s.checkLink()
	place, dirMissing, recreated := status.Foreign, false, s.r.dir.note()
	f, err := unixsock.Lstat(s.path)
	if isMissing(err) {
		place = status.Missing
		_, err := unixsock.Stat(s.r.dir.path)
		dirMissing = errors.Is(err, os.ErrNotExist)
	} else if err != nil {
		return fmt.Errorf("cannot look at the registration socket: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.current.Load(); p != nil && place == status.Foreign && p.FileID == f.FileID {
		place = status.Ours
	}
	s.seen.Place, s.seen.DirMissing, s.seen.DirRecreated = place, dirMissing, recreated
	return nil
}

func isMissing(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOTDIR)
}

// Acknowledge notes an announcement that the kubelet need not be told: it has learned the identity
// from the driver itself, or only the target of the link is another.
func (s *Socket) Acknowledge(ctx context.Context, a status.Announcement) error {
	return s.do(ctx, changeTime, func(context.Context) error {
		p := s.current.Load()
		if p == nil {
			return nil
		}
		s.mu.Lock()
		p.Announced = a
		s.mu.Unlock()
		s.checkLink()
		return s.save(p)
	})
}

// Withdraw takes the socket away: the path if it is ours, then its place in the store, the
// record and the listener. What is not ours stays. Connections that the kubelet has are still
// served, so that its Notify does not fail. Without anything published it does nothing. If the
// path cannot be removed everything stays as it is (Look: Up).
func (s *Socket) Withdraw(ctx context.Context) error { return s.change(ctx, s.withdraw) }

func (s *Socket) withdraw(ctx context.Context) error {
	p := s.current.Load()
	if p == nil {
		return nil
	}
	if _, err := unixsock.Remove(s.path, p.FileID); err != nil {
		return fmt.Errorf("cannot withdraw the registration socket: %w", err)
	}
	// From here on it is withdrawn, whatever else fails.
	s.current.Store(nil)
	s.forget(ctx)
	s.removeRecord()
	if err := p.removeLink(s.name); err != nil {
		s.log.Warn("the endpoint link is left", "error", err)
	}
	p.stop(true)
	return nil
}

// Close ends the Socket at the end of the process, or when it is withdrawn. A listener that
// the store took is left as it is with Options.KeepSockets, path and record too: the next
// process adopts it, and who connects meanwhile waits in its queue. Otherwise it is withdrawn;
// if its file system does not answer, that is done when it does. Calls in flight go on until
// Registry.Close. With whatever error, the name is free for another Socket.
func (s *Socket) Close(ctx context.Context) error {
	defer s.r.drop(s)
	defer s.watch.Close()
	s.closed.Store(true)
	err := s.do(ctx, closeTime, s.end)
	if p := s.current.Load(); p != nil {
		p.stop(false)
	}
	if files := s.handed.Swap(nil); files != nil { // the store has them, for the next process
		for _, f := range *files {
			err = errors.Join(err, f.Close())
		}
	}
	return err
}

// end is the part of Close that is for the worker.
func (s *Socket) end(ctx context.Context) error {
	p := s.current.Load()
	if p == nil {
		return nil
	}
	if s.r.o.KeepSockets && s.Look().NotKept == "" {
		s.saveAgain()
		p.stop(false) // it stays current: a Notify in flight is still recorded
		return nil
	}
	err := s.withdraw(ctx)
	if s.current.Load() != nil { // its path could not be removed: now it is stale at least
		s.current.Store(nil)
		s.forget(ctx)
	}
	p.stop(false)
	return err
}

// keep gives the listener to the descriptor store, in place of the one that it
// has of this driver. A registration that cannot outlive the process is better than none.
func (s *Socket) keep(ctx context.Context, p *listener) {
	why := ""
	if err := s.r.o.Store.Keep(ctx, StorePrefix+s.name, p); err != nil {
		s.log.Warn("the registration will not survive a restart of csi-registrar: its socket is not in the descriptor store", "error", err)
		why = err.Error()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p.notKept = why
}

// forget takes the driver's listener out of the descriptor store.
func (s *Socket) forget(ctx context.Context) {
	if err := s.r.o.Store.Forget(ctx, StorePrefix+s.name); err != nil {
		s.log.Warn("the descriptor store still has the registration socket", "error", err)
	}
}
