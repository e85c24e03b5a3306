// Command faulty imitates the faults of a node that doctor must find.
//
//	faulty driver --socket PATH --name NAME --faults FILE   a CSI driver; its faults are in FILE, as JSON, at each call
//	faulty deaf PATH                          a socket whose queue is full
//	faulty datagram PATH                      a datagram socket
//	faulty stale PATH                         a socket that nobody listens on; ends at once
//	faulty registrar --socket PATH --name NAME --endpoint PATH   another registrar of a driver
//	faulty hang DIR                           a file system that does not answer
//	faulty kubelet idle|watch|ask DIR         a kubelet that has not begun to watch, that does not ask, or that does not confirm
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/test/fake"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) < 2 {
		return errors.New("usage: faulty driver|deaf|datagram|stale|registrar|hang|kubelet ARGUMENT...")
	}
	flags := flag.NewFlagSet("faulty", flag.ContinueOnError)
	socket := flags.String("socket", "", "")
	name := flags.String("name", "", "")
	faults := flags.String("faults", "", "")
	endpoint := flags.String("endpoint", "", "")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	switch args[0] {
	case "driver":
		d := &driver{name: *name, faults: *faults}
		return serve(ctx, *socket, func(s *grpc.Server) {
			csi.RegisterIdentityServer(s, d)
			csi.RegisterNodeServer(s, d)
		})
	case "registrar":
		return serve(ctx, *socket, func(s *grpc.Server) {
			registerapi.RegisterRegistrationServer(s, registrar{name: *name, endpoint: *endpoint})
		})
	case "deaf":
		return deaf(ctx, args[1])
	case "datagram":
		c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: args[1]})
		if err != nil {
			return err
		}
		<-ctx.Done()
		return c.Close()
	case "stale":
		l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: args[1]})
		if err != nil {
			return err
		}
		l.SetUnlinkOnClose(false)
		return l.Close()
	case "hang":
		h, err := fake.MountHangFS(args[1])
		if err == nil {
			err = h.Hang()
		}
		if err != nil {
			return err
		}
		<-ctx.Done()
		return nil
	case "kubelet":
		return kubelet(ctx, args[1], args[2])
	}
	return fmt.Errorf("there is no %s", args[0])
}

// serve serves at a socket until ctx is done. It replaces an existing file.
func serve(ctx context.Context, socket string, register func(*grpc.Server)) error {
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	register(s)
	defer context.AfterFunc(ctx, s.Stop)()
	return s.Serve(l)
}

// deaf listens with the shortest queue, and fills it.
func deaf(ctx context.Context, path string) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 0)); err != nil {
		return err
	}
	// The daemon may have been faster and have taken the place: it keeps it, since nobody accepts.
	c, err := net.Dial("unix", path)
	if err == nil {
		defer c.Close()
	} else if !errors.Is(err, unix.EAGAIN) {
		return err
	}
	<-ctx.Done()
	return unix.Close(fd)
}

// kubelet listens where doctor recognizes a kubelet, and does only the first steps of a
// registration.
func kubelet(ctx context.Context, what, dir string) error {
	socket := filepath.Join(dir, "pod-resources", "kubelet.sock")
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	defer l.Close()
	if what != "idle" {
		fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
		if err == nil {
			_, err = unix.InotifyAddWatch(fd, filepath.Join(dir, "plugins_registry"), unix.IN_CREATE)
		}
		if err != nil {
			return err
		}
	}
	for what == "ask" && ctx.Err() == nil {
		sockets, err := filepath.Glob(filepath.Join(dir, "plugins_registry", "*-reg.sock"))
		for _, s := range sockets {
			err = errors.Join(err, ask(ctx, s))
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second): // as often as the kubelet
		}
	}
	<-ctx.Done()
	return nil
}

func ask(ctx context.Context, socket string) error {
	c, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = registerapi.NewRegistrationClient(c).GetInfo(ctx, &registerapi.InfoRequest{})
	return err
}

// faultList lists the faults of a driver.
type faultList struct {
	Name          *string           // another one
	NodeID        *string           // another one
	Topology      map[string]string // in place of none
	MaxVolumes    int64
	NotReady      bool
	Hang          string // the method that does not answer
	Fail          string // the method that fails
	Unimplemented string // the method that is not implemented
}

type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	name, faults string
}

// call reads the faults and applies those of the method.
func (d *driver) call(ctx context.Context, method string) (f faultList, err error) {
	data, err := os.ReadFile(d.faults)
	if errors.Is(err, fs.ErrNotExist) {
		return f, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &f)
	}
	switch {
	case err != nil:
		return f, err
	case f.Hang == method:
		<-ctx.Done()
		return f, grpcstatus.FromContextError(ctx.Err()).Err()
	case f.Fail == method:
		return f, grpcstatus.Error(codes.Internal, "no kernel module")
	case f.Unimplemented == method:
		return f, grpcstatus.Error(codes.Unimplemented, "unknown method")
	}
	return f, nil
}

func (d *driver) GetPluginInfo(ctx context.Context, _ *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	f, err := d.call(ctx, "GetPluginInfo")
	name := d.name
	if f.Name != nil {
		name = *f.Name
	}
	return &csi.GetPluginInfoResponse{Name: name, VendorVersion: "1"}, err
}

func (d *driver) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	f, err := d.call(ctx, "Probe")
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(!f.NotReady)}, err
}

func (d *driver) NodeGetInfo(ctx context.Context, _ *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	f, err := d.call(ctx, "NodeGetInfo")
	r := &csi.NodeGetInfoResponse{NodeId: "node-1", MaxVolumesPerNode: f.MaxVolumes}
	if f.NodeID != nil {
		r.NodeId = *f.NodeID
	}
	if f.Topology != nil {
		r.AccessibleTopology = &csi.Topology{Segments: f.Topology}
	}
	return r, err
}

// registrar serves GetInfo for a driver, as another registrar does.
type registrar struct {
	registerapi.UnimplementedRegistrationServer
	name, endpoint string
}

func (r registrar) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{Type: registerapi.CSIPlugin, Name: r.name, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"}}, nil
}

func (r registrar) NotifyRegistrationStatus(context.Context, *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	return &registerapi.RegistrationStatusResponse{}, nil
}
