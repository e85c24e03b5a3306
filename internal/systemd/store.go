package systemd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Errors of Store.Keep.
var (
	// ErrNoStore: the process has no descriptor store, because it does not run as a
	// service of systemd.
	ErrNoStore = errors.New("there is no descriptor store: not a service of systemd")
	// ErrStoreFull: the manager would drop the descriptor.
	ErrStoreFull = errors.New("the descriptor store of systemd is full")
)

const (
	// confirmWithin bounds how long a caller waits for the manager: a registration socket
	// must not come later than this because the manager is busy.
	confirmWithin = 300 * time.Millisecond
	// flushWithin bounds what Run does after its context has ended. TimeoutStopSec= is 10 s.
	flushWithin = 8 * time.Second
	// A message that cannot be sent is tried again: at once if the manager's queue was full
	// for queueTimeout, after sendPause if there was another error.
	queueTimeout = time.Second
	sendPause    = 100 * time.Millisecond
)

// StoreMax returns how many descriptors the store of this service may hold, 0 if that is
// unknown: $FDSTORE since systemd 254, else what the unit says beside
// FileDescriptorStoreMax=. getenv is os.Getenv.
func StoreMax(getenv func(string) string) int {
	limit, err := strconv.Atoi(cmp.Or(getenv("FDSTORE"), getenv("CSI_REGISTRAR_FDSTORE")))
	if err != nil || limit < 0 {
		return 0
	}
	return limit
}

// StoreOptions are what a Store has to know.
type StoreOptions struct {
	Max  int      // how many descriptors fit (StoreMax); 0: unknown
	Held []string // the names of those that are in the store already, each as often as it is there
	Log  *slog.Logger
}

// Store is the descriptor store of our service: what is kept there is open in PID 1 for
// as long as the service is not stopped, and is handed over by name to the next process
// (see Receive). The manager reads messages in the order in which they were sent and answers
// none of them; but a BARRIER=1 among them tells when all before it were read. So there is one
// queue, which Run sends, and a descriptor in it counts as kept: the manager takes each one for
// which there is room, and what has room is counted here. May be used by several goroutines.
type Store struct {
	notify  *Notifier
	options StoreOptions
	wake    chan struct{} // a hint for Run, without a payload

	mu    sync.Mutex
	ended bool           // Run has returned
	names map[string]int // what the store holds when the queue is done: descriptors by name
	queue []request      // not sent, in order

	last        uint64            // the number of the last request that was queued
	sent        uint64            // of the last one that was sent
	confirmed   uint64            // of the last one that the manager has read
	unconfirmed map[string]uint64 // by name: the last request that is not confirmed
	changed     chan struct{}     // closed and replaced when confirmed changes
}

// request is a message about a name: FDSTORE with a descriptor, FDSTOREREMOVE without (-1).
type request struct {
	number uint64
	name   string
	fd     int
}

// NewStore returns the store behind the notifier; Run must run. With a nil notifier Keep fails
// with ErrNoStore and Forget does nothing.
func NewStore(n *Notifier, o StoreOptions) *Store {
	s := &Store{
		notify: n, options: o, wake: make(chan struct{}, 1),
		names: map[string]int{}, unconfirmed: map[string]uint64{}, changed: make(chan struct{}),
	}
	for _, name := range o.Held {
		s.names[name]++
	}
	return s
}

// Keep puts a copy of c's descriptor into the store, in place of what has that name there. It
// returns when the manager has it, at the latest after 0.3 s; then it is sent and confirmed
// later. An error means that it is not kept and will not be.
func (s *Store) Keep(ctx context.Context, name string, c syscall.Conn) error {
	if s.notify == nil {
		return fmt.Errorf("cannot keep %s: %w", name, ErrNoStore)
	}
	// FDNAME ends at the line's end; LISTEN_FDNAMES is a list with colons.
	if name == "" || len(name) > 255 || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == ':' }) {
		return fmt.Errorf("cannot keep %q in the descriptor store: not a name for a descriptor", name)
	}
	fd, err := duplicate(c)
	if err != nil {
		return fmt.Errorf("cannot keep %s: %w", name, err)
	}
	number, err := s.request(name, fd)
	if err != nil {
		return errors.Join(fmt.Errorf("cannot keep %s: %w", name, err), unix.Close(fd))
	}
	s.await(ctx, number)
	return nil
}

// Forget removes all descriptors of that name from the store and returns when they are gone,
// at the latest after 0.3 s; then they are removed later. None of that name is no error. A
// listener lives until its last copy is closed, so withdrawing one takes this as well as
// closing one's own.
func (s *Store) Forget(ctx context.Context, name string) error {
	if s.notify == nil {
		return nil
	}
	number, err := s.request(name, -1)
	if err != nil {
		return fmt.Errorf("cannot forget %s: %w", name, err)
	}
	s.await(ctx, number)
	return nil
}

// Unconfirmed lists the names of which the manager has not read the last message, sorted.
func (s *Store) Unconfirmed() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.unconfirmed))
}

// request queues what makes fd the only descriptor of that name, or -1 none. It owns fd if it
// succeeds, and returns the number to wait for.
func (s *Store) request(name string, fd int) (number uint64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return 0, errors.New("the descriptor store is not used any more")
	}
	if fd >= 0 && s.options.Max > 0 && s.names[name] == 0 {
		held := 0
		for _, n := range s.names {
			held += n
		}
		if held >= s.options.Max {
			return 0, fmt.Errorf("%w (%d of %d); raise FileDescriptorStoreMax= of the unit", ErrStoreFull, held, s.options.Max)
		}
	}
	// An unsent descriptor of that name is superseded. Everything else stays in its order, so
	// that there is room in the store for each descriptor when its turn comes.
	s.queue = slices.DeleteFunc(s.queue, func(r request) bool {
		if r.name != name || r.fd < 0 {
			return false
		}
		_ = unix.Close(r.fd) // a copy that nobody else uses; no error of it matters
		return true
	})
	delete(s.names, name)
	i := slices.IndexFunc(s.queue, func(r request) bool { return r.name == name })
	if i < 0 {
		// Also if we know of none: the process before us may have sent one that was not yet
		// in the store when ours was started.
		i = s.enqueue(name, -1)
	}
	if fd >= 0 {
		i = s.enqueue(name, fd)
		s.names[name] = 1
	}
	number = s.queue[i].number
	s.unconfirmed[name] = number
	select {
	case s.wake <- struct{}{}:
	default:
	}
	return number, nil
}

// enqueue returns the index in the queue.
func (s *Store) enqueue(name string, fd int) int {
	s.last++
	s.queue = append(s.queue, request{s.last, name, fd})
	return len(s.queue) - 1
}

// await waits until the manager has read a request, but not long.
func (s *Store) await(ctx context.Context, number uint64) {
	timer := time.NewTimer(confirmWithin)
	defer timer.Stop()
	for {
		s.mu.Lock()
		done, changed := s.confirmed >= number, s.changed
		s.mu.Unlock()
		if done {
			return
		}
		select {
		case <-changed:
		case <-timer.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// Run sends what is queued, in order, however long the manager takes. When ctx has ended it
// sends what is left and returns when the manager has read all, at the latest after 8 s, with
// an error that names what it has not read.
func (s *Store) Run(ctx context.Context) error {
	if s.notify == nil {
		return nil
	}
	defer s.end()
	var barriers sync.WaitGroup
	defer barriers.Wait()
	lasting, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(flushWithin, stop) })()
	ending := ctx.Done()
	var barrier chan struct{} // closed when the barrier that was sent is answered; nil: none was sent
	for {
		for r, ok := s.next(); ok; r, ok = s.next() {
			if !s.transmit(lasting, r) {
				return s.unread()
			}
		}
		s.mu.Lock()
		sent, confirmed := s.sent, s.confirmed
		s.mu.Unlock()
		if sent == confirmed && ctx.Err() != nil {
			return nil
		}
		if sent > confirmed && barrier == nil {
			done := make(chan struct{})
			barrier = done
			end := s.sendBarrier(lasting)
			barriers.Go(func() {
				defer close(done)
				if awaitEnd(lasting, end) {
					s.confirm(sent)
				}
			})
		}
		select {
		case <-s.wake:
		case <-barrier:
			barrier = nil
		case <-ending:
			ending = nil
		case <-lasting.Done():
			return s.unread()
		}
	}
}

// next takes the first request out of the queue.
func (s *Store) next() (r request, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) == 0 {
		return r, false
	}
	r, s.queue = s.queue[0], s.queue[1:]
	return r, true
}

// transmit sends a request and reports whether it was sent before ctx ended.
func (s *Store) transmit(ctx context.Context, r request) bool {
	message := "FDSTOREREMOVE=1\nFDNAME=" + r.name
	if r.fd >= 0 {
		defer unix.Close(r.fd) // the manager's queue has another copy now
		// FDPOLL=0: without it PID 1 would drop a listener at the first sign of an error on it.
		message = "FDSTORE=1\nFDNAME=" + r.name + "\nFDPOLL=0"
	}
	if !s.send(ctx, message, r.fd) {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = r.number
	return true
}

// send tries to send a message until it is sent or ctx has ended, and reports which.
func (s *Store) send(ctx context.Context, message string, fd int) bool {
	for failed := false; ; failed = true {
		err := s.notify.send(message, fd, time.Now().Add(queueTimeout))
		if err == nil {
			if failed {
				s.options.Log.Info("the service manager reads its messages again")
			}
			return true
		}
		if !failed {
			s.options.Log.Warn("cannot reach the descriptor store; trying again until it works", "error", err)
		}
		pause := sendPause
		if errors.Is(err, os.ErrDeadlineExceeded) {
			pause = 0
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
}

// sendBarrier sends a BARRIER=1 and returns a pipe that ends when the manager has read
// everything that was sent before; nil if it was not sent.
func (s *Store) sendBarrier(ctx context.Context) *os.File {
	r, w, err := os.Pipe()
	if err != nil {
		s.options.Log.Warn("cannot ask the service manager what it has read; trying again", "error", err)
		return nil
	}
	defer w.Close() // ours must be closed, or the pipe would never end
	if !s.send(ctx, "BARRIER=1", int(w.Fd())) {
		_ = r.Close() // nothing came through it
		return nil
	}
	return r
}

// awaitEnd reports whether a pipe that nobody writes to ended before ctx, and closes it. Without
// one it only waits a moment, before the next try.
func awaitEnd(ctx context.Context, r *os.File) bool {
	if r == nil {
		select {
		case <-ctx.Done():
		case <-time.After(sendPause):
		}
		return false
	}
	defer r.Close()
	defer context.AfterFunc(ctx, func() { _ = r.SetReadDeadline(time.Unix(1, 0)) })() // fails only on a closed file
	_, err := r.Read(make([]byte, 1))
	return errors.Is(err, io.EOF)
}

// confirm notes that the manager has read all requests up to that number.
func (s *Store) confirm(number uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.confirmed = number
	maps.DeleteFunc(s.unconfirmed, func(_ string, last uint64) bool { return last <= number })
	close(s.changed)
	s.changed = make(chan struct{})
}

// unread is the error of a Run that had to end too early.
func (s *Store) unread() error {
	return fmt.Errorf("the service manager did not read in %s what is to be in its descriptor store: %s",
		flushWithin, strings.Join(s.Unconfirmed(), ", "))
}

func (s *Store) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	for _, r := range s.queue {
		if r.fd >= 0 {
			_ = unix.Close(r.fd) // a copy that nobody else uses; no error of it matters
		}
	}
	s.queue = nil
}
