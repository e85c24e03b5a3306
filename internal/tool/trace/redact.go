package trace

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"csi-registrar/internal/sys/safetext"
)

// Limits of one message as it is shown.
const (
	maxShown     = 16 << 10 // bytes, about
	maxElements  = 20       // of a list
	maxShownText = 1 << 10  // bytes of a string, characters of an error
)

// shownMessage returns the JSON form of a message, with the values of the keys in show.
func shownMessage(m protoreflect.Message, show []string) json.RawMessage {
	r := &redactor{keys: show}
	text, err := json.Marshal(r.message(m))
	if err != nil { // of texts, numbers, maps and lists it cannot fail
		panic(err)
	}
	return text
}

// redactor turns a message into a value for JSON from which nothing can leak.
type redactor struct {
	keys []string // that are shown because a person asked for them
	size int      // bytes so far, about
}

// message returns the fields of a message. Texts in parentheses stand for what is hidden.
func (r *redactor) message(m protoreflect.Message) map[string]any {
	out := map[string]any{}
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		if fd := fields.Get(i); m.Has(fd) {
			out[r.text(fd.TextName())] = r.field(fd, m.Get(fd))
		}
	}
	if unknown := m.GetUnknown(); len(unknown) > 0 {
		out["(unknown)"] = r.unknown(unknown)
	}
	return out
}

func (r *redactor) field(fd protoreflect.FieldDescriptor, v protoreflect.Value) any {
	switch {
	case isSecret(fd):
		return "(stripped)"
	case fd.IsMap():
		return r.mapping(fd, v.Map())
	case fd.IsList():
		out := []any{}
		for i := range v.List().Len() {
			if i == maxElements || r.size > maxShown {
				return append(out, fmt.Sprintf("(%d more)", v.List().Len()-i))
			}
			out = append(out, r.value(fd, v.List().Get(i)))
		}
		return out
	}
	return r.value(fd, v)
}

// isSecret reports whether the specification marks the field as csi_secret.
func isSecret(fd protoreflect.FieldDescriptor) bool {
	secret, _ := proto.GetExtension(fd.Options(), csi.E_CsiSecret).(bool)
	return secret
}

// value returns a single value.
func (r *redactor) value(fd protoreflect.FieldDescriptor, v protoreflect.Value) any {
	switch fd.Kind() {
	case protoreflect.MessageKind:
		return r.message(v.Message())
	case protoreflect.StringKind:
		switch s := v.String(); {
		case fd.FullName() == mountFlags:
			return r.mountFlag(s)
		case isShown(fd) || r.asked(fd.TextName()):
			return r.text(cut(s))
		default:
			return r.hide(s)
		}
	case protoreflect.BytesKind:
		return r.hide(string(v.Bytes()))
	case protoreflect.EnumKind:
		if e := fd.Enum().Values().ByNumber(v.Enum()); e != nil {
			return r.text(string(e.Name()))
		}
		return v.Enum()
	default:
		return v.Interface() // a boolean or an integer; CSI has no other kinds
	}
}

// mapping returns a map of strings: the keys that are shown, and how many others there are.
func (r *redactor) mapping(fd protoreflect.FieldDescriptor, m protoreflect.Map) map[string]any {
	out := map[string]any{}
	size, count := 0, 0
	m.Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
		switch key := k.String(); {
		case isShown(fd) || slices.Contains(shownKeys, key) || r.asked(key):
			if r.size > maxShown {
				count++
				break
			}
			r.size += len(key) + len(v.String())
			out[cut(key)] = cut(v.String())
		default:
			size += len(key) + len(v.String())
			count++
		}
		return true
	})
	if count > 0 {
		out["(hidden)"] = r.text(fmt.Sprintf("%s, %d bytes", safetext.Count(count, "key"), size))
	}
	return out
}

// mountFlag returns the options of one flag; there may be several, with commas.
func (r *redactor) mountFlag(flag string) string {
	var out []string
	for option := range strings.SplitSeq(flag, ",") {
		name, value, _ := strings.Cut(option, "=")
		switch {
		case r.asked(name), slices.Contains(strings.Fields(shownOptions), name) && strings.Trim(value, "0123456789.") == "":
			out = append(out, option)
		default:
			out = append(out, fmt.Sprintf("(%d bytes)", len(option)))
		}
	}
	return r.text(strings.Join(out, ","))
}

// unknown describes the fields that the descriptors do not have.
func (r *redactor) unknown(b []byte) (out []string) {
	for n := 0; len(b) > 0; n++ {
		number, kind, tag := protowire.ConsumeTag(b)
		length := protowire.ConsumeFieldValue(number, kind, b[max(tag, 0):])
		if tag < 0 || length < 0 || n == maxElements {
			return append(out, r.text(fmt.Sprintf("(%d more bytes)", len(b))))
		}
		out = append(out, r.text(fmt.Sprintf("%d: %d bytes", number, length)))
		b = b[tag+length:]
	}
	return out
}

// asked reports whether a person asked for the values of a key.
func (r *redactor) asked(key string) bool { return slices.Contains(r.keys, key) }

func (r *redactor) hide(s string) string { return r.text(fmt.Sprintf("(%d bytes)", len(s))) }

// text counts a text that is shown.
func (r *redactor) text(s string) string {
	r.size += len(s)
	return s
}

// cut limits the length of a string that is shown.
func cut(s string) string {
	if len(s) <= maxShownText {
		return s
	}
	return strings.ToValidUTF8(s[:maxShownText], "") + "…"
}

// shownFields are the names of those fields of CSI's messages whose strings are shown. All others
// are hidden, so that a field of a newer CSI is, too. Numbers, booleans and enums are shown.
// segments are labels of the node, which everybody in the cluster can read.
//
// Left out with care: tokens of pages (they are the driver's, and opaque), texts and reasons
// of a volume's health (free text), the plugin's manifest and whatever is opaque.
var shownFields = []protoreflect.Name{
	"name", "vendor_version", "fs_type", "volume_mount_group", "segments",
	"volume_id", "snapshot_id", "group_snapshot_id", "source_volume_id", "base_snapshot_id", "target_snapshot_id",
	"node_id", "published_node_ids", "source_volume_ids", "snapshot_ids",
	"target_path", "staging_target_path", "volume_path", "volume_publish_path",
}

func isShown(fd protoreflect.FieldDescriptor) bool {
	return fd.ParentFile().Package() == "csi.v1" && slices.Contains(shownFields, fd.Name())
}

// shownKeys are the keys whose values are shown wherever a map is opaque: what Kubernetes
// itself puts there, without csi.storage.k8s.io/serviceAccount.tokens.
var shownKeys = []string{
	"csi.storage.k8s.io/ephemeral",
	"csi.storage.k8s.io/fstype",
	"csi.storage.k8s.io/pod.name",
	"csi.storage.k8s.io/pod.namespace",
	"csi.storage.k8s.io/pod.uid",
	"csi.storage.k8s.io/pv/name",
	"csi.storage.k8s.io/pvc/name",
	"csi.storage.k8s.io/pvc/namespace",
	"csi.storage.k8s.io/serviceAccount.name",
	"csi.storage.k8s.io/volumesnapshot/name",
	"csi.storage.k8s.io/volumesnapshot/namespace",
	"csi.storage.k8s.io/volumesnapshotcontent/name",
	"storage.kubernetes.io/csiProvisionerIdentity",
}

// shownOptions are the mount options that are shown, with a value only if it is a number.
const shownOptions = "ro rw sync async atime noatime diratime nodiratime relatime norelatime strictatime lazytime " +
	"dev nodev suid nosuid exec noexec bind rbind hard soft intr nointr discard nodiscard nouuid nolock noresvport " +
	"vers nfsvers minorversion timeo retrans rsize wsize nconnect actimeo acregmin acregmax acdirmin acdirmax " +
	"uid gid file_mode dir_mode mode size port"

// ErrorText is the key for --show that shows error texts, which may repeat secrets.
const ErrorText = "error"

const mountFlags = "csi.v1.VolumeCapability.MountVolume.mount_flags"
