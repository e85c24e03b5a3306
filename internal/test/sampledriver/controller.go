package sampledriver

import (
	"context"
	"errors"
	"maps"
	"strings"
	"syscall"
	"unicode"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// defaultCapacity is what a volume is said to hold when nothing was asked for. Directories
// have no quota: the figure is kept and reported, not enforced.
const defaultCapacity = 1 << 30

// maxName is the longest volume name that every driver must accept, in bytes (CSI spec,
// "Size Limits").
const maxName = 128

// controller is the CSI Controller service.
type controller struct {
	csi.UnimplementedControllerServer
	d *Driver
}

func (s controller) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	response := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	} {
		response.Capabilities = append(response.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}},
		})
	}
	return response, nil
}

func (s controller) CreateVolume(_ context.Context, r *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if err := checkCreate(r); err != nil {
		return nil, err
	}
	if !s.d.reachable(r.GetAccessibilityRequirements()) {
		return nil, status.Error(codes.ResourceExhausted, "this node's topology is not among the required ones: volumes are directories of this node")
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	required, limit := r.GetCapacityRange().GetRequiredBytes(), r.GetCapacityRange().GetLimitBytes()
	v, err := s.d.get(volumeID(r.GetName()))
	switch {
	case err == nil:
		if v.Capacity < required || limit > 0 && v.Capacity > limit {
			return nil, status.Errorf(codes.AlreadyExists, "volume %q exists with %d bytes, which is outside the capacity that is asked for", r.GetName(), v.Capacity)
		}
	case errors.Is(err, errNoVolume):
		v = volume{ID: volumeID(r.GetName()), Name: r.GetName(), Capacity: required}
		if v.Capacity == 0 {
			v.Capacity = defaultCapacity
			if limit > 0 {
				v.Capacity = min(v.Capacity, limit)
			}
		}
		if err := s.d.add(v); err != nil {
			return nil, internal(err)
		}
	default:
		return nil, internal(err)
	}
	return &csi.CreateVolumeResponse{Volume: s.d.describe(v)}, nil
}

func checkCreate(r *csi.CreateVolumeRequest) error {
	name := r.GetName()
	switch {
	case name == "":
		return invalid("name is missing")
	case len(name) > maxName || strings.ContainsFunc(name, unicode.IsControl):
		return invalid("name is longer than 128 bytes or holds control characters")
	case len(r.GetVolumeCapabilities()) == 0:
		return invalid("volume_capabilities are missing")
	case r.GetVolumeContentSource() != nil:
		return invalid("volume_content_source is not supported")
	case len(r.GetMutableParameters()) > 0:
		return invalid("mutable_parameters are not supported")
	}
	if err := checkRange(r.GetCapacityRange()); err != nil {
		return err
	}
	if why := unsupported(r.GetVolumeCapabilities()...); why != "" {
		return invalid(why)
	}
	return nil
}

func (s controller) DeleteVolume(_ context.Context, r *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if r.GetVolumeId() == "" {
		return nil, invalid("volume_id is missing")
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	v, err := s.d.created(r.GetVolumeId())
	if errors.Is(err, errNoVolume) {
		return &csi.DeleteVolumeResponse{}, nil
	}
	if err != nil {
		return nil, internal(err)
	}
	if targets := s.d.mounted(v); len(targets) > 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "volume %s is still mounted at %s", v.ID, strings.Join(targets, ", "))
	}
	if err := s.d.remove(v.ID); err != nil {
		return nil, internal(err)
	}
	return &csi.DeleteVolumeResponse{}, nil
}

func (s controller) ValidateVolumeCapabilities(_ context.Context, r *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	switch {
	case r.GetVolumeId() == "":
		return nil, invalid("volume_id is missing")
	case len(r.GetVolumeCapabilities()) == 0:
		return nil, invalid("volume_capabilities are missing")
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	if _, err := s.d.created(r.GetVolumeId()); err != nil {
		return nil, notFound(err)
	}
	if why := unsupported(r.GetVolumeCapabilities()...); why != "" {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: why}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{
		Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
			VolumeContext:      r.GetVolumeContext(),
			VolumeCapabilities: r.GetVolumeCapabilities(),
			Parameters:         r.GetParameters(),
		},
	}, nil
}

// ListVolumes lists in order of id; the token of a page is the last id of the page
// before, so it stays valid whatever comes and goes between the pages.
func (s controller) ListVolumes(_ context.Context, r *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	switch {
	case r.GetMaxEntries() < 0:
		return nil, invalid("max_entries is negative")
	case r.GetStartingToken() != "" && !validID(r.GetStartingToken()):
		return nil, status.Error(codes.Aborted, "starting_token is not valid: begin again without one")
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	volumes, err := s.d.list(r.GetStartingToken())
	if err != nil {
		return nil, internal(err)
	}
	response := &csi.ListVolumesResponse{}
	if limit := int(r.GetMaxEntries()); limit > 0 && limit < len(volumes) {
		volumes = volumes[:limit]
		response.NextToken = volumes[limit-1].ID
	}
	for _, v := range volumes {
		response.Entries = append(response.Entries, &csi.ListVolumesResponse_Entry{Volume: s.d.describe(v)})
	}
	return response, nil
}

// GetCapacity is what the file system of the data directory has left.
func (s controller) GetCapacity(_ context.Context, r *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	t := r.GetAccessibleTopology()
	if unsupported(r.GetVolumeCapabilities()...) != "" || t != nil && !s.d.reachable(&csi.TopologyRequirement{Requisite: []*csi.Topology{t}}) {
		return &csi.GetCapacityResponse{}, nil
	}
	var fs syscall.Statfs_t
	if err := syscall.Statfs(s.d.Data, &fs); err != nil {
		return nil, internal(err)
	}
	return &csi.GetCapacityResponse{AvailableCapacity: int64(fs.Bavail) * int64(fs.Bsize)}, nil
}

// ControllerExpandVolume changes the figure. That the node has to expand it too is what a driver
// with a file system for each volume would say.
func (s controller) ControllerExpandVolume(_ context.Context, r *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	if err := checkExpand(r.GetVolumeId(), r.GetCapacityRange()); err != nil {
		return nil, err
	}
	required, limit := r.GetCapacityRange().GetRequiredBytes(), r.GetCapacityRange().GetLimitBytes()
	if required == 0 && limit == 0 {
		return nil, invalid("capacity_range is missing")
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	v, err := s.d.created(r.GetVolumeId())
	if err != nil {
		return nil, notFound(err)
	}
	if limit > 0 && v.Capacity > limit {
		return nil, status.Errorf(codes.OutOfRange, "volume %s has %d bytes, more than the limit: volumes do not shrink", v.ID, v.Capacity)
	}
	if required > v.Capacity {
		v.Capacity = required
		if err := s.d.update(v); err != nil {
			return nil, internal(err)
		}
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: v.Capacity, NodeExpansionRequired: true}, nil
}

func checkExpand(id string, capacity *csi.CapacityRange) error {
	if id == "" {
		return invalid("volume_id is missing")
	}
	return checkRange(capacity)
}

func checkRange(capacity *csi.CapacityRange) error {
	required, limit := capacity.GetRequiredBytes(), capacity.GetLimitBytes()
	switch {
	case required < 0 || limit < 0:
		return invalid("capacity_range is negative")
	case limit > 0 && required > limit:
		return status.Error(codes.OutOfRange, "capacity_range requires more bytes than its limit")
	}
	return nil
}

func (d *Driver) describe(v volume) *csi.Volume {
	described := &csi.Volume{VolumeId: v.ID, CapacityBytes: v.Capacity}
	if len(d.Topology) > 0 {
		described.AccessibleTopology = []*csi.Topology{{Segments: d.Topology}}
	}
	return described
}

// reachable reports whether a directory of this node meets the requirements.
func (d *Driver) reachable(r *csi.TopologyRequirement) bool {
	if len(d.Topology) == 0 || len(r.GetRequisite()) == 0 {
		return true
	}
	for _, t := range r.GetRequisite() {
		if maps.Equal(t.GetSegments(), d.Topology) {
			return true
		}
	}
	return false
}

// unsupported tells why the driver cannot serve a volume in one of these ways, or
// nothing: a directory of one node can be mounted on that node.
func unsupported(capabilities ...*csi.VolumeCapability) string {
	for _, c := range capabilities {
		switch mode := c.GetAccessMode().GetMode(); {
		case c.GetMount() == nil:
			return "only mounted volumes are supported, not block devices"
		case c.GetMount().GetFsType() != "" || len(c.GetMount().GetMountFlags()) > 0:
			return "fs_type and mount_flags are not supported: a volume is a directory"
		case !ofOneNode(mode):
			return "access mode " + mode.String() + " is not supported: a volume is a directory of one node"
		}
	}
	return ""
}

func ofOneNode(mode csi.VolumeCapability_AccessMode_Mode) bool {
	switch mode {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER, csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:
		return true
	}
	return false
}

func invalid(why string) error { return status.Error(codes.InvalidArgument, why) }

func internal(err error) error { return status.Error(codes.Internal, err.Error()) }

func notFound(err error) error {
	if errors.Is(err, errNoVolume) {
		return status.Error(codes.NotFound, err.Error())
	}
	return internal(err)
}
