// Package sampledriver is a real CSI driver that needs nothing but a directory: a volume is a
// directory below a data directory, publishing it is a bind mount. cmd/csi-sample-driver
// serves it, for the demo, for tests and as the example for authors of drivers. It passes
// the CSI conformance suite (internal/test/e2e/sanity).
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
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"csi-registrar/internal/sys/unixsock"
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
	Data       string            // the directory of the volumes, absolute; made when needed
	// the kubelet's; volumes are mounted below its pods and plugins only
	RootDir string
	Log     *slog.Logger

	mu    sync.Mutex // one call that touches volumes at a time: they are short
	mount mounter    // replaced in tests
}

// Serve serves the driver on a Unix socket until ctx is done, then removes the socket.
// The socket has mode 0600. A stale socket at the path is replaced, a live one is an error.
func (d *Driver) Serve(ctx context.Context, socket string) error {
	if d.mount == nil {
		d.mount = bindMount{}
	}
	for _, dir := range []string{d.Data, filepath.Dir(socket)} {
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return fmt.Errorf("cannot make a directory of the driver: %w", err)
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

// listen binds the socket, mode 0600. A stale one that a killed driver left is removed first.
func listen(ctx context.Context, path string) (net.Listener, error) {
	_, err := unixsock.Vacate(ctx, path)
	if _, ok := errors.AsType[*unixsock.InUse](err); ok {
		return nil, fmt.Errorf("cannot listen on the driver's socket: %w; stop or remove that, or give another --socket", err)
	}
	if err != nil {
		return nil, fmt.Errorf("cannot listen on the driver's socket: %w", err)
	}
	listener, _, err := unixsock.Listen(ctx, path, nil)
	if err != nil {
		return nil, fmt.Errorf("cannot listen on the driver's socket: %w", err)
	}
	listener.SetUnlinkOnClose(true)
	return listener, nil
}
