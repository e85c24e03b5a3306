package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path"
	"slices"
	"syscall"
	"time"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/tool/trace"
)

const (
	// traceDial limits connecting to the driver, as the kubelet does (kubelet v1.36: 10 s).
	traceDial = 10 * time.Second
	// traceCut limits the time for calls that are pending at the end. The kubelet waits 2 min for a
	// call, longer than any other caller with a time limit.
	traceCut = 2*time.Minute + 5*time.Second
	// traceNotice is the time until the user is told about pending calls. Idle connections end
	// within a second.
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
	fs.StringVar(&o.connect, "connect", "", "forward them to `PATH|tcp:HOST:PORT`, where the driver listens")
	fs.DurationVar(&o.duration, "duration", 0, "end after `D`, such as 10m; 0 runs until interrupted")
	fs.BoolVar(&o.json, "json", false, "print one line of JSON per call")
	fs.StringVar(&o.output, "output", "", "also write these lines to the new `FILE`")
	fs.StringVar(&o.method, "method", "", "only calls whose name matches `GLOB`, such as 'Node*Volume'")
	fs.Func("show", "also show the values of `KEY` in maps, mount flags and hidden fields, or error texts if KEY is error; may be repeated", func(key string) error {
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
			return runTrace(ctx, e, o, callPath{listener: l, dial: l.dial, hold: l.run})
		}
		p, err := between(ctx, o.listen, o.connect)
		if err != nil {
			return err
		}
		return runTrace(ctx, e, o, p)
	}
}

// callPath is where calls come from and where they go.
type callPath struct {
	listener trace.Listener
	dial     trace.Dial
	// hold returns when no more calls can arrive: after ctx is done, or after an error. It reports
	// to rec for how long calls did not arrive.
	hold func(ctx context.Context, rec *trace.Recorder) error
	// ready means that calls can arrive from the start, so the table's header is printed at once,
	// not with the first call.
	ready bool
}

// runTrace copies calls and shows them until ctx is done.
func runTrace(ctx context.Context, e *env, o traceOptions, p callPath) (err error) {
	rec := trace.NewRecorder(trace.Options{Method: o.method, Show: o.show})
	out := traceWriter{rec: rec, e: e, json: o.json, ready: p.ready, table: trace.NewTable(e.page().columns)}
	if o.output != "" {
		f, err := os.OpenFile(o.output, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			ended, cancel := context.WithCancel(ctx)
			cancel()
			return errors.Join(fmt.Errorf("cannot write the record: %w", err), p.listener.Close(), p.hold(ended, rec))
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		out.file = f
	}
	ctx, release := withTimeout(ctx, o.duration)
	defer release()
	ctx, cancel := context.WithCancel(ctx)
	cut, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	serving, end := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	go func() {
		err := p.hold(ctx, rec)
		end()
		waitForCut(cut, e)
		stop()
		ended <- err
	}()
	served := make(chan error, 1)
	go func() {
		served <- trace.Serve(serving, cut, p.listener, p.dial, rec)
		cancel() // Serve may have failed
		rec.Close()
	}()
	writeErr := out.write()
	cancel() // the writer may have failed because its reader is gone
	for range rec.Calls() {
	}
	serveErr := <-served
	stop()
	if err := errors.Join(serveErr, <-ended, writeErr); err != nil {
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

// check validates the options.
func (o traceOptions) check(args []string) error {
	switch {
	case len(args) > 1:
		return usagef("name one driver at most")
	case len(args) == 1 && o.listen+o.connect != "":
		return usagef("a driver's name cannot be combined with --listen and --connect")
	case len(args) == 0 && (o.listen == "" || o.connect == ""):
		return usagef("name a driver, or use --listen and --connect")
	}
	if _, err := path.Match(o.method, ""); err != nil {
		return usagef("--method %q is not a valid pattern", o.method)
	}
	if o.duration < 0 {
		return usagef("--duration %s is negative", o.duration)
	}
	if slices.Contains(o.show, "") {
		return usagef("--show needs a key")
	}
	return nil
}
