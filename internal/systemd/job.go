package systemd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"
)

// askTimeout bounds a question to the manager, askAgain is the pause between tries: for
// some 100 ms nobody listens while it executes itself anew.
const (
	askTimeout = 3 * time.Second
	askAgain   = 50 * time.Millisecond
)

// JobStop is the type of a job that stops a unit for good. A restart is another type
// ("restart", "try-restart"), until the unit is up again.
const JobStop = "stop"

// Job returns the type of the job that is queued or at work for a unit ("start", "stop",
// "restart", "reload", …), "" if there is none. An empty unit means the one that this
// process is part of. It is an error if the manager cannot be asked.
//
// Asked in ExecStopPost=, this is the only thing that tells a stop from a restart on
// every systemd since 247: the environment and $SERVICE_RESULT are the same for both.
func Job(ctx context.Context, unit string) (jobType string, err error) {
	return systemManager().job(ctx, unit)
}

func (m manager) job(ctx context.Context, unit string) (jobType string, err error) {
	err = m.ask(ctx, func(b *bus) error {
		path, err := unitPath(b, unit)
		if err != nil {
			return err
		}
		jobType, err = jobOf(b, path)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("cannot ask the service manager for the unit's job: %w", err)
	}
	return jobType, nil
}

// Down tells whether a unit has stopped and nothing is to start it: inactive or failed,
// with no job, so not between the two halves of a restart. It is an error if the manager
// cannot be asked.
func Down(ctx context.Context, unit string) (bool, error) {
	return systemManager().down(ctx, unit)
}

func (m manager) down(ctx context.Context, unit string) (isDown bool, err error) {
	err = m.ask(ctx, func(b *bus) error {
		path, err := unitPath(b, unit)
		if err != nil {
			return err
		}
		r, err := b.property(path, managerName+".Unit", "ActiveState")
		if err != nil {
			return err
		}
		state := r.string()
		if r.err != nil {
			return r.err
		}
		job, err := jobOf(b, path)
		isDown = job == "" && (state == "inactive" || state == "failed")
		return err
	})
	if err != nil {
		return false, fmt.Errorf("cannot ask the service manager for the state of %s: %w", unit, err)
	}
	return isDown, nil
}

func jobOf(b *bus, path string) (string, error) {
	r, err := b.property(path, managerName+".Unit", "Job")
	if err != nil {
		return "", err
	}
	r.align(8) // a structure of the job's number and path
	id, jobPath := r.uint32(), r.string()
	if r.err != nil || id == 0 {
		return "", r.err
	}
	r, err = b.property(jobPath, managerName+".Job", "JobType")
	if remote := (*remoteError)(nil); errors.As(err, &remote) {
		// It ended between the two questions. Another one may have come in its place.
		return "", errAskAgain
	}
	if err != nil {
		return "", err
	}
	jobType := r.string()
	return jobType, r.err
}

// storeCount asks how many descriptors our service has in its store, and how many may be.
func (m manager) storeCount(ctx context.Context) (stored, most uint32, err error) {
	err = m.ask(ctx, func(b *bus) error {
		path, err := unitPath(b, "")
		if err != nil {
			return err
		}
		stored, err = number(b, path, "NFileDescriptorStore")
		if err != nil {
			return err
		}
		most, err = number(b, path, "FileDescriptorStoreMax")
		return err
	})
	if err != nil {
		return 0, 0, fmt.Errorf("cannot ask the service manager for the descriptor store: %w", err)
	}
	return stored, most, nil
}

func number(b *bus, path, property string) (uint32, error) {
	r, err := b.property(path, managerName+".Service", property)
	if err != nil {
		return 0, err
	}
	v := r.uint32()
	return v, r.err
}

func unitPath(b *bus, unit string) (string, error) {
	var r *reply
	var err error
	if unit == "" {
		r, err = b.call(managerPath, managerFace, "GetUnitByPID", "u", uint32(os.Getpid()))
	} else {
		r, err = b.call(managerPath, managerFace, "GetUnit", "s", unit)
	}
	if err != nil {
		return "", err
	}
	path := r.string()
	return path, r.err
}

var errAskAgain = errors.New("the job ended while it was asked for")

// ask puts questions over a fresh connection, again if that breaks. An answer that is a
// refusal is final.
func (m manager) ask(ctx context.Context, questions func(*bus) error) error {
	if _, err := os.Stat(m.booted); err != nil {
		return errors.New("this machine was not booted with systemd") // as sd_booted(3) tells
	}
	ctx, cancel := context.WithTimeoutCause(ctx, askTimeout, errors.New("no answer in time"))
	defer cancel()
	for {
		err := m.askOnce(ctx, questions)
		if remote := (*remoteError)(nil); err == nil || errors.As(err, &remote) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case <-time.After(askAgain):
		}
	}
}

func (m manager) askOnce(ctx context.Context, questions func(*bus) error) error {
	b, err := m.dial(ctx)
	if err != nil {
		return err
	}
	defer b.close()
	return questions(b)
}
