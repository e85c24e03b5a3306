// Package worker runs calls that may never return. A system call on a file system whose server
// is gone (dead NFS, FUSE) is ended only by SIGKILL: no context reaches it. So each call runs in a
// separate goroutine, which is abandoned after the time limit: the caller gets an error, and a hint
// when the call has returned after all.
package worker

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"csi-registrar/internal/sys/safetext"
)

// Pool holds the calls of all Slots, at most one per path at a time.
type Pool struct {
	mu    sync.Mutex
	calls map[string]*call // by path
}

type call struct {
	done      chan struct{} // closed when it has returned
	abandoned chan struct{} // closed when it was abandoned
	since     time.Time
	notify    map[*Slot]struct{} // the Slots that get a hint when it has returned
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// NewPool returns a Pool without any call.
func NewPool() *Pool { return &Pool{calls: make(map[string]*call)} }

// Stuck is a call that was abandoned and has not returned.
type Stuck struct {
	Path  string    // the path that the call uses
	Since time.Time // when it began
}

// Stuck lists the abandoned calls that have not returned, by path.
func (p *Pool) Stuck() []Stuck {
	p.mu.Lock()
	defer p.mu.Unlock()
	var list []Stuck
	for path, c := range p.calls {
		if isClosed(c.abandoned) {
			list = append(list, Stuck{Path: path, Since: c.since})
		}
	}
	slices.SortFunc(list, func(a, b Stuck) int { return cmp.Compare(a.Path, b.Path) })
	return list
}

// Slot runs one owner's calls about one path. Calls about the same path, also those of other
// Slots, run one after the other.
type Slot struct {
	pool     *Pool
	path     string
	returned func()
}

// Slot returns a Slot for calls about path. returned is called, from any goroutine, when a call
// about path has returned, if a Get of this Slot failed because of it; it must not block. It may be
// nil.
func (p *Pool) Slot(path string, returned func()) *Slot {
	return &Slot{pool: p, path: path, returned: returned}
}

// NotAnswering is the error of Get while a call about Path has not returned.
type NotAnswering struct{ Path string }

func (e *NotAnswering) Error() string {
	return fmt.Sprintf("the file system of %s does not answer", safetext.Word(e.Path))
}

// Get runs f and returns its result. If f takes longer than limit, Get abandons it and returns a
// *NotAnswering error. It does not begin f while another call about the same path is running, and
// returns that error when that one was abandoned, or when it has waited for limit. If
// ctx is done first, Get abandons f as well, and returns the cause. discard, if not nil, gets the
// result of an abandoned f that did not fail: it closes what f opened.
//
// A process that gets little CPU time has more than limit: see parts.
func Get[T any](ctx context.Context, s *Slot, limit time.Duration, f func() (T, error), discard func(T)) (T, error) {
	var result, none T
	var failed error
	c, err := s.enter(ctx, limit)
	if err != nil {
		return none, err
	}
	go func() {
		result, failed = f()
		if s.leave(c) && failed == nil && discard != nil {
			discard(result)
		}
	}()
	if err = s.await(ctx, c, limit); err == nil || !s.abandon(c) { // or it has just returned
		return result, failed
	}
	return none, err // result and failed belong to f
}

// Do is Get for an f that cannot fail.
func Do[T any](ctx context.Context, s *Slot, limit time.Duration, f func() T, discard func(T)) (T, error) {
	return Get(ctx, s, limit, func() (T, error) { return f(), nil }, discard)
}

// Run is Get for an f whose only result is its error. An abandoned f may still run: what else
// it writes must not be read after an error of Run.
func Run(ctx context.Context, s *Slot, limit time.Duration, f func() error) error {
	_, err := Get(ctx, s, limit, func() (none struct{}, err error) { return none, f() }, nil)
	return err
}

// enter waits until no call about the path is running, and begins one. If it cannot, the Slot is
// notified when the running call has returned.
func (s *Slot) enter(ctx context.Context, limit time.Duration) (*call, error) {
	p := s.pool
	for waited := (*call)(nil); ; {
		p.mu.Lock()
		c := p.calls[s.path]
		if c == nil && waited != nil && ctx.Err() != nil {
			p.mu.Unlock()
			if s.returned != nil { // the call that was waited for has returned
				s.returned()
			}
			return nil, context.Cause(ctx)
		}
		if c == nil {
			c = &call{
				done: make(chan struct{}), abandoned: make(chan struct{}),
				since: time.Now(), notify: make(map[*Slot]struct{}),
			}
			p.calls[s.path] = c
			p.mu.Unlock()
			return c, nil
		}
		err := context.Cause(ctx)
		if isClosed(c.abandoned) || c == waited && err == nil {
			err = &NotAnswering{Path: s.path}
		}
		if err != nil {
			c.notify[s] = struct{}{}
		}
		p.mu.Unlock()
		if err != nil {
			return nil, err
		}
		_ = s.await(ctx, c, limit) // its error is one of the above unless c has returned since
		waited = c
	}
}

// A call without CPU time must not look like one that hangs, and only the kernel knows the
// difference. So the limit is this many ticks, and the goroutine that counts them goes to the end
// of the queue after each: the goroutine of the call has been at its turn as often. Ticks for which
// there was no CPU time are not made up for.
const parts = 50

// await waits until c has returned, c was abandoned, ctx is done, or limit has passed.
func (s *Slot) await(ctx context.Context, c *call, limit time.Duration) error {
	tick := time.NewTicker(max(limit/parts, 1))
	defer tick.Stop()
	for n := 0; n < parts && !isClosed(c.abandoned); n++ {
		select {
		case <-c.done:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-c.abandoned:
		case <-tick.C:
			runtime.Gosched()
		}
	}
	return &NotAnswering{Path: s.path}
}

// abandon reports whether the call was still running.
func (s *Slot) abandon(c *call) bool {
	p := s.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if isClosed(c.done) {
		return false
	}
	close(c.abandoned)
	c.notify[s] = struct{}{}
	return true
}

// leave ends a call and reports whether it had been abandoned.
func (s *Slot) leave(c *call) bool {
	p := s.pool
	p.mu.Lock()
	delete(p.calls, s.path)
	close(c.done)
	abandoned := isClosed(c.abandoned)
	p.mu.Unlock()
	for slot := range c.notify { // no longer changed
		if slot.returned != nil {
			slot.returned()
		}
	}
	return abandoned
}
