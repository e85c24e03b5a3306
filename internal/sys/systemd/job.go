package systemd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"time"

	systemdbus "github.com/coreos/go-systemd/v22/dbus"
	godbus "github.com/godbus/dbus/v5"

	"csi-registrar/internal/sys/rate"
)

// askTimeout limits a query of the service manager: on a busy machine 3 s were too short once in 15
// stops, and each command of ExecStopPost= may take the 30 s of TimeoutStopSec=. While the manager
// re-executes, its socket refuses connections for about 100 ms, and existing connections break:
// then the query is repeated after tryPause.
const (
	askTimeout = 8 * time.Second
	tryPause   = 50 * time.Millisecond
)

// manager is the part of the service manager's interface that is used here.
type manager interface {
	GetUnitNameByPID(ctx context.Context, pid uint32) (string, error)
	GetUnitPropertiesContext(ctx context.Context, unit string) (map[string]any, error)
	ListJobsContext(ctx context.Context) ([]systemdbus.JobStatus, error)
	Close()
}

// connect connects to the service manager's private socket, which only root can use and which needs
// no dbus-daemon. The connection ends with ctx.
func connect(ctx context.Context) (manager, error) {
	return systemdbus.NewConnection(func() (*godbus.Conn, error) {
		conn, err := godbus.Dial("unix:path=/run/systemd/private", godbus.WithContext(ctx))
		if errors.Is(err, fs.ErrNotExist) {
			// TemporaryFileSystem= hides /run/systemd also from commands with "+". These have the
			// capabilities to access the file system of PID 1.
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

// ping sends messages until ctx is done: some versions of systemd do not process a call that
// arrives together with the end of the authentication until they receive more data. (This did not
// happen in 300 connections to 252.)
func ping(ctx context.Context, conn *godbus.Conn) {
	time.AfterFunc(tryPause, func() {
		if ctx.Err() == nil {
			conn.BusObject().Go("org.freedesktop.DBus.Peer.Ping", godbus.FlagNoReplyExpected, nil)
			ping(ctx, conn)
		}
	})
}

// Stopping reports whether the unit of this process has a job that stops it for good, as it also
// has at poweroff. A restart is a job of another type until the unit is up again, and after a crash
// there is none: the next process takes over the sockets. It is an error if the manager cannot be
// asked.
//
// In ExecStopPost=, only the job distinguishes a stop from a restart on every systemd since 247:
// the environment and $SERVICE_RESULT are the same for both.
func Stopping(ctx context.Context) (bool, error) { return ask(ctx, connect, stopping) }

func stopping(ctx context.Context, m manager) (bool, error) {
	unit, err := m.GetUnitNameByPID(ctx, uint32(os.Getpid()))
	if err != nil {
		return false, err
	}
	// One call, because the job may end between a call for the job and another for its type.
	jobs, err := m.ListJobsContext(ctx)
	return slices.ContainsFunc(jobs, func(j systemdbus.JobStatus) bool { return j.Unit == unit && j.JobType == "stop" }), err
}

// Down reports whether a unit has stopped and will not be started: it is inactive or failed and has
// no job, so it is not between the two halves of a restart. It is an error if the manager cannot be
// asked.
func Down(ctx context.Context, unit string) (bool, error) {
	return ask(ctx, connect, func(ctx context.Context, m manager) (bool, error) { return down(ctx, m, unit) })
}

func down(ctx context.Context, m manager, unit string) (bool, error) {
	// Get both properties in one call, so that they are consistent.
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

// ask queries the manager over a new connection, and again if the connection breaks.
// An error that the manager returns is final.
func ask[T any](ctx context.Context, connect func(context.Context) (manager, error), question func(context.Context, manager) (T, error)) (T, error) {
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
		return question(ctx, m)
	}
	for {
		answer, err := try()
		if err == nil {
			return answer, nil
		}
		if refusal := (godbus.Error{}); errors.As(err, &refusal) {
			return answer, fmt.Errorf("cannot ask the service manager: %w", err)
		}
		if !rate.Pause(ctx, tryPause) {
			return answer, fmt.Errorf("cannot ask the service manager: %w: %w", context.Cause(ctx), err)
		}
	}
}
