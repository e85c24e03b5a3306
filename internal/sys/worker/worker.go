// Package worker runs calls that may never return. A system call on a file system whose server
// is gone (dead NFS, FUSE) is ended only by SIGKILL: no context reaches it. So each call runs in a
// separate goroutine, which is abandoned after the time limit: the caller gets an error, and a hint
// when the call has returned after all.
package worker

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Pool holds the calls of all Slots, at most one per path at a time.
type Pool struct {
	mu    sync.Mutex
	calls map[string]*call // by path
}

type call struct {
	done      chan struct{} // closed when it has returned
	since     time.Time
	abandoned bool
	notify    map[*Slot]struct{} // the Slots that get a hint when it has returned
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
		if c.abandoned {
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
// about path has returned, if a Do of this Slot failed because of it; it must not block. It may be
// nil.
func (p *Pool) Slot(path string, returned func()) *Slot {
	return &Slot{pool: p, path: path, returned: returned}
}

// NotAnswering is the error of Do while a call about Path has not returned.
type NotAnswering struct{ Path string }

func (e *NotAnswering) Error() string {
	return fmt.Sprintf("the file system of %s does not answer", e.Path)
}

// Do runs f and returns its result. If that takes longer than limit, Do abandons f and returns a
// *NotAnswering error; it does so at once while an abandoned call about the same path has not
// returned. If ctx is done first, it abandons f as well, and returns the cause. discard, if not
// nil, gets the result of an abandoned f: it closes what f opened.
func Do[T any](ctx context.Context, s *Slot, limit time.Duration, f func() T, discard func(T)) (T, error) {
	var result, none T
	ctx, cancel := context.WithTimeoutCause(ctx, limit, &NotAnswering{Path: s.path})
	defer cancel()
	c, err := s.enter(ctx)
	if err != nil {
		return none, err
	}
	go func() {
		result = f()
		if s.leave(c) && discard != nil {
			discard(result)
		}
	}()
	select {
	case <-c.done:
		return result, nil
	case <-ctx.Done():
	}
	if !s.abandon(c) { // it has just returned
		return result, nil
	}
	return none, context.Cause(ctx) // result belongs to f
}

// enter waits until no call about the path is running, and begins one. If it cannot, the Slot is
// notified when the running call has returned.
func (s *Slot) enter(ctx context.Context) (*call, error) {
	p := s.pool
	for waited := false; ; waited = true {
		p.mu.Lock()
		c := p.calls[s.path]
		if c == nil && waited && ctx.Err() != nil {
			p.mu.Unlock()
			if s.returned != nil { // the call that was waited for has returned
				s.returned()
			}
			return nil, context.Cause(ctx)
		}
		if c == nil {
			c = &call{done: make(chan struct{}), since: time.Now(), notify: make(map[*Slot]struct{})}
			p.calls[s.path] = c
			p.mu.Unlock()
			return c, nil
		}
		err := context.Cause(ctx)
		if c.abandoned {
			err = &NotAnswering{Path: s.path}
		}
		if err != nil {
			c.notify[s] = struct{}{}
		}
		p.mu.Unlock()
		if err != nil {
			return nil, err
		}
		select {
		case <-c.done:
		case <-ctx.Done():
		}
	}
}

// abandon reports whether the call was still running.
func (s *Slot) abandon(c *call) bool {
	p := s.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-c.done:
		return false
	default:
	}
	c.abandoned = true
	c.notify[s] = struct{}{}
	return true
}

// leave ends a call and reports whether it had been abandoned.
func (s *Slot) leave(c *call) bool {
	p := s.pool
	p.mu.Lock()
	delete(p.calls, s.path)
	close(c.done)
	abandoned := c.abandoned
	p.mu.Unlock()
	for slot := range c.notify { // no longer changed
		if slot.returned != nil {
			slot.returned()
		}
	}
	return abandoned
}
