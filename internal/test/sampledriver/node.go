package sampledriver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// node is the CSI Node service.
type node struct {
	csi.UnimplementedNodeServer
	d *Driver
}

func (s node) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	response := &csi.NodeGetInfoResponse{NodeId: s.d.NodeID, MaxVolumesPerNode: s.d.MaxVolumes}
	if len(s.d.Topology) > 0 {
		response.AccessibleTopology = &csi.Topology{Segments: s.d.Topology}
	}
	return response, nil
}

func (s node) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	response := &csi.NodeGetCapabilitiesResponse{}
	for _, t := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
	} {
		response.Capabilities = append(response.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}},
		})
	}
	return response, nil
}

// NodeStageVolume mounts the volume where it is published from. A directory could do without; a
// driver with devices formats and mounts them here, once for all pods of the node.
func (s node) NodeStageVolume(_ context.Context, r *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	staging := r.GetStagingTargetPath()
	if err := s.d.checkPath(r.GetVolumeId(), "staging_target_path", staging); err != nil {
		return nil, err
	}
	if r.GetVolumeCapability() == nil {
		return nil, invalid("volume_capability is missing")
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	v, err := s.d.created(r.GetVolumeId())
	if err != nil {
		return nil, notFound(err)
	}
	if why := unsupported(r.GetVolumeCapability()); why != "" {
		return nil, status.Error(codes.FailedPrecondition, why)
	}
	if s.d.isMounted(v.ID, staging) {
		return &csi.NodeStageVolumeResponse{}, nil
	}
	if err := s.d.mountAt(v, s.d.content(v.ID), staging, false); err != nil {
		return nil, err
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

func (s node) NodeUnstageVolume(_ context.Context, r *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	if err := s.d.checkPath(r.GetVolumeId(), "staging_target_path", r.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	v, err := s.d.created(r.GetVolumeId())
	if err != nil {
		return nil, notFound(err)
	}
	if err := s.d.unmountAt(v, r.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}

// ephemeralKey is in the volume context of a volume that a pod defines inline, if the CSIDriver
// object has podInfoOnMount. Such a volume is made when it is published and removed when it is
// unpublished.
const ephemeralKey = "csi.storage.k8s.io/ephemeral"

func (s node) NodePublishVolume(_ context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	id, target := r.GetVolumeId(), r.GetTargetPath()
	if err := s.d.checkPath(id, "target_path", target); err != nil {
		return nil, err
	}
	if r.GetVolumeCapability() == nil {
		return nil, invalid("volume_capability is missing")
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	v, err := s.d.get(id)
	missing := errors.Is(err, errNoVolume) && r.GetVolumeContext()[ephemeralKey] == "true" && !validID(id)
	if err != nil && !missing {
		return nil, notFound(err)
	}
	if why := unsupported(r.GetVolumeCapability()); why != "" {
		return nil, status.Error(codes.FailedPrecondition, why)
	}
	if missing {
		v = volume{ID: id, Capacity: defaultCapacity}
		if err := s.d.add(v); err != nil {
			return nil, internal(err)
		}
	}
	source := s.d.content(id)
	if !v.ephemeral() {
		if source = r.GetStagingTargetPath(); !s.d.isMounted(id, source) {
			return nil, status.Errorf(codes.FailedPrecondition, "volume %s is not staged at staging_target_path %q", id, source)
		}
	}
	mode := r.GetVolumeCapability().GetAccessMode().GetMode()
	readonly := r.GetReadonly() || mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
	if s.d.isMounted(id, target) {
		if s.d.mount.readonly(target) != readonly {
			return nil, status.Errorf(codes.AlreadyExists, "volume %s is published at %s, but with another readonly flag", id, target)
		}
		return &csi.NodePublishVolumeResponse{}, nil
	}
	if mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER {
		if others := slices.DeleteFunc(s.d.mounted(v), func(t string) bool { return t == source }); len(others) > 0 {
			return nil, status.Errorf(codes.FailedPrecondition, "volume %s has a single writer, and is published at %s", id, strings.Join(others, ", "))
		}
	}
	err = s.d.mountAt(v, source, target, readonly)
	if err != nil && missing { // the kubelet may not unpublish what was never published
		err = errors.Join(err, s.d.remove(id))
	}
	if err != nil {
		return nil, err
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

func (s node) NodeUnpublishVolume(_ context.Context, r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	id, target := r.GetVolumeId(), r.GetTargetPath()
	if err := s.d.checkPath(id, "target_path", target); err != nil {
		return nil, err
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	v, err := s.d.get(id)
	if errors.Is(err, errNoVolume) && !validID(id) {
		// An ephemeral volume that was unpublished before. After NotFound the kubelet would retry
		// forever.
		return &csi.NodeUnpublishVolumeResponse{}, nil
	}
	if err != nil {
		return nil, notFound(err)
	}
	if err := s.d.unmountAt(v, target); err != nil {
		return nil, err
	}
	// rmdir, not more: the driver did not create anything but an empty directory.
	if err := syscall.Rmdir(target); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, internal(fmt.Errorf("cannot remove the target: %w", err))
	}
	if v.ephemeral() && len(s.d.mounted(v)) == 0 {
		if err := s.d.remove(id); err != nil {
			return nil, internal(err)
		}
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func (s node) NodeGetVolumeStats(_ context.Context, r *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	switch {
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id is missing")
	case r.GetVolumePath() == "":
		return nil, invalid("volume_path is missing")
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	v, err := s.d.get(r.GetVolumeId())
	if err != nil {
		return nil, notFound(err)
	}
	if !s.d.isMounted(v.ID, r.GetVolumePath()) {
		return nil, status.Errorf(codes.NotFound, "volume %s is not mounted at %s", v.ID, r.GetVolumePath())
	}
	var fs syscall.Statfs_t
	if err := syscall.Statfs(r.GetVolumePath(), &fs); err != nil {
		return nil, internal(err)
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{{
		Unit:      csi.VolumeUsage_BYTES,
		Total:     int64(fs.Blocks) * int64(fs.Bsize),
		Used:      int64(fs.Blocks-fs.Bfree) * int64(fs.Bsize),
		Available: int64(fs.Bavail) * int64(fs.Bsize),
	}, {
		Unit:      csi.VolumeUsage_INODES,
		Total:     int64(fs.Files),
		Used:      int64(fs.Files - fs.Ffree),
		Available: int64(fs.Ffree),
	}}}, nil
}

// NodeExpandVolume has nothing to do: a directory has no file system of its own that would have to
// grow.
func (s node) NodeExpandVolume(_ context.Context, r *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	if err := checkExpand(r.GetVolumeId(), r.GetCapacityRange()); err != nil {
		return nil, err
	}
	if r.GetVolumePath() == "" {
		return nil, invalid("volume_path is missing")
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	v, err := s.d.created(r.GetVolumeId())
	if err != nil {
		return nil, notFound(err)
	}
	switch required := r.GetCapacityRange().GetRequiredBytes(); {
	case !s.d.isMounted(v.ID, r.GetVolumePath()):
		return nil, status.Errorf(codes.NotFound, "volume %s is not mounted at %s", v.ID, r.GetVolumePath())
	case required > v.Capacity:
		return nil, status.Errorf(codes.OutOfRange, "volume %s has %d bytes: ControllerExpandVolume makes it larger", v.ID, v.Capacity)
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: v.Capacity}, nil
}

// NodeGetVolumeHealth reports a volume whose directory is gone, or that is no longer mounted.
func (s node) NodeGetVolumeHealth(_ context.Context, r *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	if r.GetVolumeId() == "" {
		return nil, invalid("volume_id is missing")
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	v, err := s.d.get(r.GetVolumeId())
	if err != nil {
		return nil, notFound(err)
	}
	health := &csi.VolumeHealth{VolumeId: v.ID}
	report := func(problem csi.VolumeHealthErrorType, reason, message string) {
		health.HealthStatuses = append(health.HealthStatuses, &csi.VolumeHealth_VolumeHealthEntry{Status: problem, Reason: reason, Message: message})
	}
	if _, err := os.Stat(s.d.content(v.ID)); err != nil {
		report(csi.VolumeHealthErrorType_DATA_LOSS, "DirectoryMissing", err.Error())
	}
	for _, path := range []string{r.GetStagingTargetPath(), r.GetVolumePublishPath()} {
		if path != "" && !s.d.isMounted(v.ID, path) {
			report(csi.VolumeHealthErrorType_INACCESSIBLE, "NotMounted", "nothing is mounted at "+path)
			break // one entry for each reason
		}
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: health}, nil
}

// NodeGetStorageHealth reports the directory of all volumes if it cannot be read.
func (s node) NodeGetStorageHealth(context.Context, *csi.NodeGetStorageHealthRequest) (*csi.NodeGetStorageHealthResponse, error) {
	response := &csi.NodeGetStorageHealthResponse{}
	if _, err := os.Stat(s.d.Data); err != nil {
		response.BackendHealth = append(response.BackendHealth, &csi.NodeGetStorageHealthResponse_StorageBackendHealth{
			Status: csi.StorageHealthErrorType_STORAGE_UNREACHABLE, Reason: "DirectoryUnreachable", Message: err.Error(),
		})
	}
	return response, nil
}
