package trace

import (
	"context"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
)

// BenchmarkNodeGetCapabilities is one call on a connection of its own, as the kubelet makes
// them, directly and through the recorder. The median is reported: its difference is what a
// trace costs.
func BenchmarkNodeGetCapabilities(b *testing.B) {
	path := filepath.Join(socketDir(b), "d")
	serveCSI(b, path, func(context.Context, string, proto.Message) (proto.Message, error) {
		return &csi.NodeGetCapabilitiesResponse{}, nil
	})
	p := startProxy(b, path, nil)
	for _, to := range []struct{ name, path string }{{"direct", path}, {"traced", p.path}} {
		for _, kept := range []bool{false, true} {
			name := to.name + "/connection for each call"
			if kept {
				name = to.name + "/kept connection"
			}
			b.Run(name, func(b *testing.B) {
				took := make([]time.Duration, 0, b.N)
				c := connect(b, to.path)
				for b.Loop() {
					began := time.Now()
					if !kept {
						c = connect(b, to.path)
					}
					if _, err := invoke(b, b.Context(), c, "NodeGetCapabilities", &csi.NodeGetCapabilitiesRequest{}); err != nil {
						b.Fatal(err)
					}
					took = append(took, time.Since(began))
					if !kept {
						c.Close()
					}
				}
				slices.Sort(took)
				b.ReportMetric(float64(took[len(took)/2])/1e6, "ms/median")
			})
		}
	}
}
