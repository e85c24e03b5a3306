package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/net/netutil"
)

// The limits of both servers. A request is a line and has no body, an answer is made from
// memory; whoever takes longer is stuck or hostile.
const (
	// connections of the control socket beside streams and traces …
	maxShort      = 256
	maxConns      = maxStreams + maxTraces + maxShort // … and in all; more wait to be accepted
	maxPublic     = 256                               // connections of the public port
	maxHeader     = 16 << 10
	headerTimeout = 5 * time.Second
	// the whole request, its answer read included; streams extend it
	callTimeout   = 30 * time.Second
	publicTimeout = 5 * time.Second // the same on the public port; probes and profiles extend it
	idleTimeout   = 30 * time.Second
	endTimeout    = time.Second // for calls that do not end when the daemon does

	// publicBuffer is what the kernel holds of an answer that is not read, in bytes. By default
	// that would be megabytes for each connection, which count as the daemon's memory.
	publicBuffer = 32 << 10
)

// Serve serves the control socket with Handler until ctx is done, then ends cleanly: the
// listener is closed, streams and all that watches its context end at once, the rest has a
// second. Only root and the daemon's own user are served: the socket's mode says the same,
// but a socket that was handed over has the mode that somebody wrote into a unit.
func Serve(ctx context.Context, ln net.Listener, b Backend, log *slog.Logger) error {
	srv := newServer(ctx, Handler(b), log)
	return serve(ctx, srv, netutil.LimitListener(rootListener{ln, log}, maxConns))
}

// ServePublic serves h until ctx is done, on TCP or on a Unix socket that others may connect to.
func ServePublic(ctx context.Context, ln net.Listener, h http.Handler, log *slog.Logger) error {
	srv := newServer(ctx, localHostOnly(ln.Addr(), h), log)
	srv.ConnState = closeOldest(maxPublic)
	srv.ReadTimeout, srv.WriteTimeout = publicTimeout, publicTimeout
	srv.SetKeepAlivesEnabled(false) // a connection without a request would only be in the way
	return serve(ctx, srv, publicListener{ln})
}

// publicListener accepts connections that hold little in the kernel.
type publicListener struct{ net.Listener }

func (l publicListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if buffered, ok := c.(interface{ SetWriteBuffer(bytes int) error }); ok && err == nil {
		_ = buffered.SetWriteBuffer(publicBuffer) // fails only when the client has gone
	}
	return c, err
}

// closeOldest returns a hook for http.Server.ConnState that closes the oldest connection for
// each new one above the limit. Every user of the node can connect: if the new ones waited,
// or were refused, a few idle connections would keep monitoring out. An answer takes well
// below a millisecond, so a client that sends its request at once is served before its
// connection is the oldest. The goroutine that accepts calls the hook; it yields so that
// accepted connections are served before it accepts more. Without that, 4 of 40 requests
// failed beside 1,000 clients that reconnect at once, with it none.
func closeOldest(limit int) func(net.Conn, http.ConnState) {
	var mu sync.Mutex
	var open []net.Conn // oldest first
	return func(c net.Conn, state http.ConnState) {
		var oldest net.Conn
		mu.Lock()
		switch state {
		case http.StateNew:
			if open = append(open, c); len(open) > limit {
				oldest, open = open[0], open[1:]
			}
		case http.StateClosed, http.StateHijacked:
			open = slices.DeleteFunc(open, func(o net.Conn) bool { return o == c })
		}
		mu.Unlock()
		if oldest != nil {
			_ = oldest.Close() // its goroutine fails to read or write, and ends
			runtime.Gosched()
		}
	}
}

func newServer(ctx context.Context, h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       callTimeout,
		WriteTimeout:      callTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		// a client's errors are not the daemon's
		ErrorLog:    slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
}

func serve(ctx context.Context, srv *http.Server, ln net.Listener) error {
	ended := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
		defer cancel()
		err := srv.Shutdown(end)
		// most likely a client that connected and sends nothing
		if errors.Is(err, context.DeadlineExceeded) {
			err = srv.Close()
		}
		ended <- err
	})
	err := srv.Serve(ln)
	if !stop() { // ctx is done: that is why it returned
		if err := <-ended; err != nil {
			return fmt.Errorf("cannot end the calls on %s: %w", ln.Addr(), err)
		}
		return nil
	}
	return fmt.Errorf("cannot serve %s: %w", ln.Addr(), errors.Join(err, srv.Close()))
}
