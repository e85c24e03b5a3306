package systemd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"time"

	systemdbus "github.com/coreos/go-systemd/v22/dbus"
	godbus "github.com/godbus/dbus/v5"
)

// A question to the service manager has askTimeout: on a busy machine 3 s were too short once in
// 15 stops, and each command of ExecStopPost= has the 30 s of TimeoutStopSec= for itself. For
// some 100 ms nobody listens while it re-executes, and a connection of the old process is lost:
// then it is asked again.
const (
	askTimeout = 8 * time.Second
	tryPause   = 50 * time.Millisecond
)

// JobStop is the type of a job that stops a unit for good. A restart is another type
// ("restart", "try-restart"), until the unit is up again.
const JobStop = "stop"

// manager is what is asked of the service manager.
type manager interface {
	GetUnitNameByPID(ctx context.Context, pid uint32) (string, error)
	GetUnitPropertiesContext(ctx context.Context, unit string) (map[string]any, error)
	ListJobsContext(ctx context.Context) ([]systemdbus.JobStatus, error)
	Close()
}

// connect connects to the service manager's own socket, which is for root alone and needs no
// dbus-daemon. The connection ends with ctx.
func connect(ctx context.Context) (manager, error) {
	return systemdbus.NewConnection(func() (*godbus.Conn, error) {
		conn, err := godbus.Dial("unix:path=/run/systemd/private", godbus.WithContext(ctx))
		if errors.Is(err, fs.ErrNotExist) {
			// TemporaryFileSystem= hides /run/systemd from commands with "+", too. These have
			// the capabilities that it takes to look into the file system of PID 1.
			conn, err = godbus.Dial("unix:path=/proc/1/root/run/systemd/private", godbus.WithContext(ctx))
		}
		if err != nil {
			return nil, err
		}
		if err := conn.Auth([]godbus.Auth{godbus.AuthExternal(strconv.Itoa(os.Getuid()))}); err != nil {
			return nil, errors.Join(err, conn.Close())
		}
		ping(ctx, conn)
		return conn, nil
	})
}

// ping sends something now and then until ctx ends: a systemd was seen that did not look at a
// call which it read together with the end of the authentication until it could read something
// more. (Not seen in 300 connections to 252.)
func ping(ctx context.Context, conn *godbus.Conn) {
	time.AfterFunc(tryPause, func() {
		if ctx.Err() == nil {
			conn.BusObject().Go("org.freedesktop.DBus.Peer.Ping", godbus.FlagNoReplyExpected, nil)
			ping(ctx, conn)
		}
	})
}

// Job returns the type of the job that is queued or running for a unit ("start", "stop",
// "restart", "reload", …), "" if there is none. An empty unit means the one that this
// process is part of. It is an error if the manager cannot be asked.
//
// Asked in ExecStopPost=, this is the only thing that distinguishes a stop from a restart on
// every systemd since 247: the environment and $SERVICE_RESULT are the same for both.
func Job(ctx context.Context, unit string) (jobType string, err error) {
	return ask(ctx, connect, job, unit)
}

func job(ctx context.Context, m manager, unit string) (jobType string, err error) {
	if unit == "" {
		if unit, err = m.GetUnitNameByPID(ctx, uint32(os.Getpid())); err != nil {
			return "", err
		}
	}
	// One question instead of two for the unit's job and its type: it may end in between.
	jobs, err := m.ListJobsContext(ctx)
	for _, j := range jobs {
		if j.Unit == unit {
			return j.JobType, nil
		}
	}
	return "", err
}

// Down reports whether a unit has stopped and nothing is to start it: inactive or failed,
// with no job, so not between the two halves of a restart. It is an error if the manager
// cannot be asked.
func Down(ctx context.Context, unit string) (bool, error) { return ask(ctx, connect, down, unit) }

func down(ctx context.Context, m manager, unit string) (bool, error) {
	// Both properties in one answer, so that they belong together.
	p, err := m.GetUnitPropertiesContext(ctx, unit)
	if err != nil {
		return false, err
	}
	state, _ := p["ActiveState"].(string)
	job, _ := p["Job"].([]any) // its number and its path
	if state == "" || len(job) == 0 {
		return false, fmt.Errorf("unexpected answer: ActiveState %v, Job %v", p["ActiveState"], p["Job"])
	}
	return (state == "inactive" || state == "failed") && job[0] == uint32(0), nil
}

// ask asks about a unit over a new connection, again if that breaks. An answer that is a refusal
// is final.
func ask[T any](ctx context.Context, connect func(context.Context) (manager, error), question func(context.Context, manager, string) (T, error), unit string) (T, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, askTimeout, errors.New("no answer in time"))
	defer cancel()
	try := func() (answer T, err error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		m, err := connect(ctx)
		if err != nil {
			return answer, err
		}
		defer m.Close()
		return question(ctx, m, unit)
	}
	for {
		answer, err := try()
		if err == nil {
			return answer, nil
		}
		if refusal := (godbus.Error{}); errors.As(err, &refusal) {
			return answer, fmt.Errorf("cannot ask the service manager: %w", err)
		}
		select {
		case <-ctx.Done():
			return answer, fmt.Errorf("cannot ask the service manager: %w: %w", context.Cause(ctx), err)
		case <-time.After(tryPause):
		}
	}
}
