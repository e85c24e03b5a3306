package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
	"csi-registrar/internal/test/sampledriver"
)

// node is a simulated node in a temporary directory, with everything that runs on it.
type node struct {
	demo   Demo
	began  time.Time
	dir    string
	log    *os.File // of the daemon and the driver; printed if a step fails
	events *eventLog

	manager *fake.Manager
	client  *control.Client
	daemon  *process
	driver  *process

	kubelet *fake.Kubelet

	running sync.WaitGroup // the goroutines of socketWatcher and listen
	cancel  context.CancelFunc
	watched error // of the socketWatcher; read it after running.Wait
}

const driverName = sampledriver.DefaultName

// Paths below the temporary directory, as on a node below /.
func (n *node) registry() string { return rootdir.PluginsRegistry(filepath.Join(n.dir, "kubelet")) }
func (n *node) registration() string {
	return filepath.Join(n.registry(), rootdir.SocketName(driverName))
}
func (n *node) driverSocket() string { return filepath.Join(n.dir, "driver", "csi.sock") }
func (n *node) config() string       { return filepath.Join(n.dir, "etc", "csi-registrar") }
func (n *node) dropIn(name string) string {
	return filepath.Join(n.config(), "conf.d", name)
}

// newNode creates the directory and starts everything but the daemon and the driver.
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
		return nil, fmt.Errorf("cannot create the node: %w", err)
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
	// The watcher runs until the processes have ended, also if ctx is done before that.
	ctx, n.cancel = context.WithCancel(context.WithoutCancel(ctx))
	n.running.Go(func() { n.watched = watcher.run(ctx) })
	n.kubelet, err = fake.StartKubelet(n.registry(), fake.NewAPIServer(), n.events.add)
	return n, err
}

// listen records the daemon's READY=1.
func (n *node) listen() {
	for line := range n.manager.Events() {
		if line == "READY=1" {
			n.events.add(fake.Event{At: time.Now(), What: ready})
		}
	}
}

// writeFiles creates the directories and the configuration of the daemon and of the driver.
func (n *node) writeFiles() (err error) {
	for _, dir := range []string{n.registry(), filepath.Dir(n.driverSocket()), n.dropIn("")} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return err
		}
	}
	if n.log, err = os.Create(filepath.Join(n.dir, "log")); err != nil {
		return err
	}
	config := fmt.Sprintf("[kubelet]\nroot_dir = %q\n", filepath.Dir(n.registry()))
	if err := os.WriteFile(filepath.Join(n.config(), "config.toml"), []byte(config), 0o640); err != nil {
		return err
	}
	// More users can write to a temporary directory than to /run, so the owner is not checked.
	driver := fmt.Sprintf("[driver.%q]\nsocket = %q\nsocket_owner = \"any\"\n", driverName, n.driverSocket())
	return os.WriteFile(n.dropIn("50-sample.toml"), []byte(driver), 0o640)
}

// startDaemon starts the daemon with the descriptors in the store and waits for READY=1.
func (n *node) startDaemon(ctx context.Context) (at time.Time, err error) {
	from := n.events.position()
	cmd := n.manager.Command(context.WithoutCancel(ctx), n.demo.Daemon, "run", "--config-root", n.dir, "--keep-sockets")
	cmd.Stdout, cmd.Stderr = n.log, n.log
	at = time.Now()
	if n.daemon, err = start("daemon", cmd); err != nil {
		return at, err
	}
	// Start used files that the manager closes when the daemon removes them from the store. The
	// manager's lock orders the two for the race detector.
	n.manager.Stored()
	return at, n.whileRunning(ctx, n.daemon, func(ctx context.Context) error {
		_, err := n.events.await(ctx, from, func(e fake.Event) bool { return e.What == ready })
		return err
	})
}

// whileRunning calls wait with a context that is canceled when the process ends.
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

// awaitStatus waits until the driver's status is as wanted.
func (n *node) awaitStatus(ctx context.Context, want func(status.Driver) bool) (found status.Driver, err error) {
	err = n.whileRunning(ctx, n.daemon, func(ctx context.Context) error {
		for status, err := range n.client.Watch(ctx) {
			if err != nil {
				return err
			}
			if d, ok := status.Driver(driverName); ok {
				if found = d; want(d) {
					return nil
				}
			}
		}
		return fmt.Errorf("the daemon reports: driver %s, registration %s (%s): %w",
			found.Driver, found.Registration, found.Reason, context.Cause(ctx))
	})
	return found, err
}

// unchanged waits for two rounds of the kubelet and returns an error if the registration socket or
// the registration has changed since the position.
func (n *node) unchanged(ctx context.Context, from int) error {
	// The first round may have begun before the event that it must not see.
	for at, rounds := n.events.position(), 0; rounds < 2; rounds++ {
		if _, err := n.events.await(ctx, at, func(e fake.Event) bool { return e.What == fake.Reconciled }); err != nil {
			return fmt.Errorf("the kubelet does not reconcile: %w", err)
		}
		at = n.events.position()
	}
	for _, e := range n.events.since(from) {
		if e.Socket == n.registration() {
			return fmt.Errorf("the kubelet should not see a change, but %s was %s", e.Socket, e.What)
		}
	}
	return nil
}

// showLog prints the last log lines of the daemon and the driver.
func (n *node) showLog() error {
	const lines = 15
	text, err := os.ReadFile(n.log.Name())
	if err != nil {
		return fmt.Errorf("cannot show the log: %w", err)
	}
	all := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
	fmt.Fprintf(n.demo.Out, "\nThe last log lines of the daemon and the driver:\n%s\n",
		bytes.Join(all[max(0, len(all)-lines):], []byte("\n")))
	return nil
}

// close ends everything that was started and removes the directory.
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
