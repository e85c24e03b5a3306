package sampledriver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
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
	return &csi.NodeGetCapabilitiesResponse{Capabilities: []*csi.NodeServiceCapability{{
		Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{
			Type: csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		}},
	}}}, nil
}

func (s node) NodePublishVolume(_ context.Context, r *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if err := s.d.checkTarget(r.GetVolumeId(), r.GetTargetPath()); err != nil {
		return nil, err
	}
	if r.GetVolumeCapability() == nil {
		return nil, invalid("volume_capability is missing")
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	v, err := s.d.get(r.GetVolumeId())
	if err != nil {
		return nil, notFound(err)
	}
	if why := unsupported(r.GetVolumeCapability()); why != "" {
		return nil, status.Error(codes.FailedPrecondition, why)
	}
	target := r.GetTargetPath()
	readonly := r.GetReadonly() || r.GetVolumeCapability().GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
	if s.d.isPublished(v.ID, target) {
		if s.d.mount.readonly(target) != readonly {
			return nil, status.Errorf(codes.AlreadyExists, "volume %s is published at %s, but with another readonly flag", v.ID, target)
		}
		return &csi.NodePublishVolumeResponse{}, nil
	}
	// Written down first: a driver that is killed between the two forgets no mount.
	if !slices.Contains(v.Targets, target) {
		v.Targets = append(s.d.published(v), target)
		if err := s.d.update(v); err != nil {
			return nil, internal(err)
		}
	}
	if err := s.d.publish(v.ID, target, readonly); err != nil {
		return nil, err
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

// publish makes the target and mounts the volume there, or leaves nothing behind.
func (d *Driver) publish(id, target string, readonly bool) error {
	if err := os.Mkdir(target, 0o750); err != nil && !errors.Is(err, os.ErrExist) {
		return internal(fmt.Errorf("cannot make the target: %w", err))
	}
	if info, err := os.Lstat(target); err != nil || !info.IsDir() {
		return status.Errorf(codes.FailedPrecondition, "target_path %s is there already and is no directory", target)
	}
	err := d.mount.bind(d.content(id), target, readonly)
	if err == nil {
		return nil
	}
	// Best effort: rmdir takes nothing but our own empty directory.
	if removed := os.Remove(target); removed != nil && !errors.Is(removed, os.ErrNotExist) {
		err = errors.Join(err, removed)
	}
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EACCES) {
		return status.Errorf(codes.PermissionDenied, "cannot publish volume %s at %s: %v: run the driver as root with CAP_SYS_ADMIN", id, target, err)
	}
	return internal(fmt.Errorf("cannot publish volume %s at %s: %w", id, target, err))
}

func (s node) NodeUnpublishVolume(_ context.Context, r *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if err := s.d.checkTarget(r.GetVolumeId(), r.GetTargetPath()); err != nil {
		return nil, err
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	v, err := s.d.get(r.GetVolumeId())
	if err != nil {
		return nil, notFound(err)
	}
	target := r.GetTargetPath()
	// Mounts may be stacked, by a call that was repeated after a crash.
	for s.d.isPublished(v.ID, target) {
		if err := s.d.mount.unmount(target); err != nil {
			return nil, internal(fmt.Errorf("cannot unmount %s: %w", target, err))
		}
	}
	// rmdir, not more: what is not an empty directory now is not ours.
	if err := os.Remove(target); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, internal(fmt.Errorf("cannot remove the target: %w", err))
	}
	if slices.Contains(v.Targets, target) {
		v.Targets = slices.DeleteFunc(v.Targets, func(t string) bool { return t == target })
		if err := s.d.update(v); err != nil {
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
	if !s.d.isPublished(v.ID, r.GetVolumePath()) {
		return nil, status.Errorf(codes.NotFound, "volume %s is not published at %s", v.ID, r.GetVolumePath())
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

// checkTarget refuses what may not become the end of a mount: a path that is relative,
// goes up, or lies within the driver's own directory.
func (d *Driver) checkTarget(id, target string) error {
	switch {
	case id == "":
		return invalid("volume_id is missing")
	case target == "":
		return invalid("target_path is missing")
	case !filepath.IsAbs(target) || slices.Contains(strings.Split(target, "/"), ".."):
		return invalid("target_path must be absolute and without '..'")
	}
	if inside, err := filepath.Rel(d.Data, target); err == nil && filepath.IsLocal(inside) {
		return invalid("target_path lies within the driver's data directory")
	}
	return nil
}
