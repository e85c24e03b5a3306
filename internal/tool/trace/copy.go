package trace

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Listener is a *net.UnixListener or a *net.TCPListener.
type Listener interface {
	net.Listener
	SetDeadline(time.Time) error
}

// Conn is a *net.UnixConn or a *net.TCPConn: each direction can be closed by itself.
type Conn interface {
	net.Conn
	CloseRead() error
	CloseWrite() error
}

// Dial connects to the driver.
type Dial func(context.Context) (Conn, error)

const (
	copyBuffer = 32 << 10 // bytes, for each direction of a connection
	// For connections that are in the listener's queue at the end.
	lastAccept = 100 * time.Millisecond
	// A connection without a call is closed after it, at the end.
	idleAtEnd = time.Second
)

// Serve accepts connections and copies each to a connection from dial, until ctx is done. Pending
// calls are then copied to their end: Serve returns when there are none, or when cut is done, which
// ends them. Idle connections are closed.
//
// The bytes never wait for the record. The driver sees one difference: the process that connects
// (SO_PEERCRED) is this one.
//
// Serve closes the listener as soon as it accepts no more connections. It may be called again with
// the same recorder, which then assumes nothing about the time in between.
func Serve(ctx, cut context.Context, l Listener, dial Dial, rec *Recorder) error {
	ctx, cancel := context.WithCancel(ctx)
	decoded := make(chan struct{})
	queue := rec.start()
	go func() { defer close(decoded); rec.decode() }()
	var copies sync.WaitGroup
	defer func() {
		cancel()
		l.Close()
		copies.Wait()
		close(queue)
		<-decoded
	}()
	defer context.AfterFunc(ctx, func() {
		// An error means that the listener is closed: Accept returns as well.
		_ = l.SetDeadline(time.Now().Add(lastAccept))
	})()
	for {
		c, err := l.Accept()
		switch {
		case err == nil:
			copies.Go(func() { rec.serve(ctx, cut, c.(Conn), dial) })
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ECONNABORTED):
			select { // the client waits in the queue until another connection has ended
			case <-time.After(10 * time.Millisecond):
			case <-ctx.Done():
			}
		default:
			return fmt.Errorf("cannot accept connections: %w", err)
		}
	}
}

// serve copies one connection.
func (r *Recorder) serve(ctx, cut context.Context, client Conn, dial Dial) {
	driver, err := dial(cut)
	if err != nil {
		client.Close()
		r.dialFailed(err)
		return
	}
	closeBoth := func() { client.Close(); driver.Close() }
	c := &connection{rec: r}
	c.copied.Store(time.Now().UnixNano())
	var both sync.WaitGroup
	both.Go(func() { c.copy(toDriver, driver, client, closeBoth) })
	both.Go(func() { c.copy(toCaller, client, driver, closeBoth) })
	stop := make(chan struct{})
	watched := make(chan struct{})
	go func() { defer close(watched); c.watch(ctx, cut, stop, closeBoth) }()
	both.Wait()
	close(stop)
	<-watched
	closeBoth()
	r.queue <- chunk{conn: c, at: r.now(), end: true} // no bytes wait for this any more
}

// watch ends the connection when cut is done, and after ctx when it is idle.
func (c *connection) watch(ctx, cut context.Context, stop <-chan struct{}, closeBoth func()) {
	select {
	case <-stop:
		return
	case <-cut.Done():
	case <-ctx.Done():
	}
	tick := time.NewTicker(idleAtEnd / 10)
	defer tick.Stop()
	for cut.Err() == nil && !c.idle() {
		select {
		case <-stop:
			return
		case <-cut.Done():
		case <-tick.C:
		}
	}
	closeBoth()
}

// direction is where bytes go.
type direction int

const (
	toDriver direction = iota
	toCaller
)

// connection is what copying a connection and decoding it share.
type connection struct {
	rec     *Recorder
	copied  atomic.Int64 // when bytes were copied last, in nanoseconds since 1970
	waiting atomic.Int64 // bytes that are not decoded yet
	calls   atomic.Int64 // that are running, as far as decoded
	lost    atomic.Bool  // bytes are missing in the queue, or cannot be decoded

	decoder *decoder // of the goroutine that decodes; nil: nothing was decoded
	closed  bool     // the same: the record of this connection has ended
}

// idle reports whether no call runs. It is false where that cannot be known.
func (c *connection) idle() bool {
	return !c.lost.Load() && c.waiting.Load() == 0 && c.calls.Load() == 0 &&
		time.Since(time.Unix(0, c.copied.Load())) >= idleAtEnd
}

// copy copies one direction to its end, and passes that end on: a half-close as a half-close,
// a reader that is gone as a reader that is gone.
func (c *connection) copy(dir direction, dst, src Conn, closeBoth func()) {
	buf := make([]byte, copyBuffer)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			// Before the bytes are passed on, so that the queue has each answer after
			// its question, whichever connections they are on.
			c.record(dir, buf[:n])
			if _, err := dst.Write(buf[:n]); err != nil {
				// Data that dst sent before it left is still copied in the other direction. An
				// error of these two means that src is gone too. Read the rest of src, so that its
				// writer does not wait for room.
				_ = src.CloseRead()
				_, _ = io.Copy(io.Discard, src)
				return
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			_ = dst.CloseWrite() // as above
			return
		case err != nil:
			closeBoth()
			return
		}
	}
}

// chunk is some bytes of a connection, or its end.
type chunk struct {
	conn *connection
	dir  direction
	at   time.Time
	data []byte
	end  bool
}

// Limits of what waits to be decoded. Above them a connection is left out of the record from
// there on.
const (
	maxChunks         = 4096
	maxWaiting        = 16 << 20 // bytes
	maxWaitingFromOne = 4 << 20  // bytes of one connection
)

// record hands a copy of the bytes to the decoder, and never waits for it.
func (c *connection) record(dir direction, data []byte) {
	c.copied.Store(time.Now().UnixNano())
	if c.lost.Load() {
		return
	}
	n := int64(len(data))
	if c.waiting.Add(n) <= maxWaitingFromOne {
		if c.rec.waiting.Add(n) <= maxWaiting {
			select {
			case c.rec.queue <- chunk{conn: c, dir: dir, at: c.rec.now(), data: bytes.Clone(data)}:
				return
			default:
			}
		}
		c.rec.waiting.Add(-n)
	}
	c.lost.Store(true)
	c.rec.losses.Add(1)
}
