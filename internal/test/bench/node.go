package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/test/fake"
)

// program is a registrar to be measured.
type program struct {
	args     []string // {root}, {socket}, {registry} and {name} are replaced
	notifies bool     // one process for all drivers, which says READY=1; else one for each
	// environment is set beside that of this process.
	environment []string
}

// node is a temporary root with a configuration of some drivers, which are not started yet.
type node struct {
	root    string
	run     string // what its run points to: memory, as on every node
	drivers []*fake.Driver
	manager *fake.Manager
	kubelet *fake.Kubelet
	writes  atomic.Int64 // of the CSINode: each registration and each end of one
	running []*exec.Cmd
}

func newNode(n int) (_ *node, err error) {
	b := &node{}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	if b.root, err = os.MkdirTemp("", "b"); err != nil {
		return nil, err
	}
	if b.run, err = os.MkdirTemp("/dev/shm", "b"); err != nil {
		return nil, err
	}
	if err := os.Symlink(b.run, filepath.Join(b.root, "run")); err != nil {
		return nil, err
	}
	var conf strings.Builder
	fmt.Fprintf(&conf, "[kubelet]\nroot_dir = %q\n[log]\nlevel = \"warn\"\n", filepath.Join(b.root, "k"))
	for i := range n {
		name := fmt.Sprintf("d%d.example", i)
		// Small buffers: a thousand drivers are one process here.
		d := fake.NewDriver(filepath.Join(b.root, "s", name), fake.Healthy(name), grpc.ReadBufferSize(4<<10), grpc.WriteBufferSize(4<<10))
		fmt.Fprintf(&conf, "[driver.%q]\nsocket = %q\nsocket_owner = \"any\"\n", name, d.Socket)
		b.drivers = append(b.drivers, d)
	}
	for _, dir := range []string{rootdir.PluginsRegistry("k"), "s", "etc/csi-registrar"} {
		if err := os.MkdirAll(filepath.Join(b.root, dir), 0o755); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(filepath.Join(b.root, "etc/csi-registrar/config.toml"), []byte(conf.String()), 0o644); err != nil {
		return nil, err
	}
	if b.manager, err = fake.StartManager(b.root); err != nil {
		return nil, err
	}
	b.manager.SetMost(4096)
	return b, nil
}

func (b *node) registry() string    { return rootdir.PluginsRegistry(filepath.Join(b.root, "k")) }
func (b *node) nameOf(i int) string { return filepath.Base(b.drivers[i].Socket) }

// registrationSocket is that of driver i, by the name that both registrars give it.
func (b *node) registrationSocket(i int) string {
	return filepath.Join(b.registry(), rootdir.SocketName(b.nameOf(i)))
}

// serve starts all drivers.
func (b *node) serve() error {
	for _, d := range b.drivers {
		if _, err := d.Start(); err != nil {
			return err
		}
	}
	return nil
}

// register starts a kubelet and waits until it has registered all drivers, and has told the
// registrar: a registration without an answer is repeated after a kill.
func (b *node) register(ctx context.Context) (err error) {
	b.kubelet, err = fake.StartKubelet(b.registry(), fake.NewAPIServer(), func(e fake.Event) {
		if e.What == fake.Registered || e.What == fake.Deregistered {
			b.writes.Add(1)
		}
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	for len(b.kubelet.Registered()) < len(b.drivers) || !b.kubelet.Idle() {
		if err := sleep(ctx, 50*time.Millisecond); err != nil {
			return fmt.Errorf("%d of %d drivers are registered: %w", len(b.kubelet.Registered()), len(b.drivers), err)
		}
	}
	return nil
}

// start starts the program and returns how long it took to be ready, if it says so.
func (b *node) start(ctx context.Context, p program) (time.Duration, error) {
	if !p.notifies {
		for i := range b.drivers {
			args := b.fill(p, i)
			cmd := exec.Command(args[0], args[1:]...)
			if err := cmd.Start(); err != nil {
				return 0, err
			}
			b.running = append(b.running, cmd)
		}
		return 0, nil
	}
	args := b.fill(p, 0)
	cmd := b.manager.Command(context.WithoutCancel(ctx), args[0], args[1:]...)
	cmd.Env = append(cmd.Env, p.environment...)
	cmd.Stderr = os.Stderr
	begun := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	b.running = append(b.running, cmd)
	late := time.After(10 * time.Second)
	for {
		select {
		case e := <-b.manager.Events():
			if e == "READY=1" {
				return time.Since(begun), nil
			}
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-late:
			return 0, errors.New("not ready within 10 s")
		}
	}
}

func (b *node) fill(p program, i int) []string {
	replace := strings.NewReplacer("{root}", b.root, "{registry}", b.registry(), "{socket}", b.drivers[i].Socket, "{name}", b.nameOf(i))
	var args []string
	for _, a := range p.args {
		args = append(args, replace.Replace(a))
	}
	return args
}

// end ends the program with a signal. How it ends is its own affair: the peer's exit code
// says nothing.
func (b *node) end(s syscall.Signal) error {
	var errs []error
	for _, cmd := range b.running {
		if err := cmd.Process.Signal(s); !errors.Is(err, os.ErrProcessDone) {
			errs = append(errs, err)
		}
		_ = cmd.Wait()
	}
	b.running = nil
	return errors.Join(errs...)
}

// reset makes the next start as the first: nothing published, nothing kept.
func (b *node) reset() error {
	return errors.Join(b.end(syscall.SIGKILL), b.manager.Drop(), os.RemoveAll(b.registry()), os.Mkdir(b.registry(), 0o755),
		os.RemoveAll(filepath.Join(b.run, "csi-registrar")))
}

// close ends everything and removes the directories.
func (b *node) close() error {
	err := b.end(syscall.SIGTERM)
	if b.kubelet != nil {
		err = errors.Join(err, b.kubelet.Stop())
	}
	for _, d := range b.drivers {
		d.Kill()
	}
	if b.manager != nil {
		err = errors.Join(err, b.manager.Close())
	}
	return errors.Join(err, os.RemoveAll(b.root), os.RemoveAll(b.run))
}

// sleep waits, but not longer than ctx.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
