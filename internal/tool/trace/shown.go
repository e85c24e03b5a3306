package trace

import (
	"slices"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// shownFields are the fields of CSI's messages whose strings are shown. All others are
// hidden, so that a field of a newer CSI is, too. Numbers, booleans and enums are shown.
//
// Left out with care: tokens of pages (they are the driver's, and opaque), texts and reasons
// of a volume's health (free text), the plugin's manifest and whatever is opaque.
var shownFields = []string{
	"GetPluginInfoResponse.name", "GetPluginInfoResponse.vendor_version",
	"CreateVolumeRequest.name",
	"VolumeContentSource.SnapshotSource.snapshot_id", "VolumeContentSource.VolumeSource.volume_id",
	"VolumeCapability.MountVolume.fs_type", "VolumeCapability.MountVolume.volume_mount_group",
	"Volume.volume_id",
	"Topology.segments", // labels of the node, which everybody in the cluster can read
	"DeleteVolumeRequest.volume_id",
	"ControllerPublishVolumeRequest.volume_id", "ControllerPublishVolumeRequest.node_id",
	"ControllerUnpublishVolumeRequest.volume_id", "ControllerUnpublishVolumeRequest.node_id",
	"ValidateVolumeCapabilitiesRequest.volume_id",
	"ListVolumesResponse.VolumeStatus.published_node_ids",
	"VolumeHealth.volume_id", "ControllerGetVolumeHealthRequest.volume_id",
	"ControllerGetVolumeRequest.volume_id", "ControllerGetVolumeResponse.VolumeStatus.published_node_ids",
	"ControllerModifyVolumeRequest.volume_id", "ControllerExpandVolumeRequest.volume_id",
	"CreateSnapshotRequest.source_volume_id", "CreateSnapshotRequest.name",
	"Snapshot.snapshot_id", "Snapshot.source_volume_id", "Snapshot.group_snapshot_id",
	"DeleteSnapshotRequest.snapshot_id", "GetSnapshotRequest.snapshot_id",
	"ListSnapshotsRequest.source_volume_id", "ListSnapshotsRequest.snapshot_id",
	"NodeStageVolumeRequest.volume_id", "NodeStageVolumeRequest.staging_target_path",
	"NodeUnstageVolumeRequest.volume_id", "NodeUnstageVolumeRequest.staging_target_path",
	"NodePublishVolumeRequest.volume_id", "NodePublishVolumeRequest.staging_target_path", "NodePublishVolumeRequest.target_path",
	"NodeUnpublishVolumeRequest.volume_id", "NodeUnpublishVolumeRequest.target_path",
	"NodeGetVolumeStatsRequest.volume_id", "NodeGetVolumeStatsRequest.volume_path", "NodeGetVolumeStatsRequest.staging_target_path",
	"NodeGetVolumeHealthRequest.volume_id", "NodeGetVolumeHealthRequest.volume_publish_path",
	"NodeGetVolumeHealthRequest.staging_target_path",
	"NodeExpandVolumeRequest.volume_id", "NodeExpandVolumeRequest.volume_path", "NodeExpandVolumeRequest.staging_target_path",
	"NodeGetInfoResponse.node_id",
	"CreateVolumeGroupSnapshotRequest.name", "CreateVolumeGroupSnapshotRequest.source_volume_ids",
	"VolumeGroupSnapshot.group_snapshot_id",
	"DeleteVolumeGroupSnapshotRequest.group_snapshot_id", "DeleteVolumeGroupSnapshotRequest.snapshot_ids",
	"GetVolumeGroupSnapshotRequest.group_snapshot_id", "GetVolumeGroupSnapshotRequest.snapshot_ids",
	"GetMetadataAllocatedRequest.snapshot_id",
	"GetMetadataDeltaRequest.base_snapshot_id", "GetMetadataDeltaRequest.target_snapshot_id",
}

func isShown(fd protoreflect.FieldDescriptor) bool {
	name, ofCSI := strings.CutPrefix(string(fd.FullName()), "csi.v1.")
	return ofCSI && slices.Contains(shownFields, name)
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
