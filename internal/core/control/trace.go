package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"sync"
	"syscall"
	"time"
)

// A recorder keeps its request open: the connection is its lease on the driver's endpoint link. It
// sends a byte each leaseBeat. When the connection ends, or no byte came for leaseSilence, the
// daemon points the link back at the driver. The sum of both is at most 2 s.
const (
	leaseBeat    = 500 * time.Millisecond
	leaseSilence = 1500 * time.Millisecond
)

// Recorder is a request to receive the calls to a driver.
type Recorder struct {
	Driver  string
	Process string // of the recorder, for the journal: "process 12 (uid 0)"
	// Listen is called with the path that the daemon chose. If it returns nil, the recorder
	// listens there.
	Listen func(ctx context.Context, path string) error
	// Linked is called when the endpoint link points at the recorder.
	Linked func()
	// Held is called every leaseBeat, by another goroutine, while the daemon cannot have revoked
	// the lease.
	Held func()
}

// traceStep is a line of the answer to a recorder: first the path, then Linked or an error.
type traceStep struct {
	Socket string `json:"socket,omitempty"`
	Linked bool   `json:"linked,omitempty"`
	Error  string `json:"error,omitempty"`
}

// trace serves a recorder while its request is open and it sends bytes.
func (a api) trace(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	if _, ok := a.Status().Driver(name); !ok {
		writeJSON(w, http.StatusNotFound, failure{"cannot trace " + name + ": no driver of that name is configured"})
		return
	}
	if !a.traces.enter(r.Context(), 0) {
		writeJSON(w, http.StatusServiceUnavailable, failure{"cannot trace " + name + ": too many recorders are running"})
		return
	}
	defer a.traces.leave()
	rc := http.NewResponseController(w)
	if err := errors.Join(rc.EnableFullDuplex(), rc.SetWriteDeadline(time.Time{})); err != nil {
		writeJSON(w, http.StatusInternalServerError, failure{err.Error()})
		return
	}
	// Not the request's context: net/http cancels it without a cause when a read fails.
	daemon := r.Context().Value(http.ServerContextKey).(*http.Server).BaseContext(nil)
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(daemon))
	defer cancel(nil)
	defer context.AfterFunc(daemon, func() { cancel(errors.New("the daemon ends")) })()
	begun := false
	tell := func(s traceStep) error {
		if !begun {
			setHeader(w, "application/x-ndjson")
			begun = true
		}
		_, err := w.Write(Marshal(s))
		return errors.Join(err, rc.Flush())
	}
	beat := func() error {
		err := rc.SetReadDeadline(time.Now().Add(leaseSilence))
		if err == nil {
			_, err = io.ReadFull(r.Body, make([]byte, 1))
		}
		return err
	}
	var beating sync.WaitGroup
	err := a.Trace(ctx, Recorder{
		Driver: name, Process: r.RemoteAddr,
		Listen: func(_ context.Context, path string) error {
			if err := tell(traceStep{Socket: path}); err != nil {
				return err
			}
			err := beat()
			if err != nil {
				return fmt.Errorf("the recorder did not begin to listen: %w", err)
			}
			beating.Go(func() {
				for err == nil {
					err = beat()
				}
				cancel(recorderEnd(err))
			})
			return nil
		},
		// If the recorder has ended, beat fails.
		Linked: func() { _ = tell(traceStep{Linked: true}) },
	})
	_ = rc.SetReadDeadline(time.Now()) // the link points back: end the goroutine above
	beating.Wait()
	switch {
	case err == nil || ctx.Err() != nil: // the recorder has ended, or the daemon does
	case begun:
		_ = tell(traceStep{Error: err.Error()})
	default:
		writeResult(w, err, http.StatusConflict)
	}
}

// recorderEnd explains why no byte of a recorder could be read.
func recorderEnd(err error) error {
	switch {
	case errors.Is(err, io.EOF):
		return errors.New("the recorder has ended")
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("the recorder sent nothing for %s: it is stopped, or hangs", leaseSilence)
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		return errors.New("the recorder's connection was closed: it was killed, or has crashed")
	}
	return fmt.Errorf("the recorder's connection failed: %w", err)
}

// Trace requests the calls to a driver. It returns when the daemon has pointed the endpoint link
// back at the driver, after ctx is done, or earlier with an error. The error is ErrNotRunning if
// the daemon ended; it points the link back at its next start, and calls arrive until then.
// Recorder.Process is ignored: the daemon knows the peer.
func (c *Client) Trace(ctx context.Context, rec Recorder) error {
	fail := func(err error) error { return fmt.Errorf("cannot trace %s: %w", rec.Driver, err) }
	body, beats := io.Pipe()
	defer beats.Close()
	// The request ends with its body, not with ctx, because the end of the answer means that the
	// link points back.
	answer, err := c.send(context.WithoutCancel(ctx), http.MethodPost, "/v1/drivers/"+url.PathEscape(rec.Driver)+"/trace", body, c.limit)
	if refused, ok := errors.AsType[*Error](err); ok {
		return refused
	}
	if err != nil {
		return fail(err)
	}
	defer answer.Close()
	beating, stop := context.WithCancel(ctx)
	defer stop()
	steps := json.NewDecoder(answer)
	for {
		var s traceStep
		err := steps.Decode(&s)
		switch {
		case errors.Is(err, io.EOF) && ctx.Err() != nil:
			return nil
		case err != nil:
			return fail(c.explain(err))
		case s.Error != "":
			return &Error{Text: s.Error}
		case s.Socket != "":
			if err := rec.Listen(ctx, s.Socket); err != nil {
				return err
			}
			go sendBeats(beating, beats, rec.Held)
		case s.Linked:
			rec.Linked()
		}
	}
}

// sendBeats keeps the lease until ctx is done, the daemon ends it, or this process was stopped for
// so long that the daemon has revoked it.
func sendBeats(ctx context.Context, w *io.PipeWriter, held func()) {
	defer w.Close()
	tick := time.NewTicker(leaseBeat)
	defer tick.Stop()
	last := time.Now()
	for time.Since(last) < leaseSilence {
		last = time.Now()
		held()
		if _, err := w.Write([]byte{'.'}); err != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
