package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

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
		if err := o.check(); err != nil {
			return err
		}
		l, dial, err := between(ctx, o.listen, o.connect)
		if err != nil {
			return err
		}
		return runTrace(ctx, e, o, l, dial)
	}
}

// runTrace copies calls and shows them until ctx is done.
func runTrace(ctx context.Context, e *env, o traceOptions, l trace.Listener, dial trace.Dial) (err error) {
	rec := trace.NewRecorder(o.show)
	out := traceWriter{rec: rec, e: e, json: o.json, table: trace.NewTable(e.page().columns)}
	if o.output != "" {
		f, err := os.OpenFile(o.output, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return errors.Join(fmt.Errorf("cannot write the record: %w", err), l.Close())
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		out.file = f
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

// check validates the options.
func (o traceOptions) check() error {
	if o.listen == "" || o.connect == "" {
		return usagef("--listen and --connect are required")
	}
	if slices.Contains(o.show, "") {
		return usagef("--show needs a key")
	}
	return nil
}
