package supervise

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/core/driver"
)

var (
	errAbsent   = driver.ErrAbsent
	errNotReady = errors.New("not ready")
)

// fakeDriver answers as a test sets it. A hanging one answers Name after 3 s, and Live when ctx is
// done, so that only the limits of the Supervisor end it.
type fakeDriver struct {
	mu    sync.Mutex
	err   error
	hangs bool
	calls int
}

func (d *fakeDriver) set(err error, hangs bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err, d.hangs = err, hangs
}

func (d *fakeDriver) Name(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := d.Live(ctx); err != nil {
		return "", err
	}
	return "a.example", nil
}
func (d *fakeDriver) Live(ctx context.Context) error {
	d.mu.Lock()
	d.calls++
	err, hangs := d.err, d.hangs
	d.mu.Unlock()
	if !hangs {
		return err
	}
	<-ctx.Done()
	return errors.New("does not answer Probe")
}

// fakeManager records the messages to systemd.
type fakeManager struct {
	mu     sync.Mutex
	fed    []time.Time
	status string

	statuses int // how often it was set
}

func (m *fakeManager) Watchdog() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fed = append(m.fed, time.Now())
	return nil
}

func (m *fakeManager) Status(text string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.status = text
	m.statuses++
	return nil
}

func (m *fakeManager) lastFed() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.fed) == 0 {
		return time.Time{}
	}
	return m.fed[len(m.fed)-1]
}

func newSupervisor(watchdog time.Duration) (*Supervisor, *fakeDriver, *fakeManager) {
	d, m := &fakeDriver{}, &fakeManager{}
	return &Supervisor{Name: d.Name, Live: d.Live, Notify: m, Log: slog.New(slog.DiscardHandler), Watchdog: watchdog}, d, m
}

func TestWaitReturnsWithin100MillisecondsAfterTheDriverServes(t *testing.T) {
	for name, before := range map[string]error{"absent": errAbsent, "not ready": errNotReady} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, d, m := newSupervisor(0)
				d.set(before, false)
				var serves time.Time
				time.AfterFunc(7*time.Second, func() { serves = time.Now(); d.set(nil, false) })
				if err := s.Wait(t.Context()); err != nil {
					t.Fatal(err)
				}
				if late := time.Since(serves); late > 100*time.Millisecond {
					t.Errorf("%s after the driver served", late)
				}
				if m.status != "a.example serves" || len(m.fed) > 0 {
					t.Errorf("%+v", m)
				}
			})
		})
	}
}

func TestTheWatchdogIsFedWhileTheDriverStarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d, m := newSupervisor(5 * time.Second)
		d.set(nil, true) // each call takes 3 s
		time.AfterFunc(time.Minute, func() { d.set(nil, false) })
		if err := s.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		for i, at := range m.fed[1:] {
			if gap := at.Sub(m.fed[i]); gap >= 5*time.Second {
				t.Errorf("not fed for %s", gap)
			}
		}
		if time.Since(m.lastFed()) >= 5*time.Second {
			t.Error("not fed at the end")
		}
	})
}

func TestWaitEndsWithTheDriver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d, _ := newSupervisor(5 * time.Second)
		d.set(nil, true)
		ctx, end := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { end(ErrEnded) })
		begun := time.Now()
		if err := s.Wait(ctx); !errors.Is(err, ErrEnded) || time.Since(begun) != time.Second {
			t.Errorf("%v after %s", err, time.Since(begun))
		}
	})
}

func TestWaitInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d, _ := newSupervisor(0)
		d.set(errNotReady, false)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := s.Wait(ctx); err == nil || !strings.Contains(err.Error(), "not ready") {
			t.Error(err)
		}
	})
}

// systemd acts if it receives nothing for the whole time.
func TestHangStopsTheWatchdog(t *testing.T) {
	if MinWatchdog != time.Second {
		t.Errorf("csi-registrar(1) says that 1s is enough, not %s", MinWatchdog)
	}
	for _, watchdog := range []time.Duration{MinWatchdog, 5 * time.Second, time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			s, d, m := newSupervisor(watchdog)
			ctx, end := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { s.Watch(ctx); close(done) }()
			for range 100 { // healthy: never near the limit
				time.Sleep(watchdog / 7)
				synctest.Wait()
				if quiet := time.Since(m.lastFed()); quiet > watchdog/2 {
					t.Fatalf("%s without WATCHDOG=1 of a healthy driver", quiet)
				}
			}
			d.set(nil, true)
			hung := time.Now()
			time.Sleep(2 * watchdog)
			synctest.Wait()
			if m.lastFed().After(hung) {
				t.Errorf("fed %s after the driver hung", m.lastFed().Sub(hung))
			}
			if !strings.Contains(m.status, "does not serve") {
				t.Errorf("the status is %q", m.status)
			}
			d.set(nil, false)
			time.Sleep(watchdog/3 + retryPause)
			synctest.Wait()
			if !m.lastFed().After(hung) || m.status != "the driver serves" {
				t.Errorf("a driver that is back is not fed; %q", m.status)
			}
			end()
			<-done
		})
	}
}

// TestOneSlowAnswerRestartsNothing: the next Probes come before the watchdog acts.
func TestOneSlowAnswerRestartsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, d, m := newSupervisor(10 * time.Second)
		ctx, end := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { s.Watch(ctx); close(done) }()
		time.Sleep(3 * time.Second)
		d.set(nil, true)
		time.Sleep(time.Second)
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Second) {
			d.set(nil, time.Now().Second()%10 < 4) // hangs for 4 s of 10
			if quiet := time.Since(m.lastFed()); quiet >= 10*time.Second {
				t.Fatalf("not fed for %s", quiet)
			}
		}
		end()
		<-done
	})
}
