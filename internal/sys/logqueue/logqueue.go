// Package logqueue writes the log in a goroutine of its own, so that nobody waits for journald or
// for the reader of standard error: a process that must answer the kubelet and feed its watchdog
// cannot stop because somebody does not read its log.
package logqueue

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"sync/atomic"
	"time"
)

const (
	// maxQueued is how many entries wait: more than the start of 1,000 drivers has at once.
	maxQueued = 4096
	// flushWithin limits how long Close waits for entries to be written. With the rest of a restart
	// it is less than the second that the kubelet waits for the answer to GetInfo.
	flushWithin = 300 * time.Millisecond
)

// Write writes one entry. It may wait until ctx is done.
type Write func(ctx context.Context)

// Sink carries out a Write, now or later.
type Sink func(Write)

// Queue is a queue of entries. An entry that does not fit is dropped and counted.
type Queue struct {
	writes  chan Write
	dropped atomic.Int64
	stop    context.CancelFunc
	abort   context.CancelFunc // of the Write that waits
	ended   chan struct{}
}

// New returns a running Queue, and a handler that adds to it. handler is called twice, for that
// handler and for the entries of the Queue itself.
func New(handler func(Sink) slog.Handler) (*Queue, slog.Handler) {
	running, stop := context.WithCancel(context.Background())
	writing, abort := context.WithCancel(context.Background())
	q := &Queue{writes: make(chan Write, maxQueued), stop: stop, abort: abort, ended: make(chan struct{})}
	go q.run(running, writing, handler(func(w Write) { w(writing) }))
	return q, handler(q.add)
}

func (q *Queue) add(w Write) {
	select {
	case q.writes <- w:
	default:
		q.dropped.Add(1)
	}
}

func (q *Queue) run(running, writing context.Context, own slog.Handler) {
	defer close(q.ended)
	for {
		var w Write
		select {
		case w = <-q.writes:
		case <-running.Done():
			select {
			case w = <-q.writes: // was queued before
			default:
				return
			}
		}
		w(writing)
		if n := q.dropped.Swap(0); n > 0 && writing.Err() == nil { // while it was written
			r := slog.NewRecord(time.Now(), slog.LevelWarn, "entries of the log were dropped, because nobody read them", 0)
			r.AddAttrs(slog.Int64("dropped", n))
			_ = own.Handle(writing, r) // there is no other place to report an error of the log
		}
	}
}

// Close writes what is queued, for a moment at most. Later entries are lost.
func (q *Queue) Close() {
	defer q.abort()
	q.stop()
	select {
	case <-q.ended:
	case <-time.After(flushWithin): // a Write to standard error does not end with its context
	}
}

// Writer returns a writer for handlers of package slog, which write each entry with one call.
func Writer(to Sink, w io.Writer) io.Writer { return writer{to, w} }

type writer struct {
	to Sink
	w  io.Writer
}

// Write implements io.Writer.
func (w writer) Write(p []byte) (int, error) {
	entry := bytes.Clone(p)
	w.to(func(context.Context) {
		_, _ = w.w.Write(entry) // there is no other place to report an error of the log
	})
	return len(p), nil
}
