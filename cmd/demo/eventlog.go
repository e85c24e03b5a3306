package main

import (
	"context"
	"slices"
	"sync"

	"csi-registrar/internal/test/fake"
)

// Events in addition to those of the kubelet.
const (
	appeared fake.Action = "appeared" // a socket in a watched directory
	removed  fake.Action = "removed"
	ready    fake.Action = "ready" // the daemon sent READY=1
)

// eventLog records events in order and can wait for the next.
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

// position returns the position after the last event.
func (l *eventLog) position() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.events)
}

// since returns the events from a position on.
func (l *eventLog) since(from int) []fake.Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.events[from:])
}

// await waits for a matching event from a position on.
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

// socketEvent matches one action at a socket.
func socketEvent(what fake.Action, socket string) func(fake.Event) bool {
	return func(e fake.Event) bool { return e.What == what && e.Socket == socket }
}

// between returns the time between two events in milliseconds.
func between(from, to fake.Event) float64 { return milliseconds(to.At.Sub(from.At)) }
