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

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/pluginreg"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
)

const nodeID = "demo-node"

// unchangedText is what the kubelet sees of a restart.
const unchangedText = "does not notice: the driver stays registered"

func (n *node) daemonStarts(ctx context.Context) error {
	began, err := n.startDaemon(ctx)
	if err != nil {
		return err
	}
	n.print(time.Now(), daemon, "started; ready after %.0f ms", milliseconds(time.Since(began)))
	status, err := n.awaitStatus(ctx, func(d status.Driver) bool {
		return d.Driver == status.Absent && d.Registration == status.None
	})
	if err != nil {
		return err
	}
	if left, err := os.ReadDir(n.registry()); err != nil || len(left) > 0 {
		return errors.Join(fmt.Errorf("plugins_registry should be empty, but has %v", left), err)
	}
	n.print(time.Now(), daemon, "waits for driver/csi.sock; state of the driver: %s", status.State)
	return nil
}

func (n *node) driverStarts(ctx context.Context) error {
	from := n.events.position()
	if err := n.startDriver(ctx); err != nil {
		return err
	}
	served, err := n.events.await(ctx, from, socketEvent(appeared, n.driverSocket()))
	if err != nil {
		return fmt.Errorf("the driver does not serve: %w", err)
	}
	n.print(served.At, driver, "serves driver/csi.sock")
	published, err := n.events.await(ctx, from, socketEvent(appeared, n.registration()))
	if err != nil {
		return fmt.Errorf("the daemon publishes no registration socket: %w", err)
	}
	n.print(published.At, daemon, "queried it and published a registration socket in plugins_registry, %.1f ms after it served", between(served, published))
	registered, err := n.events.await(ctx, from, socketEvent(fake.Registered, n.registration()))
	if err != nil {
		return fmt.Errorf("the kubelet does not register it: %w", err)
	}
	if registered.Driver != driverName || registered.NodeID != nodeID {
		return fmt.Errorf("the kubelet registered %q on node %q", registered.Driver, registered.NodeID)
	}
	n.print(registered.At, kubelet, "found it in its one-second loop, called GetInfo, queried the driver and registered %s on %s, %.0f ms later",
		driverName, nodeID, between(published, registered))
	if _, err := n.awaitStatus(ctx, isRegistered); err != nil {
		return err
	}
	n.print(time.Now(), daemon, "received the confirmation of the kubelet; state: registered")
	return nil
}

func isRegistered(d status.Driver) bool {
	return d.Driver == status.Ready && d.Registration == status.Registered
}

func (n *node) startDriver(ctx context.Context) (err error) {
	cmd := exec.CommandContext(context.WithoutCancel(ctx), n.demo.Driver,
		"--socket", n.driverSocket(), "--node-id", nodeID)
	cmd.Stdout, cmd.Stderr = n.log, n.log
	n.driver, err = start("driver", cmd)
	return err
}

// stopDriver ends the driver and waits until the daemon reports it; the registration stays.
func (n *node) stopDriver(ctx context.Context) error {
	if err := n.driver.stop(ctx); err != nil {
		return err
	}
	n.print(time.Now(), driver, "ended; its socket is gone")
	_, err := n.awaitStatus(ctx, func(d status.Driver) bool {
		return d.Driver == status.Absent && d.Registration == status.Registered
	})
	if err != nil {
		return err
	}
	n.print(time.Now(), daemon, "noticed it, and keeps the registration")
	return nil
}

func (n *node) driverRestarts(ctx context.Context) error {
	from := n.events.position()
	if err := n.stopDriver(ctx); err != nil {
		return err
	}
	if err := n.startDriver(ctx); err != nil {
		return err
	}
	served, err := n.events.await(ctx, from, socketEvent(appeared, n.driverSocket()))
	if err != nil {
		return fmt.Errorf("the driver does not serve again: %w", err)
	}
	n.print(served.At, driver, "serves again")
	if _, err := n.awaitStatus(ctx, isRegistered); err != nil {
		return err
	}
	n.print(time.Now(), daemon, "queried it again: nothing has changed")
	if err := n.unchanged(ctx, from); err != nil {
		return err
	}
	n.print(time.Now(), kubelet, unchangedText)
	return nil
}

func (n *node) daemonKilled(ctx context.Context) error {
	from := n.events.position()
	before, err := os.Lstat(n.registration())
	if err != nil {
		return err
	}
	if err := n.daemon.kill(ctx); err != nil {
		return err
	}
	if !slices.Contains(n.manager.Stored(), "registration-"+driverName) {
		return fmt.Errorf("the registration socket is not in the descriptor store, which has %q", n.manager.Stored())
	}
	n.print(time.Now(), daemon, "killed; the listening socket stays open in the store")

	asked := time.Now()
	asking, cancel := context.WithCancel(ctx)
	answer := make(chan error, 1)
	go func() { answer <- n.askMeanwhile(asking) }()
	n.print(asked, kubelet, "calls GetInfo while no daemon runs, and waits")
	began, err := n.startDaemon(ctx)
	if err != nil {
		cancel()
		return errors.Join(err, <-answer)
	}
	n.print(time.Now(), daemon, "started again; ready after %.0f ms", milliseconds(time.Since(began)))
	err = <-answer
	cancel()
	if err != nil {
		return err
	}
	n.print(time.Now(), kubelet, "received the answer after %.0f ms; the call was not refused", milliseconds(time.Since(asked)))

	if _, err := n.awaitStatus(ctx, isRegistered); err != nil {
		return err
	}
	if err := n.unchanged(ctx, from); err != nil {
		return err
	}
	after, err := os.Lstat(n.registration())
	if err != nil {
		return err
	}
	if !os.SameFile(before, after) {
		return errors.New("the registration socket was replaced")
	}
	n.print(time.Now(), kubelet, unchangedText)
	n.print(time.Now(), daemon, "state: registered, on the same socket")
	return nil
}

// askMeanwhile calls GetInfo as the kubelet does, while no daemon runs.
func (n *node) askMeanwhile(ctx context.Context) error {
	info, _, err := pluginreg.GetInfo(ctx, n.registration())
	if err != nil {
		return fmt.Errorf("the kubelet's call was refused: %w", err)
	}
	if info.Name != driverName {
		return fmt.Errorf("the kubelet's call was answered for %q", info.Name)
	}
	return nil
}

func (n *node) configurationError(ctx context.Context) error {
	const wrong = `timeot = "5s"`
	from := n.events.position()
	file := n.dropIn("60-wrong.toml")
	text := fmt.Sprintf("[driver.%q]\n%s\n", driverName, wrong)
	if err := os.WriteFile(file, []byte(text), 0o640); err != nil {
		return fmt.Errorf("cannot write the invalid file: %w", err)
	}
	n.print(time.Now(), admin, "writes %s into 60-wrong.toml and reloads", wrong)
	_, err := n.client.Reload(ctx, false)
	if err == nil {
		return errors.New("the daemon accepted an invalid configuration")
	}
	refusal, ok := errors.AsType[*control.Error](err)
	if !ok {
		return err
	}
	n.print(time.Now(), daemon, "keeps the configuration in force and reports: %s", refusal.Text)
	if _, err := n.awaitStatus(ctx, isRegistered); err != nil {
		return err
	}
	if err := os.Remove(file); err != nil {
		return fmt.Errorf("cannot remove the invalid file: %w", err)
	}
	if _, err := n.client.Reload(ctx, false); err != nil {
		return fmt.Errorf("reload after the file was removed: %w", err)
	}
	n.print(time.Now(), admin, "removes the file and reloads, without errors")
	if err := n.unchanged(ctx, from); err != nil {
		return err
	}
	n.print(time.Now(), kubelet, unchangedText)
	return nil
}

func (n *node) driverStops(ctx context.Context) error {
	from := n.events.position()
	if err := n.stopDriver(ctx); err != nil {
		return err
	}
	if err := n.unchanged(ctx, from); err != nil {
		return err
	}
	n.print(time.Now(), kubelet, unchangedText)
	n.print(time.Now(), daemon, "waits for it without a limit: without a registration, no volume could be unmounted")
	return nil
}

func (n *node) driverRemoved(ctx context.Context) error {
	from := n.events.position()
	if err := os.Remove(n.dropIn("50-sample.toml")); err != nil {
		return fmt.Errorf("cannot remove the driver's configuration: %w", err)
	}
	n.print(time.Now(), admin, "removes 50-sample.toml and reloads")
	if _, err := n.client.Reload(ctx, false); err != nil {
		return err
	}
	gone, err := n.events.await(ctx, from, socketEvent(removed, n.registration()))
	if err != nil {
		return fmt.Errorf("the registration socket is still there: %w", err)
	}
	n.print(gone.At, daemon, "removed the registration socket")
	deregistered, err := n.events.await(ctx, from, socketEvent(fake.Deregistered, n.registration()))
	if err != nil {
		return fmt.Errorf("the kubelet has not deregistered the driver: %w", err)
	}
	n.print(deregistered.At, kubelet, "noticed it and deregistered the driver, for the only time")
	if err := n.daemon.stop(ctx); err != nil {
		return err
	}
	// A pidfd of the kubelet stays until the unit stops.
	if left := n.manager.Stored(); slices.ContainsFunc(left, func(name string) bool { return name != "kubelet" }) {
		return fmt.Errorf("the descriptor store still has %q", left)
	}
	left, err := os.ReadDir(n.registry())
	if err != nil {
		return fmt.Errorf("cannot read plugins_registry: %w", err)
	}
	if len(left) > 0 {
		return fmt.Errorf("plugins_registry still has %v", left)
	}
	n.print(time.Now(), daemon, "stopped; no file and no descriptor is left")
	return n.checkEvents()
}

// checkEvents returns an error unless each event of the registration socket happened exactly once.
func (n *node) checkEvents() error {
	count := map[fake.Action]int{}
	for _, e := range n.events.since(0) {
		if e.Socket == n.registration() {
			count[e.What]++
		}
	}
	once := map[fake.Action]int{appeared: 1, fake.Registered: 1, removed: 1, fake.Deregistered: 1}
	if !maps.Equal(count, once) {
		return fmt.Errorf("events of the registration socket: %v, want each once", count)
	}
	return nil
}
