package trace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"csi-registrar/internal/sys/rate"
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
// Bytes wait for their decoding, which takes microseconds, and never for a reader of the record.
// The driver sees one difference: the process that connects (SO_PEERCRED) is this one.
//
// Serve closes the listener as soon as it accepts no more connections.
func Serve(ctx, cut context.Context, l Listener, dial Dial, rec *Recorder) error {
	ctx, cancel := context.WithCancel(ctx)
	copying, ended := context.WithCancel(context.WithoutCancel(ctx))
	var copies, shows sync.WaitGroup
	shows.Go(func() {
		for rate.Pause(copying, time.Second) {
			rec.showRunning(time.Now())
		}
	})
	defer func() {
		cancel()
		l.Close()
		copies.Wait()
		ended()
		shows.Wait()
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
			// The client waits in the queue until another connection has ended.
			rate.Pause(ctx, 10*time.Millisecond)
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
	c := newConnection(r)
	running, stop := context.WithCancel(cut)
	closeBoth := func() { client.Close(); driver.Close() }
	var both, watch sync.WaitGroup
	watch.Go(func() { c.watch(ctx, running, closeBoth) })
	both.Go(func() { c.copy(toDriver, driver, client, closeBoth) })
	both.Go(func() { c.copy(toCaller, client, driver, closeBoth) })
	both.Wait()
	stop()
	watch.Wait()
	r.end(c)
}

// watch closes the connection when running is done, or, after ctx, when it is idle.
func (c *connection) watch(ctx, running context.Context, closeBoth func()) {
	select {
	case <-running.Done():
	case <-ctx.Done():
	}
	for !c.idle() && rate.Pause(running, idleAtEnd/10) {
	}
	closeBoth()
}

// direction is where bytes go.
type direction int

const (
	toDriver direction = iota
	toCaller
)

// connection is what copying a connection and decoding it share. Its fields belong to the record,
// under whose lock they are.
type connection struct {
	rec     *Recorder
	copied  time.Time // when bytes were copied last
	decoder *decoder  // nil: it could not be decoded, and is left out from there on
}

func newConnection(r *Recorder) *connection {
	return &connection{rec: r, copied: time.Now(), decoder: newDecoder(r)}
}

// idle reports whether no call runs. It is false where that cannot be known.
func (c *connection) idle() bool {
	c.rec.mu.Lock()
	defer c.rec.mu.Unlock()
	return c.decoder != nil && len(c.decoder.calls) == 0 && time.Since(c.copied) >= idleAtEnd
}

// copy copies one direction to its end, and passes that end on: a half-close as a half-close,
// a reader that is gone as a reader that is gone.
func (c *connection) copy(dir direction, dst, src Conn, closeBoth func()) {
	buf := make([]byte, copyBuffer)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			// Before the bytes are passed on, so that the record has each answer after its
			// question, whichever connections they are on.
			c.rec.take(c, dir, buf[:n])
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
