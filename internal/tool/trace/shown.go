package trace

import (
	"slices"

	"google.golang.org/protobuf/reflect/protoreflect"
)

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

// ErrorText is the key for --show that shows error texts, without the secrets of the trace.
const ErrorText = "error"

const mountFlags = "csi.v1.VolumeCapability.MountVolume.mount_flags"
