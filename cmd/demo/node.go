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
type node struct {
	demo   Demo
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
func (n *node) registry() string { return rootdir.PluginsRegistry(filepath.Join(n.dir, "kubelet")) }
func (n *node) registration() string {
	return filepath.Join(n.registry(), rootdir.SocketName(driverName))
}
func (n *node) driverSocket() string { return filepath.Join(n.dir, "driver", "csi.sock") }
func (n *node) config() string       { return filepath.Join(n.dir, "etc", "csi-registrar") }
func (n *node) dropIn(name string) string {
	return filepath.Join(n.config(), "conf.d", name)
}

// newNode makes the directory and starts what is not a process.
func newNode(ctx context.Context, demo Demo) (_ *node, err error) {
	n := &node{demo: demo, began: time.Now(), events: newEventLog()}
	if n.dir, err = tempDir(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.close())
		}
	}()
	if err := n.writeFiles(); err != nil {
		return nil, fmt.Errorf("cannot set the stage: %w", err)
	}
	if n.manager, err = fake.StartManager(n.dir); err != nil {
		return nil, err
	}
	n.client = control.NewClient(control.Path(n.dir))
	n.running.Go(n.listen)
	watcher, err := newSocketWatcher(n.events.add, filepath.Dir(n.driverSocket()), n.registry())
	if err != nil {
		return nil, err
	}
	// Not ended by ctx itself: it watches until the processes have ended.
	ctx, n.cancel = context.WithCancel(context.WithoutCancel(ctx))
	n.running.Go(func() { n.watched = watcher.run(ctx) })
	n.kubelet, err = fake.StartKubelet(n.registry(), fake.NewAPIServer(), n.events.add)
	return n, err
}

// listen notes what the daemon tells the service manager.
func (n *node) listen() {
	for line := range n.manager.Events() {
		if line == "READY=1" {
			n.events.add(fake.Event{At: time.Now(), What: ready})
		}
	}
}

// writeFiles makes directories and files: what a node has, what a package of the daemon ships,
// and what a package of a driver ships.
func (n *node) writeFiles() (err error) {
	for _, dir := range []string{n.registry(), filepath.Dir(n.driverSocket()), n.dropIn("")} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return err
		}
	}
	if n.log, err = os.Create(filepath.Join(n.dir, "log")); err != nil {
		return err
	}
	main := fmt.Sprintf("[kubelet]\nroot_dir = %q\n", filepath.Dir(n.registry()))
	if err := os.WriteFile(filepath.Join(n.config(), "config.toml"), []byte(main), 0o640); err != nil {
		return err
	}
	return os.WriteFile(n.dropIn("50-sample.toml"), []byte(n.sampleDropIn()), 0o640)
}

// sampleDropIn is the driver's configuration. A temporary directory is open to more users
// than /run, so the check of the socket's owner is turned off.
func (n *node) sampleDropIn() string {
	return fmt.Sprintf("[driver.%q]\nsocket = %q\nsocket_owner = \"any\"\n", driverName, n.driverSocket())
}

// startDaemon starts the daemon, with what is in the descriptor store, and waits for its
// READY=1.
func (n *node) startDaemon(ctx context.Context) (at time.Time, err error) {
	from := n.events.position()
	cmd := n.manager.Command(context.WithoutCancel(ctx), n.demo.Daemon, "run", "--config-root", n.dir, "--keep-sockets")
	cmd.Stdout, cmd.Stderr = n.log, n.log
	at = time.Now()
	if n.daemon, err = start("daemon", cmd); err != nil {
		return at, err
	}
	// Starting it read the files that the manager closes once the daemon forgets them.
	// Asking the manager orders the one before the other, also for the race detector.
	n.manager.Stored()
	return at, n.whileRunning(ctx, n.daemon, func(ctx context.Context) error {
		_, err := n.events.await(ctx, from, func(e fake.Event) bool { return e.What == ready })
		return err
	})
}

// alive waits for something, but not longer than the process lives.
func (n *node) whileRunning(ctx context.Context, p *process, wait func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watched := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		select {
		case <-p.done:
			cancel(p.unexpectedEnd())
		case <-watched:
		}
	})
	defer watching.Wait()
	defer close(watched)
	return wait(ctx)
}

// awaitStatus waits until the daemon says of the driver what is wanted.
func (n *node) awaitStatus(ctx context.Context, want func(status.Driver) bool) (found status.Driver, err error) {
	err = n.whileRunning(ctx, n.daemon, func(ctx context.Context) error {
		for document, err := range n.client.Watch(ctx) {
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

// unchanged waits until the kubelet has looked at everything, and proves that since the
// position nothing happened to the registration: no file event, no call that changes it.
func (n *node) unchanged(ctx context.Context, from int) error {
	// Two rounds: the first may have begun before what it should not see.
	for at, rounds := n.events.position(), 0; rounds < 2; rounds++ {
		if _, err := n.events.await(ctx, at, func(e fake.Event) bool { return e.What == fake.Reconciled }); err != nil {
			return fmt.Errorf("the kubelet does not look: %w", err)
		}
		at = n.events.position()
	}
	for _, e := range n.events.since(from) {
		if e.Socket == n.registration() {
			return fmt.Errorf("the kubelet should have seen nothing, but %s was %s", e.Socket, e.What)
		}
	}
	return nil
}

// inode identifies the registration socket's file.
func (n *node) inode() (uint64, error) {
	info, err := os.Lstat(n.registration())
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
func (n *node) showLog() error {
	const lines = 15
	text, err := os.ReadFile(n.log.Name())
	if err != nil {
		return fmt.Errorf("cannot show the log: %w", err)
	}
	all := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
	fmt.Fprintf(n.demo.Out, "\nThe last lines of the log of daemon and driver:\n%s\n",
		bytes.Join(all[max(0, len(all)-lines):], []byte("\n")))
	return nil
}

// close ends everything that the stage started, and removes its directory.
func (n *node) close() error {
	err := errors.Join(n.driver.end(), n.daemon.end())
	if n.cancel != nil {
		n.cancel()
	}
	if n.manager != nil {
		err = errors.Join(err, n.manager.Close())
	}
	if n.kubelet != nil {
		err = errors.Join(err, n.kubelet.Stop())
	}
	n.running.Wait()
	if n.log != nil {
		err = errors.Join(err, n.log.Close())
	}
	return errors.Join(err, n.watched, os.RemoveAll(n.dir))
}
