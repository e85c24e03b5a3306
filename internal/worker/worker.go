// Package worker runs calls that may never return. A system call on a file system whose
// server is gone (dead NFS, FUSE) ends with SIGKILL and nothing else; no context reaches it.
// So it runs in a goroutine of its own, which is abandoned when its time is over: whoever
// asked gets an error, and a hint when the call has returned after all.
package worker

import (
	"context"
	"fmt"
	"sort"
	"sync"
	"time"
)

// Pool holds the calls of all Slots, at most one for each path at a time.
type Pool struct {
	mu    sync.Mutex
	calls map[string]*call // by path
}

type call struct {
	done      chan struct{} // closed when it has returned
	since     time.Time
	abandoned bool
	tell      map[*Slot]struct{} // who wants a hint when it has returned
}

// NewPool returns a Pool without any call.
func NewPool() *Pool { return &Pool{calls: make(map[string]*call)} }

// Stuck is a call that was abandoned and has not returned.
type Stuck struct {
	Path  string    // what the call is about
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
	sort.Slice(list, func(i, j int) bool { return list[i].Path < list[j].Path })
	return list
}

// Slot is where one owner has its calls about one path run. Calls about the same path, also
// of other Slots, run one after the other.
type Slot struct {
	pool     *Pool
	path     string
	returned func()
}

// Slot returns a Slot for calls about path. returned is called, from any goroutine, when an
// abandoned call about path has returned, if this Slot was told NotAnswering because of it;
// it must not block. Nil: nothing is called.
func (p *Pool) Slot(path string, returned func()) *Slot {
	return &Slot{pool: p, path: path, returned: returned}
}

// NotAnswering is the error of Do while a call about Path has not returned.
type NotAnswering struct{ Path string }

func (e *NotAnswering) Error() string {
	return fmt.Sprintf("the file system of %s does not answer", e.Path)
}

// Do runs f and returns what f returned. If that takes longer than limit, f is abandoned and
// the error is a *NotAnswering; so it is, at once, while an abandoned call about the same path
// has not returned. The result of an abandoned f goes to discard, if that is not nil: close
// there what f opened. If ctx ends before, f is abandoned as well, and the error is its cause.
func Do[T any](ctx context.Context, s *Slot, limit time.Duration, f func() T, discard func(T)) (T, error) {
	var result, none T
	late := func() {
		if discard != nil {
			discard(result)
		}
	}
	if err := s.do(ctx, limit, func() { result = f() }, late); err != nil {
		return none, err // result is still f's
	}
	return result, nil
}

// do is Do without types: each copy of it would be 3 kB of the binary.
func (s *Slot) do(ctx context.Context, limit time.Duration, f, late func()) error {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	c, err := s.enter(ctx, timer.C)
	if err != nil {
		return err
	}
	go func() {
		f()
		if s.leave(c) {
			late()
		}
	}()
	select {
	case <-c.done:
		return nil
	case <-timer.C:
		err = &NotAnswering{Path: s.path}
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if !s.abandon(c) { // it returned at this very moment
		return nil
	}
	return err
}

// enter waits until no call about the path runs, and begins one.
func (s *Slot) enter(ctx context.Context, limit <-chan time.Time) (*call, error) {
	p := s.pool
	for {
		p.mu.Lock()
		c := p.calls[s.path]
		if c == nil {
			c = &call{done: make(chan struct{}), since: time.Now(), tell: make(map[*Slot]struct{})}
			p.calls[s.path] = c
			p.mu.Unlock()
			return c, nil
		}
		if c.abandoned {
			c.tell[s] = struct{}{}
			p.mu.Unlock()
			return nil, &NotAnswering{Path: s.path}
		}
		p.mu.Unlock()
		select {
		case <-c.done:
		case <-limit:
			s.tellAfter(c)
			return nil, &NotAnswering{Path: s.path}
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// tellAfter has the Slot told when the call has returned, also if it is not abandoned.
func (s *Slot) tellAfter(c *call) {
	s.pool.mu.Lock()
	running := s.pool.calls[s.path] == c
	if running {
		c.tell[s] = struct{}{}
	}
	s.pool.mu.Unlock()
	if !running && s.returned != nil {
		s.returned()
	}
}

// abandon reports false if the call has returned.
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
	c.tell[s] = struct{}{}
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
	for slot := range c.tell { // nobody adds to it any more
		if slot.returned != nil {
			slot.returned()
		}
	}
	return abandoned
}
