package systemd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/rate"
)

// Run sends the queue in order, however long the manager takes. When ctx is done it sends the rest,
// and returns when the manager has read everything, or after 8 s with an error that names what the
// manager has not read.
func (s *Store) Run(ctx context.Context) error {
	if s.notify == nil {
		return nil
	}
	defer s.end()
	lasting, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(flushWithin, stop) })()
	for {
		for r, ok := s.next(); ok; r, ok = s.next() {
			if !s.transmit(lasting, r) {
				return s.unread()
			}
		}
		if len(s.inFlight) > 0 { // changed here only
			if !s.barrier(lasting) {
				return s.unread()
			}
			s.confirm()
			continue
		}
		if ctx.Err() != nil {
			return nil
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
		}
	}
}

// next takes the first request out of the queue.
func (s *Store) next() (r request, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.queue) == 0 {
		return r, false
	}
	r, s.queue = s.queue[0], s.queue[1:]
	s.inFlight = append(s.inFlight, r)
	return r, true
}

// transmit sends a request and reports whether it was sent before ctx ended. It removes also what
// is not known: the previous process may have sent a descriptor that was not yet in the store when
// this process was started.
func (s *Store) transmit(ctx context.Context, r request) bool {
	send := func(message string, fd int) bool {
		return s.retry(ctx, func() error { return s.notify.send(message+"\nFDNAME="+r.name, fd, queueTimeout) })
	}
	if r.fd < 0 {
		return send("FDSTOREREMOVE=1", -1)
	}
	defer unix.Close(r.fd) // the manager's queue has another copy now
	// FDPOLL=0: without it PID 1 would drop a listener at the first sign of an error on it.
	return send("FDSTOREREMOVE=1", -1) && send("FDSTORE=1\nFDPOLL=0", r.fd)
}

// retry calls send until it succeeds or ctx has ended, and reports which.
func (s *Store) retry(ctx context.Context, send func() error) bool {
	for failed := false; ; failed = true {
		err := send()
		if err == nil {
			if failed {
				s.options.Log.Info("the service manager is reading messages again")
			}
			return true
		}
		if !failed {
			s.options.Log.Warn("cannot reach the descriptor store; trying again until it works", "error", err)
		}
		if !rate.Pause(ctx, sendPause) {
			return false
		}
	}
}

// barrier sends a BARRIER=1, with a pipe that ends when the manager has read everything that was
// sent before, and reports whether it ended before ctx.
func (s *Store) barrier(ctx context.Context) bool {
	var end *os.File
	if !s.retry(ctx, func() error {
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		defer w.Close() // ours must be closed, or the pipe would never end
		if err := s.notify.send("BARRIER=1", int(w.Fd()), queueTimeout); err != nil {
			return errors.Join(err, r.Close())
		}
		end = r
		return nil
	}) {
		return false
	}
	defer end.Close()
	// fails only on a closed file
	defer context.AfterFunc(ctx, func() { _ = end.SetReadDeadline(time.Unix(1, 0)) })()
	_, err := end.Read(make([]byte, 1))
	return errors.Is(err, io.EOF)
}

// confirm records that the manager has read all messages in flight.
func (s *Store) confirm() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.inFlight {
		close(r.done)
	}
	s.inFlight = nil
}

// unread returns the error of Run if the manager has not read everything.
func (s *Store) unread() error {
	return fmt.Errorf("the service manager did not read in %s what is to be in its descriptor store: %s",
		flushWithin, strings.Join(s.unconfirmed(), ", "))
}

// unconfirmed lists the names of which the manager has not read the last message, sorted.
func (s *Store) unconfirmed() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for _, r := range slices.Concat(s.inFlight, s.queue) {
		names = append(names, r.name)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func (s *Store) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	for _, r := range s.queue {
		if r.fd >= 0 {
			_ = unix.Close(r.fd) // a copy that nobody else uses; no error of it matters
		}
	}
	s.queue = nil
}
