package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"golang.org/x/net/netutil"
)

// The limits of both sockets. A request is a line and has no body, an answer is made from
// memory; whoever takes longer is stuck or means harm.
const (
	maxConns      = 64 // more wait to be accepted
	maxHeader     = 16 << 10
	headerTimeout = 5 * time.Second
	callTimeout   = 30 * time.Second // the whole request, its answer read included; streams lift it
	idleTimeout   = 30 * time.Second
	endTimeout    = time.Second // for calls that do not end when the daemon does
)

// Serve serves the control socket with Handler until ctx is done, then ends cleanly: the
// listener is closed, streams and whatever else heeds its context are over at once, and
// the rest is waited for, for a second. Only root and the daemon's
// own user are listened to: the socket's mode says the same, but a socket that was handed
// over has the mode that somebody wrote into a unit.
func Serve(ctx context.Context, ln net.Listener, b Backend, log *slog.Logger) error {
	return serve(ctx, guarded{ln, log}, Handler(b), log)
}

// ServePublic serves PublicHandler until ctx is done, on TCP or on a Unix socket that
// others may connect to.
func ServePublic(ctx context.Context, ln net.Listener, b Backend, log *slog.Logger) error {
	return serve(ctx, ln, PublicHandler(b), log)
}

func serve(ctx context.Context, ln net.Listener, h http.Handler, log *slog.Logger) error {
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       callTimeout,
		WriteTimeout:      callTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug), // what strangers do wrong is no news
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	ended := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
		defer cancel()
		err := srv.Shutdown(end)
		if errors.Is(err, context.DeadlineExceeded) { // a client that connected and says nothing, most likely
			err = srv.Close()
		}
		ended <- err
	})
	err := srv.Serve(netutil.LimitListener(ln, maxConns))
	if !stop() { // ctx is done: that is why it returned
		if err := <-ended; err != nil {
			return fmt.Errorf("cannot end the calls on %s: %w", ln.Addr(), err)
		}
		return nil
	}
	return fmt.Errorf("cannot serve %s: %w", ln.Addr(), errors.Join(err, srv.Close()))
}
