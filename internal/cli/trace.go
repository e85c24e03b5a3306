package cli

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"csi-registrar/internal/control"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/trace"
	"csi-registrar/internal/unixsock"
)

const (
	// traceDial limits connecting to the driver, as the kubelet does (kubelet v1.36: 10 s).
	traceDial = 10 * time.Second
	// traceCut is how long calls that run at the end are copied: no caller waits longer for
	// one than the kubelet (2 min), unless it waits for ever.
	traceCut = 2*time.Minute + 5*time.Second
	// traceNotice is after how much of that a person is told; idle connections take a second.
	traceNotice = 2 * time.Second
)

type traceOptions struct {
	listen, connect, method, output string
	duration                        time.Duration
	json                            bool
	show                            []string
}

func setupTrace(fs *flag.FlagSet) runner {
	var o traceOptions
	fs.StringVar(&o.listen, "listen", "", "accept calls at `PATH|tcp:HOST:PORT`, a new Unix socket or a loopback address")
	fs.StringVar(&o.connect, "connect", "", "pass them on to `PATH|tcp:HOST:PORT`, where the driver listens")
	fs.DurationVar(&o.duration, "duration", 0, "end after the time `D`, such as 10m; 0: when interrupted")
	fs.BoolVar(&o.json, "json", false, "print one line of JSON a call")
	fs.StringVar(&o.output, "output", "", "write those lines to the new `FILE` as well")
	fs.StringVar(&o.method, "method", "", "only calls whose name matches `GLOB`, such as 'Node*Volume'")
	fs.Func("show", "show the values of `KEY` too, in maps, mount flags and hidden fields; error: error texts. May be repeated", func(key string) error {
		o.show = append(o.show, key)
		return nil
	})
	root := rootFlag(fs)
	return func(ctx context.Context, e *env, args []string) error {
		if err := o.check(args); err != nil {
			return err
		}
		if len(args) == 1 {
			l := newLease(control.NewClient(control.Path(*root)), args[0], func(text string) { fmt.Fprintln(e.stderr, text) })
			return runTrace(ctx, e, o, traced{listener: l, dial: l.dial, hold: l.run})
		}
		t, err := between(ctx, o.listen, o.connect)
		if err != nil {
			return err
		}
		return runTrace(ctx, e, o, t)
	}
}

// traced is where calls come from and go to.
type traced struct {
	listener trace.Listener
	dial     trace.Dial
	// hold returns when ctx is done and no more calls come, or when none can come.
	hold func(ctx context.Context) error
	// ready: calls can come, so the head of the table is written at once; else with the first call.
	ready bool
}

// runTrace copies calls and shows them until ctx is done.
func runTrace(ctx context.Context, e *env, o traceOptions, t traced) (err error) {
	rec := trace.NewRecorder(trace.Options{Method: o.method, Show: o.show})
	out := traceWriter{rec: rec, e: e, json: o.json, ready: t.ready, table: trace.NewTable(e.page().columns)}
	if o.output != "" {
		f, err := os.OpenFile(o.output, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			ended, cancel := context.WithCancel(ctx)
			cancel()
			return errors.Join(fmt.Errorf("cannot write the record: %w", err), t.listener.Close(), t.hold(ended))
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		out.file = f
	}
	if o.duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.duration)
		defer cancel()
	}
	ctx, cancel := context.WithCancel(ctx)
	cut, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	serving, end := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	go func() {
		err := t.hold(ctx)
		end()
		waitForCut(cut, e)
		stop()
		ended <- err
	}()
	served := make(chan error, 1)
	go func() {
		served <- trace.Serve(serving, cut, t.listener, t.dial, rec)
		cancel() // it may have failed
		rec.Close()
	}()
	writeErr := out.write()
	cancel() // for a writer that failed: its reader may be gone
	for range rec.Calls() {
	}
	serveErr := <-served
	stop()
	if err := errors.Join(serveErr, <-ended, writeErr); err != nil {
		return err
	}
	return out.summary()
}

// waitForCut waits until the calls that still run may be cut off: after a time, at another
// signal, or because cut is done, when there are none.
func waitForCut(cut context.Context, e *env) {
	limited, cancel := context.WithTimeout(cut, traceCut)
	defer cancel()
	again, done := signal.NotifyContext(limited, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	defer done()
	select {
	case <-again.Done():
	case <-time.After(traceNotice):
		fmt.Fprintln(e.stderr, "waiting for calls that are still running; another signal cuts them off")
	}
	<-again.Done()
	if limited.Err() == nil {
		signal.Reset(syscall.SIGINT, syscall.SIGTERM) // a third one ends it even if its output is blocked
	}
}

// check validates the options.
func (o traceOptions) check(args []string) error {
	switch {
	case len(args) > 1:
		return usagef(nil, "one driver at a time")
	case len(args) == 1 && o.listen+o.connect != "":
		return usagef(nil, "a driver's name, or --listen and --connect, not both")
	case len(args) == 0 && (o.listen == "" || o.connect == ""):
		return usagef(nil, "a driver's name is needed, or --listen and --connect")
	}
	if _, err := path.Match(o.method, ""); err != nil {
		return usagef(nil, "--method %q is not a pattern", o.method)
	}
	if o.duration < 0 {
		return usagef(nil, "--duration %s is negative", o.duration)
	}
	if slices.Contains(o.show, "") {
		return usagef(nil, "--show needs a key")
	}
	return nil
}

// between copies from one address to another.
func between(ctx context.Context, listen, connect string) (traced, error) {
	for _, flag := range []struct{ name, address string }{{"listen", listen}, {"connect", connect}} {
		if _, _, err := parseAddress(flag.address); err != nil {
			return traced{}, usagef(nil, "--%s %q: %w", flag.name, flag.address, err)
		}
	}
	network, address, err := parseAddress(connect)
	if err != nil {
		return traced{}, err
	}
	l, remove, err := listenAt(ctx, listen)
	return traced{
		listener: l,
		ready:    true,
		dial:     func(ctx context.Context) (trace.Conn, error) { return dialDriver(ctx, network, address) },
		hold: func(ctx context.Context) error {
			<-ctx.Done()
			return remove() // nobody connects any more
		},
	}, err
}

func dialDriver(ctx context.Context, network, address string) (trace.Conn, error) {
	d := net.Dialer{Timeout: traceDial}
	c, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return c.(trace.Conn), nil
}

// parseAddress reads PATH, unix:PATH or tcp:ADDRESS:PORT. TCP has no owner and no mode: it
// is for this machine alone.
func parseAddress(s string) (network, address string, err error) {
	address, isTCP := strings.CutPrefix(s, "tcp:")
	if !isTCP {
		address = strings.TrimPrefix(strings.TrimPrefix(s, "unix://"), "unix:")
		if !strings.HasPrefix(address, "/") && !strings.HasPrefix(address, ".") {
			return "", "", errors.New("neither a path that begins with / or ., nor tcp:127.0.0.1:PORT")
		}
		return "unix", address, unixsock.CheckPath(address)
	}
	if ap, err := netip.ParseAddrPort(address); err != nil || !ap.Addr().IsLoopback() {
		return "", "", errors.New("TCP needs a loopback address and a port, as tcp:127.0.0.1:PORT")
	}
	return "tcp", address, nil
}

// listenAt listens. Remove removes the socket's file.
func listenAt(ctx context.Context, s string) (l trace.Listener, remove func() error, err error) {
	network, address, err := parseAddress(s)
	if err != nil {
		return nil, nil, err
	}
	if network == "tcp" {
		var lc net.ListenConfig
		tcp, err := lc.Listen(ctx, network, address)
		if err != nil {
			return nil, nil, fmt.Errorf("cannot listen: %w", err)
		}
		return tcp.(*net.TCPListener), func() error { return nil }, nil
	}
	unix, file, err := unixsock.Listen(ctx, address)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, nil, hinted(fmt.Errorf("cannot listen: %s is there already", safetext.Word(address)),
			"another path; or, if nobody listens there, "+safetext.Run("rm", address).String())
	}
	if err != nil {
		return nil, nil, fmt.Errorf("cannot listen: %w", err)
	}
	return unix, func() error {
		_, err := unixsock.Remove(address, file.FileID)
		return err
	}, nil
}

// traceWriter writes the record.
type traceWriter struct {
	rec   *trace.Recorder
	e     *env
	json  bool
	ready bool // traced.ready
	table trace.Table
	file  io.Writer // nil: none
}

// write writes all calls, until the recorder is closed.
func (w traceWriter) write() error {
	head := w.table.Header() + "\n"
	if w.json {
		head = ""
	}
	if w.ready {
		if _, err := io.WriteString(w.e.stdout, head); err != nil {
			return err
		}
		head = ""
	}
	for c := range w.rec.Calls() {
		if _, err := io.WriteString(w.e.stdout, head); err != nil {
			return err
		}
		head = ""
		if err := w.call(c); err != nil {
			return err
		}
	}
	return nil
}

func (w traceWriter) call(c trace.Call) error {
	c.Time = c.Time.In(w.e.now().Location())
	if c.End != trace.Running {
		if w.file != nil {
			if err := writeLine(w.file, c); err != nil {
				return err
			}
		}
		if w.json {
			return writeLine(w.e.stdout, c)
		}
	}
	if w.json {
		return nil
	}
	var b strings.Builder
	b.WriteString(w.table.Row(c) + "\n")
	for _, text := range trace.Details(c) {
		for _, line := range wrap(text, w.e.page().columns-4) {
			b.WriteString("    " + line + "\n")
		}
	}
	_, err := io.WriteString(w.e.stdout, b.String())
	return err
}

func writeLine(w io.Writer, c trace.Call) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode(c)
}

// summary ends the table. With --json standard output has the calls only.
func (w traceWriter) summary() error {
	if w.json {
		return w.rec.WriteSummary(w.e.stderr)
	}
	if _, err := fmt.Fprintln(w.e.stdout); err != nil {
		return err
	}
	return w.rec.WriteSummary(w.e.stdout)
}
