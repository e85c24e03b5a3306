package main

import (
	"context"
	"slices"
	"sync"
	"time"

	"csi-registrar/internal/fake"
)

// Events in addition to those of the kubelet.
const (
	appeared fake.Action = "appeared" // a socket, as the watch of the directory sees it
	removed  fake.Action = "removed"
	ready    fake.Action = "ready" // the daemon said READY=1 to the service manager
)

// eventLog keeps what happened, in order, and lets the story wait for more.
type eventLog struct {
	mu      sync.Mutex
	events  []fake.Event
	changed chan struct{} // closed and replaced at each event
}

func newEventLog() *eventLog { return &eventLog{changed: make(chan struct{})} }

func (l *eventLog) add(e fake.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
	close(l.changed)
	l.changed = make(chan struct{})
}

// now is the position after everything that happened so far.
func (l *eventLog) position() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.events)
}

// since returns what happened from a position on.
func (l *eventLog) since(from int) []fake.Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.events[from:])
}

// await waits for an event from a position on.
func (l *eventLog) await(ctx context.Context, from int, match func(fake.Event) bool) (fake.Event, error) {
	for {
		l.mu.Lock()
		i := slices.IndexFunc(l.events[from:], match)
		if i >= 0 {
			defer l.mu.Unlock()
			return l.events[from+i], nil
		}
		changed := l.changed
		l.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return fake.Event{}, context.Cause(ctx)
		}
	}
}

// is matches something that happened to a socket.
func socketEvent(what fake.Action, socket string) func(fake.Event) bool {
	return func(e fake.Event) bool { return e.What == what && e.Socket == socket }
}

// between is the time from one event to another, in milliseconds with a tenth.
func between(from, to fake.Event) float64 {
	return float64(to.At.Sub(from.At).Round(100*time.Microsecond)) / float64(time.Millisecond)
}
