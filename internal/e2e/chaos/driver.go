package chaos

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// says is what a driver answers.
type says struct {
	name     string
	nodeID   string
	limit    int64
	topology map[string]string
}

func (s says) clone() says {
	s.topology = maps.Clone(s.topology)
	return s
}

// flaw is what is wrong with a driver for good: it is never ready.
type flaw string

const (
	sound       flaw = ""
	otherName   flaw = "other name"
	neverReady  flaw = "never ready"
	failingNode flaw = "NodeGetInfo fails"
)

// Driver is a CSI driver that does as it is told. Only who carries out the steps calls its
// methods; the world's lock guards what others read.
type Driver struct {
	name   string
	dir    string // its own, for the socket and another name of it
	socket string
	alias  string // a link to the socket
	flaw   flaw

	// What is to be answered: truth, and the lie that is told instead while there is one.
	truth says
	lie   *says

	everWell bool // it was sound once, so it may have been ready

	server *grpc.Server // nil: it does not run
	done   chan struct{}

	mu       sync.Mutex
	answers  says
	notReady bool
	hang     string        // full name of the method that hangs
	free     chan struct{} // closed when nothing hangs any more

	// The configuration as it is written.
	conf conf

	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
}

type conf struct {
	present, enabled, broken, byAlias, withdraw bool
}

func newDriver(i int, run string, f flaw) *Driver {
	name := fmt.Sprintf("d%02d.chaos.example", i)
	dir := filepath.Join(run, fmt.Sprintf("d%02d", i))
	d := &Driver{
		name: name, dir: dir, socket: filepath.Join(dir, "csi.sock"), alias: filepath.Join(dir, "alias.sock"), flaw: f,
		truth: says{name: name, nodeID: "node-" + name, topology: map[string]string{"topology." + name + "/zone": "z1"}},
		conf:  conf{present: true, enabled: true},
	}
	if f == otherName {
		d.truth.name = "other." + name
	}
	d.notReady = f == neverReady
	return d
}

// table is its configuration file.
func (d *Driver) table() string {
	text := fmt.Sprintf("[driver.%q]\nsocket = %q\ntimeout = \"1s\"\nenabled = %t\n", d.name, d.socket, d.conf.enabled)
	if d.conf.byAlias {
		text += fmt.Sprintf("endpoint = %q\n", d.alias)
	}
	if d.conf.withdraw {
		text += "when_driver_is_gone = \"withdraw\"\nwithdraw_after = \"1s\"\n"
	}
	if d.conf.broken {
		text += "soket = 7\n"
	}
	return text
}

// mute is how long a server waits for the first word on a connection. Its end waits for
// that too, and a daemon that is frozen says nothing.
const mute = time.Second

// start serves, with a new socket. It does nothing if it runs.
func (d *Driver) start() error {
	if d.server != nil {
		return nil
	}
	if err := os.MkdirAll(d.dir, 0o755); err != nil {
		return err
	}
	if err := errors.Join(gone(os.Remove(d.socket)), gone(os.Remove(d.alias))); err != nil {
		return err
	}
	if err := os.Symlink(d.socket, d.alias); err != nil {
		return err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: d.socket, Net: "unix"})
	if err != nil {
		return err
	}
	l.SetUnlinkOnClose(false)
	d.mu.Lock()
	d.answers = d.truth.clone()
	if d.lie != nil {
		d.answers = d.lie.clone()
	}
	d.mu.Unlock()
	if d.flaw == sound {
		d.everWell = true
	}
	d.server, d.done = grpc.NewServer(grpc.UnaryInterceptor(d.intercept), grpc.ConnectionTimeout(mute)), make(chan struct{})
	csi.RegisterIdentityServer(d.server, d)
	csi.RegisterNodeServer(d.server, d)
	server, done := d.server, d.done
	go func() {
		defer close(done)
		_ = server.Serve(l) // ends with stop
	}()
	return nil
}

// stop ends it; killed, it leaves its socket behind.
func (d *Driver) stop(killed bool) error {
	if d.server == nil {
		return nil
	}
	d.unhang()
	d.server.Stop()
	<-d.done
	d.server = nil
	if killed {
		return nil
	}
	return gone(os.Remove(d.socket))
}

func (d *Driver) unhang() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.hang != "" {
		close(d.free)
		d.hang = ""
	}
}

func (d *Driver) hangIn(method string) {
	d.unhang()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hang, d.free = method, make(chan struct{})
}

func (d *Driver) setReady(ready bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.notReady = !ready || d.flaw == neverReady
}

func (d *Driver) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	d.mu.Lock()
	hang, free := d.hang, d.free
	d.mu.Unlock()
	if hang != "" && hang == info.FullMethod {
		select {
		case <-free:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return next(ctx, req)
}

// GetPluginInfo implements csi.IdentityServer.
func (d *Driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return &csi.GetPluginInfoResponse{Name: d.answers.name, VendorVersion: "1.0"}, nil
}

// Probe implements csi.IdentityServer.
func (d *Driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(!d.notReady)}, nil
}

// NodeGetInfo implements csi.NodeServer.
func (d *Driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.flaw == failingNode {
		return nil, status.Error(codes.Internal, "not today")
	}
	return &csi.NodeGetInfoResponse{
		NodeId: d.answers.nodeID, MaxVolumesPerNode: d.answers.limit,
		AccessibleTopology: &csi.Topology{Segments: maps.Clone(d.answers.topology)},
	}, nil
}

// gone forgives that something is not there.
func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
