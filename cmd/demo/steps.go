package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"time"

	"csi-registrar/internal/control"
	"csi-registrar/internal/fake"
	"csi-registrar/internal/pluginreg"
	"csi-registrar/internal/status"
)

const nodeID = "demo-node"

// nothingSeen is the kubelet's line in the steps that are about just that.
const nothingSeen = "saw nothing of it: registered once, never lost"

func (s *stage) daemonStarts(ctx context.Context) error {
	began, err := s.startDaemon(ctx)
	if err != nil {
		return err
	}
	s.tell(time.Now(), theDaemon, "started; ready after %.0f ms", milliseconds(time.Since(began)))
	status, err := s.awaitStatus(ctx, func(d status.Driver) bool {
		return d.Driver == status.Absent && d.Registration == status.None
	})
	if err != nil {
		return err
	}
	if left, err := os.ReadDir(s.registry()); err != nil || len(left) > 0 {
		return errors.Join(fmt.Errorf("plugins_registry should be empty, but holds %v", left), err)
	}
	s.tell(time.Now(), theDaemon, "waits for driver/csi.sock; state of the driver: %s", status.State)
	return nil
}

func (s *stage) driverStarts(ctx context.Context) error {
	from := s.events.now()
	if err := s.startDriver(ctx); err != nil {
		return err
	}
	served, err := s.events.await(ctx, from, is(appeared, s.driverSocket()))
	if err != nil {
		return fmt.Errorf("the driver does not serve: %w", err)
	}
	s.tell(served.At, theDriver, "serves driver/csi.sock")
	published, err := s.events.await(ctx, from, is(appeared, s.registration()))
	if err != nil {
		return fmt.Errorf("the daemon publishes no registration socket: %w", err)
	}
	s.tell(published.At, theDaemon, "asked it, and put a registration socket for it into plugins_registry: %.1f ms after it served", between(served, published))
	registered, err := s.events.await(ctx, from, is(fake.Registered, s.registration()))
	if err != nil {
		return fmt.Errorf("the kubelet does not register it: %w", err)
	}
	if registered.Driver != driverName || registered.NodeID != nodeID {
		return fmt.Errorf("the kubelet registered %q on node %q", registered.Driver, registered.NodeID)
	}
	s.tell(registered.At, theKubelet, "looks once a second; saw it, called GetInfo, asked the driver, and registered %s on %s: %.0f ms later",
		driverName, nodeID, between(published, registered))
	if _, err := s.awaitStatus(ctx, isRegistered); err != nil {
		return err
	}
	s.tell(time.Now(), theDaemon, "was told so by the kubelet; state: registered")
	return nil
}

func isRegistered(d status.Driver) bool {
	return d.Driver == status.Ready && d.Registration == status.Registered
}

func (s *stage) startDriver(ctx context.Context) (err error) {
	cmd := exec.CommandContext(context.WithoutCancel(ctx), s.story.Driver,
		"--socket", s.driverSocket(), "--node-id", nodeID)
	cmd.Stdout, cmd.Stderr = s.log, s.log
	s.driver, err = start("driver", cmd)
	return err
}

// stopDriver ends the driver and waits until the daemon knows; the registration stays.
func (s *stage) stopDriver(ctx context.Context) error {
	if err := s.driver.stop(ctx); err != nil {
		return err
	}
	s.tell(time.Now(), theDriver, "ended; its socket is gone")
	_, err := s.awaitStatus(ctx, func(d status.Driver) bool {
		return d.Driver == status.Absent && d.Registration == status.Registered
	})
	if err != nil {
		return err
	}
	s.tell(time.Now(), theDaemon, "noticed it, and leaves the registration alone")
	return nil
}

func (s *stage) driverRestarts(ctx context.Context) error {
	from := s.events.now()
	if err := s.stopDriver(ctx); err != nil {
		return err
	}
	if err := s.startDriver(ctx); err != nil {
		return err
	}
	served, err := s.events.await(ctx, from, is(appeared, s.driverSocket()))
	if err != nil {
		return fmt.Errorf("the driver does not serve again: %w", err)
	}
	s.tell(served.At, theDriver, "serves again")
	if _, err := s.awaitStatus(ctx, isRegistered); err != nil {
		return err
	}
	s.tell(time.Now(), theDaemon, "asked it again: nothing has changed, nothing to do")
	if err := s.undisturbed(ctx, from); err != nil {
		return err
	}
	s.tell(time.Now(), theKubelet, nothingSeen)
	return nil
}

func (s *stage) daemonKilled(ctx context.Context) error {
	from := s.events.now()
	before, err := s.inode()
	if err != nil {
		return err
	}
	if err := s.daemon.kill(ctx); err != nil {
		return err
	}
	if !slices.Contains(s.manager.Stored(), "registration-"+driverName) {
		return fmt.Errorf("the registration socket is not in the descriptor store, which holds %q", s.manager.Stored())
	}
	s.tell(time.Now(), theDaemon, "killed; the listening socket lives on in the store")

	asked := time.Now()
	asking, cancel := context.WithCancel(ctx)
	answer := make(chan error, 1)
	go func() { answer <- s.askMeanwhile(asking) }()
	s.tell(asked, theKubelet, "calls GetInfo at this very moment, and has to wait")
	began, err := s.startDaemon(ctx)
	if err != nil {
		cancel()
		return errors.Join(err, <-answer)
	}
	s.tell(time.Now(), theDaemon, "started again; ready after %.0f ms",
		milliseconds(time.Since(began)))
	err = <-answer
	cancel()
	if err != nil {
		return err
	}
	s.tell(time.Now(), theKubelet, "was not refused, but answered: after %.0f ms", milliseconds(time.Since(asked)))

	if _, err := s.awaitStatus(ctx, isRegistered); err != nil {
		return err
	}
	if err := s.undisturbed(ctx, from); err != nil {
		return err
	}
	after, err := s.inode()
	if err != nil {
		return err
	}
	if before != after {
		return fmt.Errorf("the registration socket is another one: inode %d, was %d", after, before)
	}
	s.tell(time.Now(), theKubelet, nothingSeen)
	s.tell(time.Now(), theDaemon, "state: registered, on the same socket (inode %d)", after)
	return nil
}

// askMeanwhile is a call of the kubelet while the daemon is not there.
func (s *stage) askMeanwhile(ctx context.Context) error {
	info, _, err := pluginreg.GetInfo(ctx, s.registration())
	if err != nil {
		return fmt.Errorf("the kubelet's call was refused: %w", err)
	}
	if info.Name != driverName {
		return fmt.Errorf("the kubelet's call was answered for %q", info.Name)
	}
	return nil
}

func (s *stage) configurationError(ctx context.Context) error {
	const wrong = `timeot = "5s"`
	from := s.events.now()
	file := s.dropIn("60-wrong.toml")
	text := fmt.Sprintf("[driver.%q]\n%s\n", driverName, wrong)
	if err := os.WriteFile(file, []byte(text), 0o640); err != nil {
		return fmt.Errorf("cannot write a wrong file: %w", err)
	}
	s.tell(time.Now(), theAdmin, "writes %s into 60-wrong.toml, and reloads", wrong)
	err := s.client.Reload(ctx)
	if err == nil {
		return errors.New("the daemon accepted a wrong configuration")
	}
	verdict, ok := errors.AsType[*control.Error](err)
	if !ok {
		return err
	}
	s.tell(time.Now(), theDaemon, "keeps what it has, and says: %s", verdict.Text)
	if _, err := s.awaitStatus(ctx, isRegistered); err != nil {
		return err
	}
	if err := os.Remove(file); err != nil {
		return fmt.Errorf("cannot remove the wrong file: %w", err)
	}
	if err := s.client.Reload(ctx); err != nil {
		return fmt.Errorf("the error was fixed: %w", err)
	}
	s.tell(time.Now(), theAdmin, "removes the file, and reloads; that is accepted")
	if err := s.undisturbed(ctx, from); err != nil {
		return err
	}
	s.tell(time.Now(), theKubelet, nothingSeen)
	return nil
}

func (s *stage) driverGoes(ctx context.Context) error {
	from := s.events.now()
	if err := s.stopDriver(ctx); err != nil {
		return err
	}
	if err := s.undisturbed(ctx, from); err != nil {
		return err
	}
	s.tell(time.Now(), theKubelet, nothingSeen)
	s.tell(time.Now(), theDaemon, "waits for it, for as long as it takes: without a registration, nothing could be unmounted")
	return nil
}

func (s *stage) driverRemoved(ctx context.Context) error {
	from := s.events.now()
	if err := os.Remove(s.dropIn("50-sample.toml")); err != nil {
		return fmt.Errorf("cannot remove the driver's configuration: %w", err)
	}
	s.tell(time.Now(), theAdmin, "removes 50-sample.toml, and reloads")
	if err := s.client.Reload(ctx); err != nil {
		return err
	}
	gone, err := s.events.await(ctx, from, is(removed, s.registration()))
	if err != nil {
		return fmt.Errorf("the registration socket is still there: %w", err)
	}
	s.tell(gone.At, theDaemon, "took the registration socket away")
	deregistered, err := s.events.await(ctx, from, is(fake.Deregistered, s.registration()))
	if err != nil {
		return fmt.Errorf("the kubelet has not noticed: %w", err)
	}
	s.tell(deregistered.At, theKubelet, "saw that, and deregistered the driver: the only time")
	if err := s.daemon.stop(ctx); err != nil {
		return err
	}
	// A pidfd of the kubelet stays until the unit stops.
	if left := s.manager.Stored(); slices.ContainsFunc(left, func(name string) bool { return name != "kubelet" }) {
		return fmt.Errorf("the descriptor store still holds %q", left)
	}
	left, err := os.ReadDir(s.registry())
	if err != nil {
		return fmt.Errorf("cannot look into plugins_registry: %w", err)
	}
	if len(left) > 0 {
		return fmt.Errorf("plugins_registry still holds %v", left)
	}
	s.tell(time.Now(), theDaemon, "ended when told to; nothing is left behind")
	return s.tally()
}

// tally proves what was told of the whole: each thing happened to the registration once.
func (s *stage) tally() error {
	count := map[fake.Action]int{}
	for _, e := range s.events.since(0) {
		if e.Socket == s.registration() {
			count[e.What]++
		}
	}
	once := map[fake.Action]int{appeared: 1, fake.Registered: 1, removed: 1, fake.Deregistered: 1}
	if !maps.Equal(count, once) {
		return fmt.Errorf("each of these should have happened once, and nothing else: %v", count)
	}
	return nil
}
