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
	return func(ctx context.Context, e *env, _ []string) error { return runTrace(ctx, e, o) }
}

// runTrace copies calls from one address to another, and shows them, until ctx is done.
func runTrace(ctx context.Context, e *env, o traceOptions) (err error) {
	dial, err := o.check()
	if err != nil {
		return err
	}
	l, remove, err := listenAt(ctx, o.listen)
	if err != nil {
		return err
	}
	rec := trace.NewRecorder(trace.Options{Method: o.method, Show: o.show})
	out := traceWriter{rec: rec, e: e, json: o.json, table: trace.NewTable(e.page().columns)}
	if o.output != "" {
		f, err := os.OpenFile(o.output, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return errors.Join(fmt.Errorf("cannot write the record: %w", err), l.Close(), remove())
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
	ended := make(chan error, 1)
	go func() {
		<-ctx.Done()
		err := remove() // nobody connects any more
		waitForCut(cut, e)
		stop()
		ended <- err
	}()
	served := make(chan error, 1)
	go func() {
		served <- trace.Serve(ctx, cut, l, dial, rec)
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
func (o traceOptions) check() (trace.Dial, error) {
	if o.listen == "" || o.connect == "" {
		return nil, usagef(nil, "--listen and --connect are both needed")
	}
	if _, err := path.Match(o.method, ""); err != nil {
		return nil, usagef(nil, "--method %q is not a pattern", o.method)
	}
	if o.duration < 0 {
		return nil, usagef(nil, "--duration %s is negative", o.duration)
	}
	if slices.Contains(o.show, "") {
		return nil, usagef(nil, "--show needs a key")
	}
	for _, flag := range []struct{ name, address string }{{"listen", o.listen}, {"connect", o.connect}} {
		if _, _, err := parseAddress(flag.address); err != nil {
			return nil, usagef(nil, "--%s %q: %w", flag.name, flag.address, err)
		}
	}
	network, address, err := parseAddress(o.connect)
	return func(ctx context.Context) (trace.Conn, error) {
		d := net.Dialer{Timeout: traceDial}
		c, err := d.DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return c.(trace.Conn), nil
	}, err
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
	table trace.Table
	file  io.Writer // nil: none
}

// write writes all calls, until the recorder is closed.
func (w traceWriter) write() error {
	if !w.json {
		if _, err := fmt.Fprintln(w.e.stdout, w.table.Header()); err != nil {
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
