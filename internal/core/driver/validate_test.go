package driver

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
)

func TestValidateNode(t *testing.T) {
	topology := func(n int, key, value string) *csi.NodeGetInfoResponse {
		m := map[string]string{}
		for i := range n {
			m[fmt.Sprint(key, i)] = value
		}
		return &csi.NodeGetInfoResponse{NodeId: "n", AccessibleTopology: &csi.Topology{Segments: m}}
	}
	for _, test := range []struct {
		name   string
		info   *csi.NodeGetInfoResponse
		reason string
	}{
		{"least", &csi.NodeGetInfoResponse{NodeId: "n"}, ""},
		{"longest id", &csi.NodeGetInfoResponse{NodeId: strings.Repeat("n", 256)}, ""},
		{"any characters", &csi.NodeGetInfoResponse{NodeId: "a\nb\u202e"}, ""}, // cleaned later
		{"nothing", nil, "node ID is empty"},
		{"too long in bytes", &csi.NodeGetInfoResponse{NodeId: strings.Repeat("ü", 129)}, "258 bytes"},
		{"negative", &csi.NodeGetInfoResponse{NodeId: "n", MaxVolumesPerNode: -3}, "max_volumes_per_node is -3 (expected: 0 for no limit, or more)"},
		{"topology", topology(10, "topology.example.com/zone", "a"), ""},
		{"many keys", topology(129, "k", "v"), "129 keys"},
		{"long key", topology(1, strings.Repeat("k", 317), "v"), "the name has 318 characters"},
		{"no label key", topology(1, "zone of mine", "a"), `"zone of mine0" is not a label key`},
		{"hostile key", topology(1, "\x1b[2J", "a"), `"\x1b[2J0" is not a label key`},
		{"no label value", topology(1, "k", "a:b"), `"k0" is not a label value`},
		{"empty key", &csi.NodeGetInfoResponse{NodeId: "n", AccessibleTopology: &csi.Topology{Segments: map[string]string{"": "v"}}}, "topology key"},
		{"long value", topology(1, "k", strings.Repeat("v", 64)), `"k0" is not a label value: it has 64 characters`},
		{"no value", topology(1, "k", ""), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			var id status.Identity
			v := validateNode(test.info, &id)
			if (v.ok()) != (test.reason == "") || !strings.Contains(v.reason, test.reason) {
				t.Errorf("%+v, want …%s…", v, test.reason)
			}
			if good := test.reason == ""; good != (id.NodeID != "") {
				t.Errorf("identity %+v", id)
			}
		})
	}
}

// FuzzAnswers validates any bytes that decode as the two answers: the findings must be harmless.
func FuzzAnswers(f *testing.F) {
	seed := func(cfg string, info *csi.GetPluginInfoResponse, node *csi.NodeGetInfoResponse) {
		a, err := proto.Marshal(info)
		if err != nil {
			f.Fatal(err)
		}
		b, err := proto.Marshal(node)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(cfg, a, b)
	}
	good := &csi.NodeGetInfoResponse{NodeId: "n", MaxVolumesPerNode: 4, AccessibleTopology: &csi.Topology{Segments: map[string]string{"a/b": "c", "d": ""}}}
	seed("", &csi.GetPluginInfoResponse{Name: name, VendorVersion: "1\x1b[2J"}, good)
	seed(name, &csi.GetPluginInfoResponse{Name: name}, good)
	seed(name, &csi.GetPluginInfoResponse{Name: "../../x\x00\n\u202e"}, &csi.NodeGetInfoResponse{NodeId: strings.Repeat("x", 300)})
	seed("", &csi.GetPluginInfoResponse{Name: strings.Repeat("x", 64)}, &csi.NodeGetInfoResponse{NodeId: "x", MaxVolumesPerNode: -1})
	seed("", &csi.GetPluginInfoResponse{Name: "Foo.Example"}, &csi.NodeGetInfoResponse{NodeId: "x", AccessibleTopology: &csi.Topology{Segments: map[string]string{"\u200b": strings.Repeat("v", 70)}}})
	f.Fuzz(func(t *testing.T, cfg string, a, b []byte) {
		if cfg != "" && csiname.CheckName(cfg) != nil {
			cfg = name // a configured name was checked
		}
		var (
			info csi.GetPluginInfoResponse
			node csi.NodeGetInfoResponse
			id   status.Identity
		)
		if proto.Unmarshal(a, &info) != nil || proto.Unmarshal(b, &node) != nil {
			return
		}
		c := config.Connection{Name: cfg, Socket: "/s"}
		for _, v := range []finding{validateInfo(c, &info, &id), validateNode(&node, &id)} {
			if safetext.Clean(v.reason, 1<<20) != v.reason {
				t.Errorf("reason %q is not clean", v.reason)
			}
			if utf8.RuneCountInString(v.reason) > maxReason {
				t.Errorf("reason has %d bytes", len(v.reason))
			}
			if (v.ok()) != (v.reason == "") {
				t.Errorf("finding %+v", v)
			}
		}
		if safetext.Clean(id.Name, 1000) != id.Name || safetext.Clean(id.Version, 1000) != id.Version {
			t.Errorf("identity %q, %q", id.Name, id.Version)
		}
		if v := validateInfo(c, &info, &id); v.ok() {
			if err := csiname.CheckName(id.Name); err != nil || cfg != "" && id.Name != cfg {
				t.Errorf("name %q passed for %q: %v", id.Name, cfg, err)
			}
		}
		if len(id.NodeID) > maxNodeID || len(id.Topology) > maxTopology || id.MaxVolumes < 0 {
			t.Errorf("unbounded: %+v", id)
		}
	})
}
