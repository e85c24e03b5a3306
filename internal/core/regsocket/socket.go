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

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/worker"
)

// How long a call of a Socket's worker may take before it is abandoned. A publication waits for a
// scan, for the descriptor store and, sometimes, for a stale socket.
const (
	checkTime  = time.Second
	changeTime = 3 * time.Second
	closeTime  = time.Second
	closeGrace = 2 * time.Second // for calls in flight, at the end of the process
)

// Socket is the registration socket of one driver. It implements registrar.Socket. Whatever reads
// or changes files runs in a worker, one call at a time.
type Socket struct {
	r      *Registry
	name   string
	path   string
	log    *slog.Logger
	watch  Watch
	worker *worker.Slot

	current   atomic.Pointer[listener]   // published, or about to be; nil: none
	toAdopt   atomic.Pointer[[]*os.File] // from the store, to be adopted
	toRestore atomic.Bool                // by the next Check
	closed    atomic.Bool
	discarded atomic.Bool // Close keeps nothing

	saving sync.Mutex // one writer of the record at a time

	mu    sync.Mutex    // guards the following and the fields of listeners
	seen  status.Socket // without the fields that are in current
	trace *trace        // nil: none
	again *time.Timer   // gives a hint; nil: was not needed yet

	linkLost time.Time // since when the endpoint link is missing; zero: it is not
}

// Hints implements registrar.Socket.
func (s *Socket) Hints() <-chan struct{} { return s.watch.Hints() }

// do runs f in the Socket's worker. If ctx ends meanwhile, f has closeTime to finish: half of it
// would leave the store and the directory inconsistent, and the next process could not adopt the
// socket.
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
		if err := s.adopt(limited); err != nil {
			s.log.Warn("cannot adopt the registration socket of an earlier process", "error", err)
		}
		err := f(limited)
		if s.closed.Load() { // by Close, or this call was abandoned and Close did not wait for it
			err = errors.Join(err, s.end(limited))
		}
		return err
	}, func(err error) { s.log.Debug("an abandoned call has returned", "error", err) })
	return cmp.Or(late, err)
}

// change runs f in the Socket's worker, and then check.
func (s *Socket) change(ctx context.Context, f func(context.Context) error) error {
	return s.do(ctx, changeTime, func(ctx context.Context) error {
		err := f(ctx)
		if checkErr := s.check(); err == nil { // else both may be the same
			err = checkErr
		}
		return err
	})
}

// Look implements registrar.Socket.
func (s *Socket) Look() status.Socket {
	s.mu.Lock()
	defer s.mu.Unlock()
	look := s.seen
	if p := s.current.Load(); p != nil {
		look.Up, look.Publication, look.NotKept = true, p.Publication, p.notKept
		look.Traced = s.trace != nil && s.trace.linked
		look.AlsoServed = s.r.foreign.describe(s.name, p.FileID)
	}
	return look
}

// Check implements registrar.Socket. It also completes the record, and does what Restore asked for.
func (s *Socket) Check(ctx context.Context) error {
	return s.do(ctx, checkTime, func(ctx context.Context) error {
		if p := s.current.Load(); p != nil && s.toRestore.Swap(false) && !s.anotherRecorded() {
			s.keep(ctx, p)
			p.unsaved.Store(true)
		}
		s.saveAgain()
		return s.check()
	})
}

// againAfter is how long it takes until a record or an endpoint link that could not be written is
// tried again: nothing gives a hint when a file system has space, or is writable, again.
const againAfter = 10 * time.Second

// checkAgain gives a hint after a while.
func (s *Socket) checkAgain(after time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.again == nil {
		s.again = time.AfterFunc(after, s.watch.Hint)
	} else {
		s.again.Reset(after)
	}
}

// check runs in the worker.
func (s *Socket) check() error {
	s.checkLink()
	place, dirMissing, recreated := status.Foreign, false, s.r.dir.note()
	f, err := s.r.o.Host.Lstat(s.path)
	if isMissing(err) {
		place = status.Missing
		_, err := s.r.o.Host.Stat(s.r.dir.path)
		dirMissing = errors.Is(err, os.ErrNotExist)
	} else if err != nil {
		s.checkAgain(againAfter) // the error ends without a hint, and until then nothing is decided
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

// Acknowledge implements registrar.Socket.
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

// Restore implements agent.Socket.
func (s *Socket) Restore() {
	s.toRestore.Store(true)
	s.watch.Hint()
}

// Withdraw implements registrar.Socket. Open connections are still served, so that a Notify of the
// kubelet does not fail.
func (s *Socket) Withdraw(ctx context.Context) error { return s.change(ctx, s.withdraw) }

func (s *Socket) withdraw(ctx context.Context) error {
	p := s.current.Load()
	if p == nil {
		return nil
	}
	if _, err := s.r.o.Host.RemoveFile(s.path, p.FileID); err != nil {
		return fmt.Errorf("cannot withdraw the registration socket: %w", err)
	}
	if err := p.removeLink(s.r.o.Host, s.name); err != nil {
		if f, lstatErr := s.r.o.Host.Lstat(p.Announced.Endpoint); lstatErr != nil || f.IsLink() {
			return fmt.Errorf("cannot withdraw the endpoint link: %w", err)
		}
		s.log.Warn("cannot remove the endpoint link", "error", err)
	}
	// It is withdrawn now, whatever else fails.
	s.current.Store(nil)
	if !s.anotherRecorded() {
		s.release(ctx)
	}
	p.stop(true)
	s.removeTemporary(p)
	return nil
}

// Close implements agent.Socket. With Options.KeepSockets a listener in the store stays as it is,
// with its path and record: the next process adopts it, and clients wait in its queue. Otherwise
// the socket is withdrawn; if its file system does not answer, as soon as it does. Calls in flight
// continue until Registry.Close.
func (s *Socket) Close(ctx context.Context) error {
	defer s.r.drop(s)
	defer s.watch.Close()
	s.closed.Store(true)
	err := s.do(ctx, closeTime, func(context.Context) error { return nil }) // and then end
	if p := s.current.Load(); p != nil {
		p.stop(false)
	}
	if files := s.toAdopt.Swap(nil); files != nil { // the store still has them
		for _, f := range *files {
			err = errors.Join(err, f.Close())
		}
	}
	return err
}

// Discard implements agent.Socket. Not even a socket that an abandoned call publishes later is
// kept.
func (s *Socket) Discard() { s.discarded.Store(true) }

// end is the part of Close that runs in the worker.
func (s *Socket) end(ctx context.Context) error {
	p := s.current.Load()
	switch {
	case p == nil && s.discarded.Load(): // a publication that failed may have made the link
		if !s.anotherRecorded() { // the listener of the record was not in the store
			s.removeRecord()
		}
		return s.r.o.Host.removeLink(rootdir.EndpointLink(s.r.dir.root, s.name))
	case p == nil:
		return nil
	case s.r.o.KeepSockets && s.Look().NotKept == "" && !s.discarded.Load() && !s.anotherRecorded():
		s.saveAgain()
		p.stop(false) // still current, so that a Notify in flight is recorded
		s.removeTemporary(p)
		return nil
	}
	err := s.withdraw(ctx)
	if s.current.Load() != nil { // its path could not be removed: at least it is stale now
		s.current.Store(nil)
		s.removeTemporary(p)
		if !s.anotherRecorded() {
			s.forget(ctx)
		}
	}
	if p.stop(false); err == nil && s.discarded.Load() {
		return s.end(ctx) // of a publication that failed before this one
	}
	return err
}

// keep gives the listener to the descriptor store, in place of the driver's previous one. A
// registration that does not survive the process is better than none.
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

// release removes the record, and then the driver's listener from the descriptor store: without
// its record the next process closes it.
func (s *Socket) release(ctx context.Context) {
	s.removeRecord()
	s.forget(ctx)
}

// forget removes the driver's listener from the descriptor store.
func (s *Socket) forget(ctx context.Context) {
	if err := s.r.o.Store.Forget(ctx, StorePrefix+s.name); err != nil {
		s.log.Warn("the descriptor store still has the registration socket", "error", err)
	}
}
