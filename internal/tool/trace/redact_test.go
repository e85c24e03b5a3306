package trace

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// sentinels fills messages with strings that can be found again.
type sentinels struct {
	words  []string        // all of them
	fields map[string]bool // of words: whether its field is shown
	choice int             // which member of a oneof is set, modulo their number
	count  int
}

// word is a new string. It has letters only, as the most harmless secret has.
func (s *sentinels) word(shown bool) string {
	s.count++
	word := "sentinel"
	for n := s.count; n > 0; n /= 25 {
		word += string(rune('a' + n%25))
	}
	word += "z"
	s.words = append(s.words, word)
	s.fields[word] = shown
	return word
}

// fill sets every field, two elements in each list and map. The fields in the list of this
// file are shown; the tested code has a list of its own.
func (s *sentinels) fill(t *testing.T, m protoreflect.Message) {
	t.Helper()
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if of := fd.ContainingOneof(); of != nil && !of.IsSynthetic() && of.Fields().Get(s.choice%of.Fields().Len()) != fd {
			continue
		}
		shown := harmlessField(fd)
		switch {
		case fd.IsMap():
			for range 2 {
				m.Mutable(fd).Map().Set(protoreflect.ValueOfString(s.word(shown)).MapKey(), protoreflect.ValueOfString(s.word(shown)))
			}
		case fd.IsList():
			for range 2 {
				if fd.Message() != nil {
					s.fill(t, m.Mutable(fd).List().AppendMutable().Message())
				} else {
					m.Mutable(fd).List().Append(s.value(t, fd, shown))
				}
			}
		case fd.Message() != nil:
			s.fill(t, m.Mutable(fd).Message())
		default:
			m.Set(fd, s.value(t, fd, shown))
		}
	}
	m.SetUnknown(protowire.AppendString(protowire.AppendTag(nil, 9999, protowire.BytesType), s.word(false)))
}

func (s *sentinels) value(t *testing.T, fd protoreflect.FieldDescriptor, shown bool) protoreflect.Value {
	t.Helper()
	switch fd.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(s.word(shown))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte(s.word(false)))
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(1)
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(7)
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(7)
	default:
		t.Fatalf("%s: this test cannot fill a %s", fd.FullName(), fd.Kind())
		panic("unreachable")
	}
}

// harmlessField is what may be shown, said by names: ids, names that somebody gave, paths,
// file systems and the labels of a topology.
func harmlessField(fd protoreflect.FieldDescriptor) bool {
	name := string(fd.Name())
	return slices.Contains([]string{"name", "vendor_version", "fs_type", "volume_mount_group", "segments", "published_node_ids",
		"volume_id", "node_id", "snapshot_id", "group_snapshot_id", "source_volume_id", "base_snapshot_id", "target_snapshot_id",
		"source_volume_ids", "snapshot_ids", "target_path", "staging_target_path", "volume_path", "volume_publish_path"}, name)
}

// eachMethod calls f for all unary methods of CSI.
func eachMethod(f func(name string, m protoreflect.MethodDescriptor)) {
	services := csi.File_csi_proto.Services()
	for i := range services.Len() {
		for j := range services.Get(i).Methods().Len() {
			if m := services.Get(i).Methods().Get(j); !m.IsStreamingServer() {
				f(string(m.Name()), m)
			}
		}
	}
}

// Of all strings in a request, an answer or an error, only those of harmless fields appear, for all
// of CSI's descriptors.
func TestNothingLeaks(t *testing.T) {
	for choice := range 6 { // VolumeContentSource and others: each member of each oneof
		for _, outcome := range []string{"answered", "error that repeats the request"} {
			t.Run(fmt.Sprint(outcome, " ", choice), func(t *testing.T) { testNothingLeaks(t, choice, outcome) })
		}
	}
}

func testNothingLeaks(t *testing.T, choice int, outcome string) {
	s := &sentinels{fields: map[string]bool{}, choice: choice}
	asked := 0 // words before this request
	path := filepath.Join(socketDir(t), "d")
	serveCSI(t, path, func(_ context.Context, method string, request proto.Message) (proto.Message, error) {
		if outcome != "answered" {
			var said []string
			for _, w := range s.words[asked:] {
				said = append(said, "the value "+w+", option x="+w+" or "+`"`+w+`"`)
			}
			return nil, status.Error(codes.Internal, strings.Join(said, " "))
		}
		_, m := methodNamed(t, method)
		response := newMessage(t, m.Output())
		s.fill(t, response.ProtoReflect())
		return response, nil
	})
	p := startProxy(t, path, nil)
	c := connect(t, p.path)
	n := 0
	eachMethod(func(name string, m protoreflect.MethodDescriptor) {
		request := newMessage(t, m.Input())
		asked = len(s.words)
		s.fill(t, request.ProtoReflect())
		if _, err := invoke(t, t.Context(), c, name, request); (err == nil) != (outcome == "answered") {
			t.Errorf("%s: %v", name, err)
		}
		n++
	})
	calls := p.wait(n)
	p.stop()
	text := printed(t, p.rec, calls)
	seen := 0
	for _, w := range s.words {
		there := strings.Contains(text, w)
		if there && !s.fields[w] {
			t.Errorf("%s is shown", w)
		}
		if there {
			seen++
		}
	}
	if n < 30 || seen < n/2 {
		t.Errorf("%d calls, %d of %d strings are shown: this test sees nothing", n, seen, len(s.words))
	}
}

// All fields that are shown exist: a field that is renamed is hidden, and noticed here. Secrets and
// maps have the one type that the redactor handles.
func TestShownFieldsExist(t *testing.T) {
	known, flags := map[protoreflect.Name]bool{}, false
	var walk func(protoreflect.MessageDescriptors)
	walk = func(all protoreflect.MessageDescriptors) {
		for i := range all.Len() {
			for j := range all.Get(i).Fields().Len() {
				fd := all.Get(i).Fields().Get(j)
				known[fd.Name()] = true
				flags = flags || fd.FullName() == mountFlags
				if isShown(fd) && isSecret(fd) {
					t.Errorf("%s is a secret", fd.FullName())
				}
				if isSecret(fd) && !fd.IsMap() || fd.IsMap() && fd.MapValue().Kind() != protoreflect.StringKind {
					t.Errorf("%s: only maps of strings are handled", fd.FullName())
				}
			}
			walk(all.Get(i).Messages())
		}
	}
	walk(csi.File_csi_proto.Messages())
	for _, name := range shownFields {
		if !known[name] {
			t.Errorf("there is no %s", name)
		}
	}
	if !flags {
		t.Errorf("there is no %s", mountFlags)
	}
}

func TestAMessageAsItIsShown(t *testing.T) {
	request := &csi.NodePublishVolumeRequest{
		VolumeId: "vol-1", TargetPath: "/t", Readonly: true,
		Secrets: map[string]string{"user": "u", "csi.storage.k8s.io/pod.name": "s"},
		VolumeContext: map[string]string{"csi.storage.k8s.io/pod.name": "web-0", "csi.storage.k8s.io/serviceAccount.tokens": "eyJ",
			"share": "a", "password": "p"},
		PublishContext: map[string]string{"devicePath": "/dev/x"},
		VolumeCapability: &csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4",
				MountFlags: []string{"ro", "vers=4.1", "vers=secret", "ro,password=x,share=y"}}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		},
	}
	m := request.ProtoReflect()
	m.SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 77, protowire.VarintType), 300))
	for _, c := range []struct{ keys, want string }{
		{"", `{"(unknown)":["77: 2 bytes"],"publish_context":{"(hidden)":"1 key, 16 bytes"},"readonly":true,"secrets":"(stripped)",` +
			`"target_path":"/t","volume_capability":{"access_mode":{"mode":"SINGLE_NODE_WRITER"},` +
			`"mount":{"fs_type":"ext4","mount_flags":["ro","vers=4.1","(11 bytes)","ro,(10 bytes),(7 bytes)"]}},` +
			`"volume_context":{"(hidden)":"3 keys, 58 bytes","csi.storage.k8s.io/pod.name":"web-0"},"volume_id":"vol-1"}`},
		{"share devicePath user secrets", `{"(unknown)":["77: 2 bytes"],"publish_context":{"devicePath":"/dev/x"},"readonly":true,"secrets":"(stripped)",` +
			`"target_path":"/t","volume_capability":{"access_mode":{"mode":"SINGLE_NODE_WRITER"},` +
			`"mount":{"fs_type":"ext4","mount_flags":["ro","vers=4.1","(11 bytes)","ro,(10 bytes),share=y"]}},` +
			`"volume_context":{"(hidden)":"2 keys, 52 bytes","csi.storage.k8s.io/pod.name":"web-0","share":"a"},"volume_id":"vol-1"}`},
	} {
		if got := string(shownMessage(m, strings.Fields(c.keys))); got != c.want {
			t.Errorf("--show %s: got\n%s\nwant\n%s", c.keys, got, c.want)
		}
	}
}

// The health calls of CSI 1.13: the secrets of NodeGetStorageHealth are stripped, and a driver's
// free texts are hidden.
func TestHealthCalls(t *testing.T) {
	path := filepath.Join(socketDir(t), "d")
	serveCSI(t, path, func(_ context.Context, method string, _ proto.Message) (proto.Message, error) {
		switch method {
		case "NodeGetVolumeHealth":
			return &csi.NodeGetVolumeHealthResponse{VolumeHealth: &csi.VolumeHealth{VolumeId: "v", HealthStatuses: []*csi.VolumeHealth_VolumeHealthEntry{
				{Status: csi.VolumeHealthErrorType_INACCESSIBLE, Reason: "Reason", Message: "message"},
			}}}, nil
		case "NodeGetStorageHealth":
			return nil, status.Error(codes.Internal, "cannot log in with s3cr3t-token")
		}
		return nil, status.Error(codes.Unimplemented, method)
	})
	p := startProxy(t, path, nil)
	c := connect(t, p.path)
	_, err := invoke(t, t.Context(), c, "NodeGetVolumeHealth", &csi.NodeGetVolumeHealthRequest{VolumeId: "v", VolumePublishPath: "/p"})
	_, failed := invoke(t, t.Context(), c, "NodeGetStorageHealth", &csi.NodeGetStorageHealthRequest{Secrets: map[string]string{"token": "s3cr3t-token"}})
	if err != nil || failed == nil {
		t.Fatal(err, failed)
	}
	calls := p.wait(2)
	if c := calls[0]; c.Name() != "NodeGetVolumeHealth" || c.Volume != "v" || string(c.Request) != `{"volume_id":"v","volume_publish_path":"/p"}` ||
		string(c.Response) != `{"volume_health":{"health_statuses":[{"message":"(7 bytes)","reason":"(6 bytes)","status":"INACCESSIBLE"}],"volume_id":"v"}}` {
		t.Errorf("%+v", c)
	}
	if c := calls[1]; c.Name() != "NodeGetStorageHealth" || string(c.Request) != `{"secrets":"(stripped)"}` ||
		c.Code != "Internal" || c.Error != "" {
		t.Errorf("%+v", c)
	}
	p.stop()
	if text := printed(t, p.rec, calls); strings.Contains(text, "s3cr3t") || !strings.Contains(text, "NodeGetStorageHealth") {
		t.Error(text)
	}
}

// A message is shown in a bounded number of bytes, and is JSON all the same.
func TestShownMessagesAreBounded(t *testing.T) {
	long := strings.Repeat("ä\x7f\"", 30000)
	entry := &csi.ListVolumesResponse_Entry{Volume: &csi.Volume{VolumeId: long}, Status: &csi.ListVolumesResponse_VolumeStatus{}}
	response := &csi.ListVolumesResponse{}
	segments := map[string]string{}
	for i := range 1000 {
		entry.Status.PublishedNodeIds = append(entry.Status.PublishedNodeIds, long)
		segments[fmt.Sprint(i, long)] = long
		response.Entries = append(response.Entries, entry)
	}
	for range 2 { // with lists, and with lists and maps
		got := shownMessage(response.ProtoReflect(), nil)
		if more := strings.Contains(string(got), " more)"); len(got) > 8*maxShown || !more {
			t.Errorf("%d bytes, more %t", len(got), more)
		}
		entry.Volume.AccessibleTopology = []*csi.Topology{{Segments: segments}, {Segments: segments}}
	}
}
