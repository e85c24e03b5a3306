package regsocket

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/worker"
)

// How long a call of a Socket's worker may take before it is abandoned. A publication waits for a
// scan, for the descriptor store and, sometimes, for a stale socket.
const (
	checkTime  = 2 * time.Second // also for the question who else serves a driver
	changeTime = 3 * time.Second
	closeTime  = time.Second
	closeGrace = 2 * time.Second // for calls in flight, at the end of the process
)

// Socket is the registration socket of one driver. It implements registrar.Socket. A worker
// reads and changes files, one call at a time.
type Socket struct {
	r      *Registry
	name   string
	path   string
	log    *slog.Logger
	watch  rate.Hinter
	worker *worker.Slot

	current   atomic.Pointer[listener]   // published, or about to be; nil: none
	toAdopt   atomic.Pointer[[]*os.File] // from the store, to be adopted
	holder    holder                     // of the path; the worker's
	explained time.Time                  // of the refusal that AlsoServed is for; the worker's
	closed    atomic.Bool
	discarded atomic.Bool // closed, and Close keeps nothing

	saving sync.Mutex  // one writer of the record at a time
	again  *time.Timer // gives a hint

	mu   sync.Mutex    // guards the following and the fields of listeners
	seen status.Socket // without the fields that are in current
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
	waiting, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stop(nil) // which an abandoned call notices
	defer context.AfterFunc(ctx, func() { time.AfterFunc(closeTime, func() { stop(context.Cause(ctx)) }) })()
	return worker.Run(waiting, s.worker, limit, func() error {
		err := s.adopt(waiting)
		if err != nil && !isShortage(err) {
			s.log.Warn("cannot adopt the registration socket of an earlier process", "error", err)
			err = nil
		}
		if err == nil {
			err = f(waiting)
		}
		if s.closed.Load() { // by Close, or this call was abandoned and Close did not wait for it
			err = errors.Join(err, s.end(waiting))
		}
		return err
	})
}

// change runs f in the Socket's worker, and then check.
func (s *Socket) change(ctx context.Context, f func(context.Context) error) error {
	return s.do(ctx, changeTime, func(ctx context.Context) error {
		return cmp.Or(f(ctx), s.check()) // not both: they may be the same
	})
}

// Look implements registrar.Socket.
func (s *Socket) Look() status.Socket {
	s.mu.Lock()
	defer s.mu.Unlock()
	look := s.seen
	if p := s.current.Load(); p != nil {
		look.Up, look.Adopted, look.Publication, look.NotKept = true, p.adopted, p.Publication, p.notKept
	}
	return look
}

// Check implements registrar.Socket. It also completes the record.
func (s *Socket) Check(ctx context.Context) error {
	return s.do(ctx, checkTime, func(ctx context.Context) error {
		s.saveAgain()
		s.explainRefusal(ctx)
		return s.check()
	})
}

// againAfter is how long it takes until what failed is tried again: nothing gives a hint when a
// file system has space, or is writable, again.
const againAfter = 10 * time.Second

// checkAgain gives a hint after a while.
func (s *Socket) checkAgain() { s.again.Reset(againAfter) }

// check runs in the worker.
func (s *Socket) check() error {
	place, dirMissing, recreated := status.Foreign, false, s.r.dir.note()
	f, err := s.r.o.Host.Lstat(s.path)
	if isMissing(err) {
		place = status.Missing
		_, err := s.r.o.Host.Stat(s.r.dir.path)
		dirMissing = errors.Is(err, os.ErrNotExist)
	} else if err != nil {
		s.checkAgain() // the error ends without a hint, and until then nothing is decided
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
	// It is withdrawn now, whatever else fails.
	s.current.Store(nil)
	s.release(ctx)
	p.stop()
	return nil
}

// Close implements agent.Socket. With Options.KeepSockets a listener in the store stays as it is,
// with its path and record: the next process adopts it, and clients wait in its queue. Otherwise
// the socket is withdrawn; if its file system does not answer, as soon as it does. Of a withdrawn
// registration nothing is kept, not even a socket that an abandoned call publishes later. Calls in
// flight continue until Registry.Close.
func (s *Socket) Close(ctx context.Context, withdrawn bool) error {
	defer s.r.drop(s)
	defer s.watch.Close()
	s.discarded.Store(withdrawn)
	s.closed.Store(true)
	err := s.do(ctx, closeTime, func(context.Context) error { return nil }) // and then end
	if p := s.current.Load(); p != nil {
		p.stop()
	}
	if files := s.toAdopt.Swap(nil); files != nil { // the store still has them
		for _, f := range *files {
			err = errors.Join(err, f.Close())
		}
	}
	return err
}

// end is the part of Close that runs in the worker.
func (s *Socket) end(ctx context.Context) error {
	p := s.current.Load()
	switch {
	case p == nil:
		if s.discarded.Load() { // the listener of the record was not in the store
			s.removeRecord()
		}
		return nil
	case s.r.o.KeepSockets && s.Look().NotKept == "" && !s.discarded.Load():
		s.saveAgain()
		p.stop() // still current, so that a Notify in flight is recorded
		return nil
	}
	err := s.withdraw(ctx)
	if s.current.Load() != nil { // its path could not be removed: at least it is stale now
		s.current.Store(nil)
		s.forget(ctx)
	}
	p.stop()
	return err
}

// keep gives the socket of p to the descriptor store, in place of the driver's previous one. A
// registration that does not survive the process is better than none.
func (s *Socket) keep(ctx context.Context, p *listener, c syscall.Conn) {
	why := ""
	if err := s.r.o.Store.Keep(ctx, StorePrefix+s.name, c); err != nil {
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
