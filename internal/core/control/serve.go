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

	"csi-registrar/internal/node/status"
)

// Limits of both servers. A request is one line without a body, and responses come from memory: a
// client that takes longer is stuck or hostile.
const (
	// connections of the control socket, for a `wait` for each driver of a large node; more wait
	maxConns      = 1280
	maxPublic     = 256 // connections of the public port
	maxHeader     = 16 << 10
	headerTimeout = 5 * time.Second
	// for the whole request, until its answer is read; streams extend it
	callTimeout   = 30 * time.Second
	publicTimeout = 5 * time.Second // the same on the public port; probes and profiles extend it
	idleTimeout   = 30 * time.Second
	endTimeout    = time.Second // for requests that do not end when the daemon does

	// publicBuffer limits the bytes of an unread response in the kernel. The default is megabytes
	// for each connection, which count as the daemon's memory.
	publicBuffer = 32 << 10
)

// Serve serves the control socket with Handler until ctx is done. Then it closes the listener;
// streams and all requests that watch their context end at once, the others have a second. It
// serves only root and the daemon's own user: the mode of a socket from the service manager depends
// on the unit.
func Serve(ctx context.Context, ln net.Listener, b Backend, log *slog.Logger) error {
	srv := newServer(ctx, Handler(b), log)
	return serve(ctx, srv, netutil.LimitListener(rootListener{ln, log}, maxConns))
}

// ServePublic serves h until ctx is done, on TCP or on a Unix socket that others may connect to.
func ServePublic(ctx context.Context, ln net.Listener, h http.Handler, log *slog.Logger) error {
	srv := newServer(ctx, localHostOnly(ln.Addr(), h), log)
	srv.ConnState = closeOldest(maxPublic)
	srv.ReadTimeout, srv.WriteTimeout = publicTimeout, publicTimeout
	srv.SetKeepAlivesEnabled(false) // idle connections would count against the limit
	return serve(ctx, srv, publicListener{ln})
}

// publicListener accepts connections with a small buffer in the kernel.
type publicListener struct{ net.Listener }

func (l publicListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if buffered, ok := c.(interface{ SetWriteBuffer(bytes int) error }); ok && err == nil {
		_ = buffered.SetWriteBuffer(publicBuffer) // fails only when the client has gone
	}
	return c, err
}

// closeOldest returns a hook for http.Server.ConnState that closes the oldest connection for each
// new one above the limit. Every user of the node can connect: if new connections waited, or were
// refused, a few idle ones would lock out the monitoring. A response takes well below a
// millisecond, so a client that sends its request at once is served before its connection is the
// oldest. The goroutine that accepts calls the hook, and yields, so that accepted connections are
// served before it accepts more. Without that, 4 of 40 requests failed beside 1,000 clients that
// reconnect immediately; with it, none.
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
		// Errors of clients are not errors of the daemon.
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
		// Usually a client has connected and sends nothing.
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

// maxAge limits the age of a snapshot.
const maxAge = time.Second

// snapshot is a rendering of the status, which all requests share until the status changes, and for
// at most maxAge: what depends on the time changes without it.
type snapshot[T any] struct {
	render func(status.Document) T

	mu       sync.Mutex
	at       time.Time
	changed  <-chan struct{} // closed when the status has changed; nil: nothing is rendered
	rendered T
}

// get returns the rendering, and a channel that is closed when the status changes.
func (s *snapshot[T]) get(b Backend) (rendered T, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed != nil && time.Since(s.at) < maxAge {
		select {
		case <-s.changed:
		default:
			return s.rendered, s.changed
		}
	}
	changed = b.Changed() // before Status, so that no change is missed
	s.rendered = s.render(b.Status())
	s.at, s.changed = time.Now(), changed // not before: render may panic
	return s.rendered, s.changed
}
