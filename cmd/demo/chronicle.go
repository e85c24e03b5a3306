package demo

import (
	"context"
	"slices"
	"sync"
	"time"
)

// chronicle keeps what happened, in order, and lets the story wait for more.
type chronicle struct {
	mu      sync.Mutex
	events  []Event
	changed chan struct{} // closed and replaced at each event
}

func newChronicle() *chronicle { return &chronicle{changed: make(chan struct{})} }

func (c *chronicle) add(e Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.events = append(c.events, e)
	close(c.changed)
	c.changed = make(chan struct{})
}

// now is the place in the chronicle after everything that happened so far.
func (c *chronicle) now() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.events)
}

// since returns what happened from a place on.
func (c *chronicle) since(place int) []Event {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.events[place:])
}

// await waits for an event from a place on.
func (c *chronicle) await(ctx context.Context, place int, match func(Event) bool) (Event, error) {
	for {
		c.mu.Lock()
		i := slices.IndexFunc(c.events[place:], match)
		if i >= 0 {
			defer c.mu.Unlock()
			return c.events[place+i], nil
		}
		changed := c.changed
		c.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return Event{}, context.Cause(ctx)
		}
	}
}

// is matches a happening at a socket.
func is(what Happening, socket string) func(Event) bool {
	return func(e Event) bool { return e.What == what && e.Socket == socket }
}

// A file's appearing and vanishing, as the witness sees it.
const (
	appeared Happening = "appeared"
	vanished Happening = "vanished"
)

// between is the time from one event to another, in milliseconds with a tenth.
func between(from, to Event) float64 {
	return float64(to.At.Sub(from.At).Round(100*time.Microsecond)) / float64(time.Millisecond)
}
