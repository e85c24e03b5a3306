package main

import (
	"context"
	"net"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
)

// driver is the least CSI driver that can be registered, so that its own work is no part
// of what is measured.
type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	name   string
	server *grpc.Server
	served chan error
}

func (d *driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: d.name, VendorVersion: "1"}, nil
}

func (d *driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{}, nil
}

func (d *driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: "node"}, nil
}

// serve begins to serve at path, and returns the moment at which it listened.
func serve(name, path string) (*driver, time.Time, error) {
	d := &driver{name: name, served: make(chan error, 1),
		server: grpc.NewServer(grpc.ReadBufferSize(4<<10), grpc.WriteBufferSize(4<<10))}
	csi.RegisterIdentityServer(d.server, d)
	csi.RegisterNodeServer(d.server, d)
	ln, err := net.Listen("unix", path)
	at := time.Now()
	if err != nil {
		return nil, at, err
	}
	go func() { d.served <- d.server.Serve(ln) }()
	return d, at, nil
}

// stop ends the driver and removes its socket.
func (d *driver) stop() error {
	d.server.Stop()
	return <-d.served
}

// await waits until something listens at path, and returns the moment.
func await(ctx context.Context, path string) (time.Time, error) {
	for {
		c, err := net.Dial("unix", path)
		now := time.Now()
		if err == nil {
			return now, c.Close()
		}
		if ctx.Err() != nil {
			return now, ctx.Err()
		}
		time.Sleep(100 * time.Microsecond)
	}
}
