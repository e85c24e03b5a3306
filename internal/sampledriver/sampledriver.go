// Package sampledriver is a true CSI driver that needs nothing but a folder: a volume
// is a folder below a data folder, publishing it is a bind mount. It is the driver of
// the demo, of the system tests and of the example package for authors of drivers, and
// passes the CSI conformance suite (internal/e2e/sanity).
package sampledriver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
)

// DefaultName is the name under which the driver presents itself.
const DefaultName = "sample.csi.csi-registrar.dev"

// grace is how long calls that are under way may take to end after Serve was told to
// stop. Each of the driver's calls takes milliseconds.
const grace = 2 * time.Second

// Driver is the driver and what it says of itself. The zero value of an optional
// field leaves it out of the answers.
type Driver struct {
	Name       string            // GetPluginInfo's name
	Version    string            // vendor version, not empty
	NodeID     string            // NodeGetInfo's node_id
	Topology   map[string]string // accessible topology; optional
	MaxVolumes int64             // volumes that may be published on this node; 0: no limit
	Data       string            // the folder of the volumes, absolute; made when needed
	Log        *slog.Logger

	mu    sync.Mutex // one call that touches volumes at a time: they are short
	mount mounter    // replaced in tests
}

// Serve serves the driver on a Unix socket until ctx is done, then takes the socket away.
// The socket has mode 0600. A dead socket at the path is replaced, a live one is an error.
func (d *Driver) Serve(ctx context.Context, socket string) error {
	if d.mount == nil {
		d.mount = bindMount{}
	}
	for _, dir := range []string{d.Data, filepath.Dir(socket)} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return fmt.Errorf("cannot make a folder of the driver: %w", err)
		}
	}
	listener, err := listen(ctx, socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	csi.RegisterIdentityServer(server, identity{d: d})
	csi.RegisterControllerServer(server, controller{d: d})
	csi.RegisterNodeServer(server, node{d: d})
	d.Log.Info("serving", "driver", d.Name, "socket", socket, "node_id", d.NodeID)

	stopped := make(chan struct{})
	unhook := context.AfterFunc(ctx, func() {
		defer close(stopped)
		timer := time.AfterFunc(grace, server.Stop)
		defer timer.Stop()
		server.GracefulStop()
	})
	err = server.Serve(listener)
	if !unhook() {
		<-stopped
		return nil
	}
	server.Stop()
	return fmt.Errorf("cannot serve %s: %w", socket, err)
}

// listen binds the socket. Its mode is set before bind gives it a name: the file system
// takes it over from the socket, so nobody else can connect at any moment.
func listen(ctx context.Context, path string) (net.Listener, error) {
	if err := removeDead(ctx, path); err != nil {
		return nil, err
	}
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var chmod error
		err := c.Control(func(fd uintptr) { chmod = syscall.Fchmod(int(fd), 0o600) })
		return errors.Join(err, chmod)
	}}
	listener, err := config.Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("cannot listen on the driver's socket: %w", err)
	}
	return listener, nil
}

// removeDead takes away the socket that a killed driver left behind.
func removeDead(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("cannot look at the driver's socket: %w", err)
	case info.Mode().Type() != os.ModeSocket:
		return fmt.Errorf("cannot listen on %s: it exists and is no socket; remove it, or give another --socket", path)
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err == nil {
		return errors.Join(fmt.Errorf("cannot listen on %s: another process serves it; stop that, or give another --socket", path), conn.Close())
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("cannot find out if %s is in use: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("cannot remove a dead socket: %w", err)
	}
	return nil
}
