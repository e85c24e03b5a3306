package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"csi-registrar/internal/fake"
)

// node is a temporary root with a configuration of n drivers.
type node struct {
	root    string
	run     string // where run leads to: memory, as on every node
	manager *fake.Manager
	cmd     *exec.Cmd
}

func newNode(n int) (*node, error) {
	root, err := os.MkdirTemp("", "b")
	if err != nil {
		return nil, err
	}
	b := &node{root: root}
	if b.run, err = os.MkdirTemp("/dev/shm", "b"); err != nil {
		return nil, errors.Join(err, os.Remove(root))
	}
	if err := os.Symlink(b.run, filepath.Join(root, "run")); err != nil {
		return nil, err
	}
	var conf strings.Builder
	fmt.Fprintf(&conf, "[kubelet]\nroot_dir = %q\n[log]\nlevel = \"warn\"\n", filepath.Join(root, "k"))
	for i := range n {
		fmt.Fprintf(&conf, "[driver.%q]\nsocket = %q\n", name(i), b.socket(i))
	}
	for _, dir := range []string{"k", "s", "etc/csi-registrar"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return nil, err
		}
	}
	if err := os.WriteFile(filepath.Join(root, "etc/csi-registrar/config.toml"), []byte(conf.String()), 0o644); err != nil {
		return nil, err
	}
	b.manager, err = fake.StartManager(root)
	if b.manager != nil {
		b.manager.SetMost(4096)
	}
	return b, err
}

func name(i int) string              { return fmt.Sprintf("d%d.example", i) }
func (b *node) registry() string     { return filepath.Join(b.root, "k", "plugins_registry") }
func (b *node) socket(i int) string  { return filepath.Join(b.root, "s", name(i)) }
func (b *node) regSock(i int) string { return filepath.Join(b.registry(), name(i)+"-reg.sock") }
func (b *node) program(o options) []string {
	return []string{o.bin, "run", "--config-root", b.root, "--keep-sockets"}
}

// start starts the daemon and returns how long it took to be ready.
func (b *node) start(ctx context.Context, o options) (time.Duration, error) {
	args := b.program(o)
	b.cmd = b.manager.Command(ctx, args[0], args[1:]...)
	b.cmd.Stderr = os.Stderr
	begun := time.Now()
	if err := b.cmd.Start(); err != nil {
		return 0, err
	}
	for {
		select {
		case e := <-b.manager.Events():
			if e == "READY=1" {
				return time.Since(begun), nil
			}
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(10 * time.Second):
			return 0, fmt.Errorf("not ready within 10 s")
		}
	}
}

// end ends the daemon with a signal.
func (b *node) end(s syscall.Signal) error {
	if b.cmd == nil || b.cmd.Process == nil {
		return nil
	}
	if err := b.cmd.Process.Signal(s); err != nil {
		return err
	}
	if err := b.cmd.Wait(); err != nil && s != syscall.SIGKILL {
		return err
	}
	b.cmd = nil
	return nil
}

// close ends everything and removes the folder.
func (b *node) close() error {
	err := b.end(syscall.SIGTERM)
	if cerr := b.manager.Close(); err == nil {
		err = cerr
	}
	return first(err, os.RemoveAll(b.root), os.RemoveAll(b.run))
}

// drivers serves n drivers.
func (b *node) drivers(n int) (stop func() error, err error) {
	all := make([]*driver, n)
	for i := range n {
		if all[i], _, err = serve(name(i), b.socket(i)); err != nil {
			return nil, err
		}
	}
	return func() error {
		var err error
		for _, d := range all {
			if e := d.stop(); e != nil {
				err = e
			}
		}
		return err
	}, nil
}
