package systemd

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	systemdbus "github.com/coreos/go-systemd/v22/dbus"
	godbus "github.com/godbus/dbus/v5"
)

// fakeManager knows one unit. A real one is asked in the system test.
type fakeManager struct {
	job   string // "": none
	state string
	fails []error // for the first questions
	open  int     // connections
}

const testUnit = "x.service"

func (m *fakeManager) fail() error {
	if len(m.fails) == 0 {
		return nil
	}
	err := m.fails[0]
	m.fails = m.fails[1:]
	return err
}

func (m *fakeManager) GetUnitNameByPID(context.Context, uint32) (string, error) {
	return testUnit, m.fail()
}

func (m *fakeManager) GetUnitPropertiesContext(_ context.Context, unit string) (map[string]any, error) {
	number := uint32(0)
	if m.job != "" {
		number = 7
	}
	return map[string]any{"ActiveState": m.state, "Job": []any{number, godbus.ObjectPath("/")}}, m.fail()
}

func (m *fakeManager) ListJobsContext(context.Context) ([]systemdbus.JobStatus, error) {
	jobs := []systemdbus.JobStatus{{Unit: "other.service", JobType: "stop"}}
	if m.job != "" {
		jobs = append(jobs, systemdbus.JobStatus{Unit: testUnit, JobType: m.job})
	}
	return jobs, m.fail()
}

func (m *fakeManager) Close() { m.open-- }

func (m *fakeManager) connect(context.Context) (manager, error) { m.open++; return m, nil }

func TestOnlyAStopJobOfTheUnitStopsIt(t *testing.T) {
	for job, want := range map[string]bool{"stop": true, "restart": false, "": false} {
		if got, err := stopping(t.Context(), &fakeManager{job: job}); got != want || err != nil {
			t.Errorf("%q: %t, %v", job, got, err)
		}
	}
}

// TestDown: a unit that is inactive only until its start job runs is not down.
func TestDown(t *testing.T) {
	for _, c := range []struct {
		state, job string
		want       bool
	}{
		{"inactive", "", true},
		{"failed", "", true},
		{"inactive", "start", false},
		{"activating", "", false},
		{"active", "", false},
	} {
		if got, err := down(t.Context(), &fakeManager{job: c.job, state: c.state}, testUnit); got != c.want || err != nil {
			t.Errorf("%+v: %t, %v", c, got, err)
		}
	}
	if got, err := down(t.Context(), &fakeManager{}, testUnit); got || err == nil {
		t.Errorf("no ActiveState: %t, %v", got, err)
	}
}

func TestAManagerThatHangsUpIsAskedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &fakeManager{job: "stop", fails: []error{godbus.ErrClosed, nil, godbus.ErrClosed}}
		got, err := ask(t.Context(), m.connect, stopping)
		if !got || err != nil || len(m.fails) != 0 || m.open != 0 {
			t.Errorf("%t, %v, %d open connections", got, err, m.open)
		}
	})
}

func TestARefusalIsFinal(t *testing.T) {
	m := &fakeManager{fails: []error{godbus.Error{Name: "org.example.No"}}}
	asked := 0
	_, err := ask(t.Context(), m.connect, func(ctx context.Context, m manager) (bool, error) {
		asked++
		return stopping(ctx, m)
	})
	if refusal := (godbus.Error{}); !errors.As(err, &refusal) || asked != 1 {
		t.Errorf("%v after %d questions", err, asked)
	}
}

// TestAManagerThatDoesNotAnswer: nobody listens, or a try hangs; that takes 3 s at most.
func TestAManagerThatDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tries, begun := 0, time.Now()
		_, err := ask(t.Context(), func(ctx context.Context) (manager, error) {
			if tries++; tries <= 10 {
				return nil, errors.New("connection refused")
			}
			<-ctx.Done()
			return nil, ctx.Err()
		}, stopping)
		if took := time.Since(begun); err == nil || tries != 11 || took != askTimeout {
			t.Errorf("%v after %d tries and %s", err, tries, took)
		}
	})
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	if _, err := ask(ctx, func(context.Context) (manager, error) { return nil, ctx.Err() }, stopping); !errors.Is(err, cause) {
		t.Error(err)
	}
}
