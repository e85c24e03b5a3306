package harness

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// Methods of a driver that can be told to hang or fail.
const (
	GetPluginInfo = "GetPluginInfo"
	Probe         = "Probe"
	NodeGetInfo   = "NodeGetInfo"
)

// Behaviour is what a driver answers. The zero value of each field is a healthy driver's.
type Behaviour struct {
	Name       string
	Version    string
	NodeID     string
	MaxVolumes int64
	Topology   map[string]string
	NotReady   bool
	Hang       map[string]bool   // methods that never answer
	Fail       map[string]string // methods that fail, with what message
}

// Driver is a CSI driver (Identity and Node services) that does as it is told. It may be
// started, stopped and changed at any time.
type Driver struct {
	t      testing.TB
	Name   string // what it is configured as; Behaviour.Name may differ
	Socket string

	mu     sync.Mutex
	be     Behaviour
	calls  map[string]int
	server *grpc.Server
	lis    *net.UnixListener
	done   chan struct{} // Serve returned
	free   chan struct{} // closed: hanging calls return

	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
}

// AddDriver makes a driver that is not started yet and configures it, with extra lines in
// its table.
func (n *Node) AddDriver(name string, extra ...string) *Driver {
	n.T.Helper()
	d := n.NewDriver(name)
	n.Configure(name, d.Socket, extra...)
	return d
}

// NewDriver makes a driver that is neither started nor configured.
func (n *Node) NewDriver(name string) *Driver {
	return n.DriverAt(name, n.Run+"/"+name+".sock")
}

// DriverAt makes a driver that will listen at a path.
func (n *Node) DriverAt(name, socket string) *Driver {
	d := &Driver{
		t: n.T, Name: name, Socket: socket,
		be:    Behaviour{Name: name, Version: "1.0", NodeID: "id-of-" + name},
		calls: map[string]int{},
	}
	n.T.Cleanup(func() { d.Kill() })
	return d
}

// Set changes what the driver answers from now on. Calls that hang already go on hanging
// unless Hang is emptied of them: then they answer.
func (d *Driver) Set(change func(*Behaviour)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	be := d.be
	be.Topology, be.Hang, be.Fail = maps.Clone(be.Topology), maps.Clone(be.Hang), maps.Clone(be.Fail)
	change(&be)
	d.be = be
	if d.free != nil {
		close(d.free)
		d.free = make(chan struct{})
	}
}

// Calls counts the calls of a method so far.
func (d *Driver) Calls(method string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.calls[method]
}

// Start serves, and tells the time when listening began.
func (d *Driver) Start() time.Time {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.server != nil || d.lis != nil {
		d.t.Fatalf("driver %s is started already", d.Name)
	}
	if err := os.Remove(d.Socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		d.t.Fatal(err)
	}
	lis, err := listen(d.Socket)
	if err != nil {
		d.t.Fatal(err)
	}
	at := time.Now()
	d.serve(lis)
	return at
}

func (d *Driver) serve(lis *net.UnixListener) {
	d.lis, d.server, d.done, d.free = lis, grpc.NewServer(), make(chan struct{}), make(chan struct{})
	csi.RegisterIdentityServer(d.server, d)
	csi.RegisterNodeServer(d.server, d)
	server, done := d.server, d.done
	go func() {
		defer close(done)
		// A process of its own has no test to tell.
		if err := server.Serve(lis); err != nil && !errors.Is(err, grpc.ErrServerStopped) && d.t != nil {
			d.t.Logf("driver %s: %v", d.Name, err)
		}
	}()
}

// StartDeaf binds and listens, and never accepts: connections succeed, calls get no answer.
func (d *Driver) StartDeaf() {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	lis, err := listen(d.Socket)
	if err != nil {
		d.t.Fatal(err)
	}
	d.lis = lis
}

// StartHangingUp listens and ends each connection as soon as it came, as a driver does
// that crashes again and again below a socket that systemd holds.
func (d *Driver) StartHangingUp() {
	d.StartDeaf()
	d.mu.Lock()
	defer d.mu.Unlock()
	lis, done := d.lis, make(chan struct{})
	d.done = done
	go func() {
		defer close(done)
		for {
			c, err := lis.Accept()
			if err != nil {
				return // Hear's deadline, or closed
			}
			c.Close()
		}
	}()
}

// Hear makes a driver that is deaf or hangs up serve, on the same socket.
func (d *Driver) Hear() {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.done != nil {
		if err := d.lis.SetDeadline(time.Unix(1, 0)); err != nil {
			d.t.Fatal(err)
		}
		<-d.done
		if err := d.lis.SetDeadline(time.Time{}); err != nil {
			d.t.Fatal(err)
		}
	}
	d.serve(d.lis)
}

// Stop ends the driver as a good one ends: its socket's name goes too.
func (d *Driver) Stop() {
	d.t.Helper()
	d.Kill()
	if err := os.Remove(d.Socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		d.t.Fatal(err)
	}
}

// Kill ends the driver as kill -9 does: the name stays, connections are cut.
func (d *Driver) Kill() {
	d.mu.Lock()
	server, lis, done, free := d.server, d.lis, d.done, d.free
	d.server, d.lis, d.done, d.free = nil, nil, nil, nil
	d.mu.Unlock()
	if free != nil {
		close(free)
	}
	if server != nil {
		server.Stop()
	}
	if lis != nil {
		lis.Close() // a second close of what the server closed
	}
	if done != nil {
		<-done
	}
}

// call counts, hangs and fails as told.
func (d *Driver) call(ctx context.Context, method string) (Behaviour, error) {
	d.mu.Lock()
	d.calls[method]++
	d.mu.Unlock()
	for {
		d.mu.Lock()
		be, free := d.be, d.free
		d.mu.Unlock()
		if msg, fails := be.Fail[method]; fails {
			return be, status.Error(codes.Internal, msg)
		}
		if !be.Hang[method] {
			return be, nil
		}
		if free == nil {
			return be, status.Error(codes.Unavailable, "the driver stopped")
		}
		select {
		case <-ctx.Done():
			return be, status.FromContextError(ctx.Err()).Err()
		case <-free:
		}
	}
}

// GetPluginInfo implements csi.IdentityServer.
func (d *Driver) GetPluginInfo(ctx context.Context, _ *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	be, err := d.call(ctx, GetPluginInfo)
	if err != nil {
		return nil, err
	}
	return &csi.GetPluginInfoResponse{Name: be.Name, VendorVersion: be.Version}, nil
}

// Probe implements csi.IdentityServer.
func (d *Driver) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	be, err := d.call(ctx, Probe)
	if err != nil {
		return nil, err
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(!be.NotReady)}, nil
}

// NodeGetInfo implements csi.NodeServer.
func (d *Driver) NodeGetInfo(ctx context.Context, _ *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	be, err := d.call(ctx, NodeGetInfo)
	if err != nil {
		return nil, err
	}
	r := &csi.NodeGetInfoResponse{NodeId: be.NodeID, MaxVolumesPerNode: be.MaxVolumes}
	if be.Topology != nil {
		r.AccessibleTopology = &csi.Topology{Segments: be.Topology}
	}
	return r, nil
}

// driverMain is the driver as a process of its own, in the role "driver": its arguments
// are the name and the socket. It ends by TERM, its socket's name with it, or by KILL.
func driverMain(args []string) int {
	if len(args) != 2 {
		return 2
	}
	err := os.Remove(args[1]) // of one that was killed
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	var lis *net.UnixListener
	if err == nil {
		lis, err = listen(args[1])
	}
	if err != nil {
		os.Stderr.WriteString(err.Error() + "\n")
		return 1
	}
	d := &Driver{Name: args[0], Socket: args[1], be: Behaviour{Name: args[0], Version: "1.0", NodeID: "id-of-" + args[0]}, calls: map[string]int{}}
	d.serve(lis)
	term := make(chan os.Signal, 1)
	notify(term, syscall.SIGTERM)
	<-term
	d.Kill()
	if err := os.Remove(args[1]); err != nil {
		return 1
	}
	return 0
}
