package cli

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/tool/trace"
)

const (
	// traceDial limits connecting to the driver, as the kubelet does (kubelet v1.36: 10 s).
	traceDial = 10 * time.Second
	// traceCut limits calls that are pending at the end: the kubelet waits longest, 2 min for one.
	traceCut = 2*time.Minute + 5*time.Second
	// traceNotice is longer than idle connections take to end.
	traceNotice = 2 * time.Second
)

type traceOptions struct {
	listen, connect, output string
	json                    bool
	show                    []string
}

func setupTrace(fs *flag.FlagSet) runner {
	var o traceOptions
	fs.StringVar(&o.listen, "listen", "", "accept calls at `PATH|tcp:HOST:PORT`, a new Unix socket or a loopback address")
	fs.StringVar(&o.connect, "connect", "", "forward them to `PATH|tcp:HOST:PORT`, where the driver listens")
	fs.BoolVar(&o.json, "json", false, "print one line of JSON per call")
	fs.StringVar(&o.output, "output", "", "also write these lines to the new `FILE`")
	fs.Func("show", "also show the values of `KEY` in maps, mount flags and hidden fields, or error texts if KEY is error; may be repeated", func(key string) error {
		o.show = append(o.show, key)
		return nil
	})
	return func(ctx context.Context, e *env, _ []string) error {
		if o.listen == "" || o.connect == "" {
			return usagef("--listen and --connect are required")
		}
		if slices.Contains(o.show, "") {
			return usagef("--show needs a key")
		}
		signal.Ignore(syscall.SIGPIPE) // without a reader, writing fails, and the trace ends
		if !signal.Ignored(syscall.SIGHUP) {
			var stop context.CancelFunc
			ctx, stop = signal.NotifyContext(ctx, syscall.SIGHUP) // the terminal is gone
			defer stop()
		}
		source, sourceErr := parseAddress("listen", o.listen)
		target, err := parseAddress("connect", o.connect)
		if err := cmp.Or(sourceErr, err); err != nil {
			return err
		}
		l, err := listenAt(ctx, source)
		if err != nil {
			return err
		}
		return runTrace(ctx, e, o, l, func(ctx context.Context) (trace.Conn, error) {
			d := net.Dialer{Timeout: traceDial}
			c, err := d.DialContext(ctx, target.Network(), target.String())
			if err != nil {
				return nil, err
			}
			return c.(trace.Conn), nil
		})
	}
}

// runTrace copies calls and shows them until ctx is done. It goes on if their record cannot be
// written: the kubelet has no other way to the driver.
func runTrace(ctx context.Context, e *env, o traceOptions, l trace.Listener, dial trace.Dial) (err error) {
	rec := trace.NewRecorder(o.show)
	out := traceWriter{rec: rec, e: e, json: o.json, table: trace.NewTable(e.page().columns)}
	if o.output != "" {
		f, openErr := os.OpenFile(o.output, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if openErr != nil {
			return errors.Join(fmt.Errorf("cannot write the record: %w", openErr), l.Close())
		}
		defer func() { err = errors.Join(err, out.recordErr, f.Close()) }()
		out.record = f
	}
	ctx, cancel := context.WithCancel(ctx)
	cut, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		<-ctx.Done()
		waitForCut(cut, e)
		stop()
	}()
	served := make(chan error, 1)
	go func() {
		served <- trace.Serve(ctx, cut, l, dial, rec)
		cancel() // Serve may have failed
		rec.Close()
	}()
	writeErr := out.write()
	cancel() // the writer may have failed because its reader is gone
	for range rec.Calls() {
	}
	serveErr := <-served
	stop()
	<-ended
	if err := errors.Join(serveErr, writeErr); err != nil {
		return err
	}
	return out.summary()
}

// waitForCut returns when pending calls may be cut off: after traceCut, at another signal, or when
// cut is done because there are none.
func waitForCut(cut context.Context, e *env) {
	limited, cancel := context.WithTimeout(cut, traceCut)
	defer cancel()
	again, done := signal.NotifyContext(limited, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	defer done()
	select {
	case <-again.Done():
	case <-time.After(traceNotice):
		fmt.Fprintln(e.stderr, "waiting for pending calls; another signal cuts them off")
	}
	<-again.Done()
	if limited.Err() == nil {
		// A third signal ends the process even if its output is blocked.
		signal.Reset(syscall.SIGINT, syscall.SIGTERM)
	}
}

// parseAddress parses the value of a flag: PATH, unix:PATH or tcp:ADDRESS:PORT. A TCP socket has no
// owner and no mode, so only loopback addresses are allowed.
func parseAddress(flag, s string) (net.Addr, error) {
	fail := func(err error) (net.Addr, error) { return nil, usagef("--%s %q: %w", flag, s, err) }
	if address, isTCP := strings.CutPrefix(s, "tcp:"); isTCP {
		ap, err := netip.ParseAddrPort(address)
		if err != nil || !ap.Addr().IsLoopback() {
			return fail(errors.New("TCP needs a loopback address and a port, such as tcp:127.0.0.1:PORT"))
		}
		return net.TCPAddrFromAddrPort(ap), nil
	}
	path := strings.TrimPrefix(strings.TrimPrefix(s, "unix://"), "unix:")
	if !strings.HasPrefix(path, "/") && !strings.HasPrefix(path, ".") {
		return fail(errors.New("must be a path that begins with / or ., or tcp:127.0.0.1:PORT"))
	}
	if err := unixsock.CheckPath(path); err != nil {
		return fail(err)
	}
	return &net.UnixAddr{Net: "unix", Name: path}, nil
}

// listenAt listens at an address. Close removes the file of a socket.
func listenAt(ctx context.Context, a net.Addr) (trace.Listener, error) {
	address := a.String()
	if a.Network() == "tcp" {
		var lc net.ListenConfig
		tcp, err := lc.Listen(ctx, "tcp", address)
		if err != nil {
			return nil, fmt.Errorf("cannot listen: %w", err)
		}
		return tcp.(*net.TCPListener), nil
	}
	unix, _, err := unixsock.Listen(ctx, address, nil)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, hinted(fmt.Errorf("cannot listen: %s already exists", safetext.Word(address)),
			"use another path; or, if no process listens there, "+safetext.Run("rm", address).String())
	}
	if err != nil {
		return nil, fmt.Errorf("cannot listen: %w", err)
	}
	unix.SetUnlinkOnClose(true)
	return unix, nil
}

// traceWriter prints the calls.
type traceWriter struct {
	rec   *trace.Recorder
	e     *env
	json  bool // standard output has lines, no table
	table trace.Table

	record    io.Writer // of lines of JSON; nil: none, or it could not be written
	recordErr error
}

// write writes all calls, until the recorder is closed.
func (w *traceWriter) write() error {
	if !w.json {
		if _, err := io.WriteString(w.e.stdout, w.table.Header()+"\n"); err != nil {
			return err
		}
	}
	for c := range w.rec.Calls() {
		if err := w.call(c); err != nil {
			return err
		}
	}
	return nil
}

func (w *traceWriter) call(c trace.Call) error {
	c.Time = c.Time.In(w.e.now().Location())
	if c.End != trace.Running && w.record != nil {
		if _, err := w.record.Write(control.Marshal(c)); err != nil {
			w.record, w.recordErr = nil, fmt.Errorf("cannot write the record: %w", err)
			fmt.Fprintf(w.e.stderr, "warning: %v; calls are still forwarded\n", w.recordErr)
		}
	}
	switch {
	case w.json && c.End == trace.Running:
		return nil
	case w.json:
		_, err := w.e.stdout.Write(control.Marshal(c))
		return err
	}
	var b strings.Builder
	b.WriteString(w.table.Row(c) + "\n")
	for _, line := range wrap(c.Error, w.e.page().columns-4) {
		b.WriteString("    " + line + "\n")
	}
	_, err := io.WriteString(w.e.stdout, b.String())
	return err
}

// summary prints the summary: with --json on standard error, so that standard output has only
// calls.
func (w *traceWriter) summary() error {
	to, text := w.e.stdout, "\n"+w.rec.Summary()
	if w.json {
		to, text = w.e.stderr, w.rec.Summary()
	}
	_, err := io.WriteString(to, text)
	return err
}
