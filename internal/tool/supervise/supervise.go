// Package supervise implements `csi-registrar supervise` for a driver that runs as a unit of
// systemd: it waits until the driver serves, and then feeds the unit's watchdog for as long as the
// driver answers Probe.
package supervise

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/sys/rate"
)

// Pauses of Wait between two attempts: a refused connection costs microseconds, a call is work for
// the driver. With both, the unit is active within 100 ms after its driver answers.
const (
	pauseAbsent = 20 * time.Millisecond
	pauseCalled = 80 * time.Millisecond
	retryPause  = time.Second // between two Probes of a driver that does not answer
)

// MinWatchdog is the shortest WatchdogSec= that Watch can feed.
const MinWatchdog = time.Second

// Notifier sends messages to the service manager (satisfied by systemd.Notifier).
type Notifier interface {
	Watchdog() error
	Status(text string) error
}

// Supervisor supervises one driver. All fields but Watchdog are required.
type Supervisor struct {
	Name   func(context.Context) (string, error) // driver.LiveName
	Live   func(context.Context) error           // driver.Live
	Notify Notifier
	Log    *slog.Logger
	// Watchdog is the unit's WatchdogSec=; zero: there is none.
	Watchdog time.Duration
}

// ErrEnded is the cause with which the caller ends the context of Wait or Watch if the driver's
// main process has ended.
var ErrEnded = errors.New("the driver's main process ended before it served")

// ErrNotServing is wrapped by the error of Wait when ctx ends before the driver serves.
var ErrNotServing = errors.New("the driver does not serve yet")

// Wait returns nil when the driver answers GetPluginInfo and Probe, and an error when ctx is done
// before that. Meanwhile it feeds the watchdog, because systemd
// counts WatchdogSec= from the start of the driver: TimeoutStartSec= limits the wait.
func (s *Supervisor) Wait(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var feeding sync.WaitGroup
	feeding.Go(func() {
		for ok := s.Watchdog > 0; ok; ok = rate.Pause(ctx, s.Watchdog/3) {
			s.feed()
		}
	})
	defer feeding.Wait()
	defer cancel()

	name, last := "", ""
	for {
		err := error(nil)
		if name == "" {
			name, err = s.Name(ctx)
		}
		if err == nil {
			err = s.Live(ctx)
		}
		if ctx.Err() == nil && err == nil {
			s.status(name + " serves")
			return nil
		}
		if ctx.Err() == nil && err.Error() != last {
			last = err.Error()
			s.status("waiting for the driver: " + last)
		}
		pause := pauseCalled
		if errors.Is(err, driver.ErrAbsent) {
			pause = pauseAbsent
		}
		if rate.Pause(ctx, pause) {
			continue
		}
		if errors.Is(context.Cause(ctx), ErrEnded) {
			return ErrEnded
		}
		return fmt.Errorf("%w: %s", ErrNotServing, last)
	}
}

// Watch feeds the watchdog for as long as the driver answers Probe. It returns when ctx is done. A
// Probe may take a third of Watchdog at most, and the next one comes a third later, so that systemd
// does not act because of a single unanswered Probe.
func (s *Supervisor) Watch(ctx context.Context) {
	pause, last := s.Watchdog/3, ""
	for {
		limited, cancel := context.WithTimeout(ctx, pause)
		err := s.Live(limited)
		cancel()
		debug.FreeOSMemory() // the process stays for as long as the driver, and Go would keep 4 MB
		if ctx.Err() != nil {
			return
		}
		state, next := "the driver serves", pause
		if err != nil {
			state, next = "the driver does not serve: "+err.Error(), min(retryPause, pause)
		} else {
			s.feed()
		}
		if state != last {
			switch {
			case err != nil:
				s.Log.Warn("the driver does not serve; the watchdog restarts it unless it answers in time",
					"reason", err.Error(), "watchdog", s.Watchdog)
			case last != "":
				s.Log.Info("the driver serves again")
			}
			s.status(state)
			last = state
		}
		if !rate.Pause(ctx, next) {
			return
		}
	}
}

// feed and status ignore errors: without WATCHDOG=1 systemd restarts the driver, as it should.
func (s *Supervisor) feed() {
	if err := s.Notify.Watchdog(); err != nil {
		s.Log.Warn("cannot feed the watchdog", "error", err)
	}
}

func (s *Supervisor) status(text string) {
	if err := s.Notify.Status(text); err != nil {
		s.Log.Debug("cannot set the status", "error", err)
	}
}
