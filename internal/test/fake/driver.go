package fake

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// The methods of a driver that a registration needs, as keys of Answers.
const (
	GetPluginInfo = "GetPluginInfo"
	Probe         = "Probe"
	NodeGetInfo   = "NodeGetInfo"
)

// Answers has the answers of a driver, and its faults. For all fields but the first three, the zero
// value is that of a healthy driver.
type Answers struct {
	Name       string
	Version    string
	NodeID     string
	MaxVolumes int64
	Topology   map[string]string
	NotReady   bool

	Delay map[string]time.Duration // methods that take this long
	Hang  map[string]bool          // methods that do not answer while this is true
	Fail  map[string]error         // methods that fail with this gRPC error (status.Error)
}

func (a Answers) clone() Answers {
	a.Topology, a.Delay, a.Hang, a.Fail = maps.Clone(a.Topology), maps.Clone(a.Delay), maps.Clone(a.Hang), maps.Clone(a.Fail)
	return a
}

// Driver is a CSI driver (Identity and Node services) with configurable answers. It may be started,
// stopped and changed at any time, by any goroutine.
type Driver struct {
	Socket string

	options []grpc.ServerOption

	mu       sync.Mutex
	answers  Answers
	changed  chan struct{} // closed and replaced by Set
	calls    map[string]int
	listener *net.UnixListener // nil: not started
	server   *grpc.Server      // nil: nothing is served
	// closed when the goroutine that accepts has ended; nil: there is none
	done chan struct{}

	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
}

// NewDriver returns a driver that is not started. The options are for its server.
func NewDriver(socket string, a Answers, options ...grpc.ServerOption) *Driver {
	return &Driver{Socket: socket, options: options, answers: a.clone(), changed: make(chan struct{}), calls: map[string]int{}}
}

// Healthy returns the answers of a driver of that name that is ready.
func Healthy(name string) Answers {
	return Answers{Name: name, Version: "1.0", NodeID: "id-of-" + name}
}

// Set changes the answers of the driver, also to calls that already hang.
func (d *Driver) Set(change func(*Answers)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	a := d.answers.clone()
	change(&a)
	d.answers = a
	close(d.changed)
	d.changed = make(chan struct{})
}

// Calls counts the calls of a method so far.
func (d *Driver) Calls(method string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.calls[method]
}

// Running reports whether the driver was started and not stopped.
func (d *Driver) Running() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.listener != nil
}

// Start starts the driver, and returns the time at which it began to listen. It removes the socket
// that a killed driver has left.
func (d *Driver) Start() (listening time.Time, err error) {
	if err := d.Listen(); err != nil {
		return time.Time{}, err
	}
	at := time.Now()
	return at, d.Serve()
}

// Listen listens but never accepts: connections succeed, calls get no answer.
func (d *Driver) Listen() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.listener != nil {
		return errors.New("the driver is started already")
	}
	if err := os.MkdirAll(filepath.Dir(d.Socket), 0o755); err != nil {
		return err
	}
	if err := remove(d.Socket); err != nil {
		return err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: d.Socket, Net: "unix"})
	if err != nil {
		return err
	}
	l.SetUnlinkOnClose(false)
	d.listener = l
	return nil
}

// HangUp listens and closes each connection at once, like a driver that crashes repeatedly behind a
// socket of systemd.
func (d *Driver) HangUp() error {
	if err := d.Listen(); err != nil {
		return err
	}
	d.accept(func(l *net.UnixListener) {
		for {
			c, err := l.Accept()
			if err != nil {
				return // the deadline that Serve sets, or closed
			}
			c.Close()
		}
	})
	return nil
}

// accept runs a function that accepts connections, until stop.
func (d *Driver) accept(run func(*net.UnixListener)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l, done := d.listener, make(chan struct{})
	d.done = done
	go func() { defer close(done); run(l) }()
}

// Serve makes a driver that only listens or hangs up serve, on the same socket.
func (d *Driver) Serve() error {
	d.mu.Lock()
	l, done := d.listener, d.done
	d.mu.Unlock()
	if done != nil {
		if err := l.SetDeadline(time.Unix(1, 0)); err != nil {
			return err
		}
		<-done
		if err := l.SetDeadline(time.Time{}); err != nil {
			return err
		}
	}
	server := grpc.NewServer(d.options...)
	csi.RegisterIdentityServer(server, d)
	csi.RegisterNodeServer(server, d)
	d.mu.Lock()
	d.server = server
	d.mu.Unlock()
	d.accept(func(l *net.UnixListener) { _ = server.Serve(l) }) // it ends with Kill
	return nil
}

// Stop stops the driver and removes its socket. It does nothing if the driver does not run.
func (d *Driver) Stop() error {
	if !d.Running() {
		return nil
	}
	d.Kill()
	return remove(d.Socket)
}

// Kill ends the driver as kill -9 does: the socket stays, its connections are closed.
func (d *Driver) Kill() {
	d.mu.Lock()
	listener, server, done := d.listener, d.server, d.done
	d.listener, d.server, d.done = nil, nil, nil
	d.mu.Unlock()
	if server != nil {
		server.Stop() // hanging calls return: their contexts are done
	}
	if listener != nil {
		listener.Close() // for the second time if it was served
	}
	if done != nil {
		<-done
	}
}

// call counts a call and applies the faults of its method.
func (d *Driver) call(ctx context.Context, method string) (Answers, error) {
	d.mu.Lock()
	d.calls[method]++
	a, changed := d.answers, d.changed
	d.mu.Unlock()
	var delay <-chan time.Time
	if a.Delay[method] > 0 {
		delay = time.After(a.Delay[method])
	}
	for {
		switch {
		case a.Fail[method] != nil:
			return a, a.Fail[method]
		case delay == nil && !a.Hang[method]:
			return a, nil
		}
		select {
		case <-ctx.Done():
			return a, status.FromContextError(ctx.Err()).Err()
		case <-delay:
			delay = nil
		case <-changed:
			d.mu.Lock()
			a, changed = d.answers, d.changed
			d.mu.Unlock()
		}
	}
}

// GetPluginInfo implements csi.IdentityServer.
func (d *Driver) GetPluginInfo(ctx context.Context, _ *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	a, err := d.call(ctx, GetPluginInfo)
	if err != nil {
		return nil, err
	}
	return &csi.GetPluginInfoResponse{Name: a.Name, VendorVersion: a.Version}, nil
}

// Probe implements csi.IdentityServer.
func (d *Driver) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	a, err := d.call(ctx, Probe)
	if err != nil {
		return nil, err
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(!a.NotReady)}, nil
}

// NodeGetInfo implements csi.NodeServer.
func (d *Driver) NodeGetInfo(ctx context.Context, _ *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	a, err := d.call(ctx, NodeGetInfo)
	if err != nil {
		return nil, err
	}
	r := &csi.NodeGetInfoResponse{NodeId: a.NodeID, MaxVolumesPerNode: a.MaxVolumes}
	if a.Topology != nil {
		r.AccessibleTopology = &csi.Topology{Segments: a.Topology}
	}
	return r, nil
}

// remove removes a file, which may not exist.
func remove(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
