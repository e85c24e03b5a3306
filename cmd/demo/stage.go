package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"csi-registrar/internal/control"
	"csi-registrar/internal/fake"
	"csi-registrar/internal/rootdir"
	"csi-registrar/internal/sampledriver"
	"csi-registrar/internal/status"
)

// stage is what the story plays on: the directory, who acts, and what happened.
type stage struct {
	story  Story
	began  time.Time
	dir    string
	log    *os.File // what daemon and driver say; shown when a step fails
	events *eventLog

	manager *fake.Manager
	client  *control.Client
	daemon  *process
	driver  *process

	kubelet *fake.Kubelet

	running sync.WaitGroup // goroutines: the watcher of sockets, the reader of notifications
	cancel  context.CancelFunc
	watched error // of the watcher; to be read after running
}

const driverName = sampledriver.DefaultName

// Paths below the story's directory, where a node has them below /.
func (s *stage) registry() string { return rootdir.PluginsRegistry(filepath.Join(s.dir, "kubelet")) }
func (s *stage) registration() string {
	return filepath.Join(s.registry(), rootdir.SocketName(driverName))
}
func (s *stage) driverSocket() string { return filepath.Join(s.dir, "driver", "csi.sock") }
func (s *stage) config() string       { return filepath.Join(s.dir, "etc", "csi-registrar") }
func (s *stage) dropIn(name string) string {
	return filepath.Join(s.config(), "conf.d", name)
}

// newStage makes the directory and starts what is not a process.
func newStage(ctx context.Context, story Story) (_ *stage, err error) {
	s := &stage{story: story, began: time.Now(), events: newEventLog()}
	if s.dir, err = temporary(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if err := s.furnish(); err != nil {
		return nil, fmt.Errorf("cannot set the stage: %w", err)
	}
	if s.manager, err = fake.StartManager(s.dir); err != nil {
		return nil, err
	}
	s.client = control.NewClient(control.Path(s.dir))
	s.running.Go(s.listen)
	watcher, err := newSocketWatcher(s.events.add, filepath.Dir(s.driverSocket()), s.registry())
	if err != nil {
		return nil, err
	}
	// Not ended by ctx itself: it watches until the processes have ended.
	ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	s.running.Go(func() { s.watched = watcher.run(ctx) })
	s.kubelet, err = fake.StartKubelet(s.registry(), fake.NewAPIServer(), s.events.add)
	return s, err
}

// listen notes what the daemon tells the service manager.
func (s *stage) listen() {
	for line := range s.manager.Events() {
		if line == "READY=1" {
			s.events.add(fake.Event{At: time.Now(), What: ready})
		}
	}
}

// furnish makes directories and files: what a node has, what a package of the daemon ships,
// and what a package of a driver ships.
func (s *stage) furnish() (err error) {
	for _, dir := range []string{s.registry(), filepath.Dir(s.driverSocket()), s.dropIn("")} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return err
		}
	}
	if s.log, err = os.Create(filepath.Join(s.dir, "log")); err != nil {
		return err
	}
	main := fmt.Sprintf("[kubelet]\nroot_dir = %q\n", filepath.Dir(s.registry()))
	if err := os.WriteFile(filepath.Join(s.config(), "config.toml"), []byte(main), 0o640); err != nil {
		return err
	}
	return os.WriteFile(s.dropIn("50-sample.toml"), []byte(s.sampleDropIn()), 0o640)
}

// sampleDropIn is the driver's configuration. A temporary directory is open to more users
// than /run, so the check of the socket's owner is turned off.
func (s *stage) sampleDropIn() string {
	return fmt.Sprintf("[driver.%q]\nsocket = %q\nsocket_owner = \"any\"\n", driverName, s.driverSocket())
}

// startDaemon starts the daemon, with what is in the descriptor store, and waits for its
// READY=1.
func (s *stage) startDaemon(ctx context.Context) (at time.Time, err error) {
	from := s.events.now()
	cmd := s.manager.Command(context.WithoutCancel(ctx), s.story.Daemon, "run", "--config-root", s.dir, "--keep-sockets")
	cmd.Stdout, cmd.Stderr = s.log, s.log
	at = time.Now()
	if s.daemon, err = start("daemon", cmd); err != nil {
		return at, err
	}
	// Starting it read the files that the manager closes once the daemon forgets them.
	// Asking the manager orders the one before the other, also for the race detector.
	s.manager.Stored()
	return at, s.alive(ctx, s.daemon, func(ctx context.Context) error {
		_, err := s.events.await(ctx, from, func(e fake.Event) bool { return e.What == ready })
		return err
	})
}

// alive waits for something, but not longer than the process lives.
func (s *stage) alive(ctx context.Context, p *process, wait func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watched := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		select {
		case <-p.done:
			cancel(p.gone())
		case <-watched:
		}
	})
	defer watching.Wait()
	defer close(watched)
	return wait(ctx)
}

// awaitStatus waits until the daemon says of the driver what is wanted.
func (s *stage) awaitStatus(ctx context.Context, want func(status.Driver) bool) (found status.Driver, err error) {
	err = s.alive(ctx, s.daemon, func(ctx context.Context) error {
		for document, err := range s.client.Watch(ctx) {
			if err != nil {
				return err
			}
			var status status.Document
			if status, err = document.Status(); err != nil {
				return err
			}
			if d, ok := status.Driver(driverName); ok {
				if found = d; want(d) {
					return nil
				}
			}
		}
		return fmt.Errorf("the daemon says: driver %s, registration %s (%s): %w",
			found.Driver, found.Registration, found.Reason, context.Cause(ctx))
	})
	return found, err
}

// undisturbed waits until the kubelet has looked at everything, and proves that since the
// position nothing happened to the registration: no file event, no call that changes it.
func (s *stage) undisturbed(ctx context.Context, from int) error {
	// Two rounds: the first may have begun before what it should not see.
	for at, rounds := s.events.now(), 0; rounds < 2; rounds++ {
		if _, err := s.events.await(ctx, at, func(e fake.Event) bool { return e.What == fake.Reconciled }); err != nil {
			return fmt.Errorf("the kubelet does not look: %w", err)
		}
		at = s.events.now()
	}
	for _, e := range s.events.since(from) {
		if e.Socket == s.registration() {
			return fmt.Errorf("the kubelet should have seen nothing, but %s was %s", e.Socket, e.What)
		}
	}
	return nil
}

// inode identifies the registration socket's file.
func (s *stage) inode() (uint64, error) {
	info, err := os.Lstat(s.registration())
	if err != nil {
		return 0, fmt.Errorf("cannot look at the registration socket: %w", err)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, errors.New("cannot look at the registration socket's inode")
	}
	return stat.Ino, nil
}

// showLog prints the last log lines of the daemon and the driver, to find the cause of a failure.
func (s *stage) showLog() error {
	const lines = 15
	text, err := os.ReadFile(s.log.Name())
	if err != nil {
		return fmt.Errorf("cannot show the log: %w", err)
	}
	all := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
	fmt.Fprintf(s.story.Out, "\nThe last lines of the log of daemon and driver:\n%s\n",
		bytes.Join(all[max(0, len(all)-lines):], []byte("\n")))
	return nil
}

// close ends everything that the stage started, and removes its directory.
func (s *stage) close() error {
	err := errors.Join(s.driver.end(), s.daemon.end())
	if s.cancel != nil {
		s.cancel()
	}
	if s.manager != nil {
		err = errors.Join(err, s.manager.Close())
	}
	if s.kubelet != nil {
		err = errors.Join(err, s.kubelet.Stop())
	}
	s.running.Wait()
	if s.log != nil {
		err = errors.Join(err, s.log.Close())
	}
	return errors.Join(err, s.watched, os.RemoveAll(s.dir))
}
