package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/sys/logqueue"
	"csi-registrar/internal/sys/process"
	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/worker"
	"csi-registrar/internal/tool/supervise"
)

// superviseOwner may serve the driver's socket, and so may the unit's own user.
const superviseOwner = trust.SocketOwner("root")

// mainFD is the pidfd of the driver's main process in the process that feeds the watchdog.
const mainFD = 3

func setupSupervise(fs *flag.FlagSet) runner {
	socket := fs.String("socket", "", "the `PATH` of the driver's socket")
	watchdog := fs.Duration("watchdog", 0, "the WatchdogSec= `D` of the unit; 0: only wait until the driver serves")
	keep := fs.Bool("keep", false, "")
	return func(ctx context.Context, e *env, _ []string) error {
		switch {
		case *socket == "":
			return usagef("--socket is missing")
		case *watchdog != 0 && *watchdog < supervise.MinWatchdog:
			return usagef("--watchdog %s is less than %s", *watchdog, supervise.MinWatchdog)
		}
		notifier := systemd.NewNotifier(e.getenv)
		if *watchdog != 0 && notifier == nil {
			return hinted(errors.New("cannot feed the watchdog: systemd does not listen to this command"),
				"set NotifyAccess=all in the driver's unit")
		}
		main, err := mainProcess(e, *keep)
		if err != nil {
			return err
		}
		defer main.Close()
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		go func() { // until the process ends, or main is closed above
			if process.AwaitEnd(main) == nil {
				cancel(supervise.ErrEnded)
			}
		}()
		log, handler := logqueue.New(func(to logqueue.Sink) slog.Handler { return slog.NewTextHandler(logqueue.Writer(to, e.stderr), nil) })
		defer log.Close()
		pool := worker.NewPool()
		s := &supervise.Supervisor{
			Name:   func(ctx context.Context) (string, error) { return driver.LiveName(ctx, pool, superviseOwner, *socket) },
			Live:   func(ctx context.Context) error { return driver.Live(ctx, pool, superviseOwner, *socket) },
			Notify: notifier, Watchdog: *watchdog, Log: slog.New(handler),
		}
		if *keep {
			return feed(ctx, e, s)
		}
		if err := s.Wait(ctx); err != nil {
			return hinted(fmt.Errorf("%s: %w", *socket, err), "see the driver's own log, and --socket")
		}
		if *watchdog == 0 {
			return nil
		}
		return startFeeder(e, *socket, *watchdog, main)
	}
}

// mainProcess opens the main process of the unit: $MAINPID, or the inherited pidfd.
func mainProcess(e *env, inherited bool) (*os.File, error) {
	if inherited {
		return process.Take(mainFD)
	}
	pid, err := strconv.Atoi(e.getenv("MAINPID"))
	if err != nil || pid <= 0 {
		return nil, hinted(errors.New("there is no main process to supervise: $MAINPID is not set"),
			"use it as ExecStartPost= of the driver's unit")
	}
	return process.Open(pid)
}

// startFeeder starts the process that feeds the watchdog from the unit's control group, and returns
// when it runs. When this process ends, systemd becomes its parent, which reaps it.
func startFeeder(e *env, socket string, watchdog time.Duration, main *os.File) error {
	fail := func(err error) error { return fmt.Errorf("cannot start the process that feeds the watchdog: %w", err) }
	self, err := os.Executable()
	if err != nil {
		return fail(err)
	}
	cmd := exec.Command(self, "supervise", "--keep", "--socket", socket, "--watchdog", watchdog.String())
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1") // it has little to do
	cmd.ExtraFiles = []*os.File{main}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Stderr = e.stderr
	started, err := cmd.StdoutPipe()
	if err != nil {
		return fail(err)
	}
	if err := cmd.Start(); err != nil {
		return fail(err)
	}
	if _, err := io.ReadFull(started, make([]byte, 1)); err != nil {
		return fail(errors.Join(err, cmd.Wait()))
	}
	return cmd.Process.Release()
}

// feed feeds the watchdog until the driver ends. It reports on standard output that it runs.
func feed(ctx context.Context, e *env, s *supervise.Supervisor) error {
	if _, err := io.WriteString(e.stdout, "."); err != nil {
		return err
	}
	// When the watchdog expires, systemd sends ABRT to the whole control group; Go would print all
	// stacks.
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGABRT)
	defer stop()
	s.Watch(ctx)
	return nil
}
