package status

import "time"

// Driver is what a registrar tells of its driver: one immutable snapshot, handed out at
// each change. Its JSON form is an element of "drivers" in the status document:
// fields are added, never renamed; what is not known is absent.
type Driver struct {
	Name     string `json:"name"`
	Socket   string `json:"socket"`
	Endpoint string `json:"endpoint"` // what the kubelet is told
	// LinkTarget is where Endpoint points if that is a link of endpoint_link.
	LinkTarget string `json:"link_target,omitempty"`

	State        string            `json:"state"` // State, or "disabled"
	Driver       DriverState       `json:"driver"`
	Registration RegistrationState `json:"registration"`
	Since        time.Time         `json:"since,omitzero"` // when State was entered
	Reason       string            `json:"reason,omitempty"`

	RegistrationSocket string            `json:"registration_socket,omitempty"`
	NodeID             string            `json:"node_id,omitempty"`
	Topology           map[string]string `json:"topology,omitempty"`
	MaxVolumes         int64             `json:"max_volumes_per_node,omitempty"`
	DriverVersion      string            `json:"driver_version,omitempty"`
	RegisteredAt       time.Time         `json:"registered_at,omitzero"`
	LastGetInfoAt      time.Time         `json:"last_get_info_at,omitzero"`
	KubeletError       string            `json:"kubelet_error,omitempty"`
	Republications     uint64            `json:"republications"`
	// NotKept says why the registration would not survive a restart of the daemon.
	NotKept string `json:"not_kept,omitempty"`
	// Traced: a recorder has the calls between the kubelet and the driver.
	Traced bool `json:"traced,omitempty"`
	// DampedUntil is when the registration socket is changed again at the latest, after it was
	// changed too often.
	DampedUntil time.Time `json:"damped_until,omitzero"`
	// Volumes is what `status` adds: the daemon does not look for volumes.
	Volumes *Volumes `json:"volumes,omitempty"`

	// For metrics only.
	Took             time.Duration     `json:"-"` // from published to the kubelet's first yes; 0 while it has not said it
	Accepted         uint64            `json:"-"` // the kubelet said yes, since start
	Refusals         uint64            `json:"-"` // the kubelet said no, since start
	RepublicationsBy map[string]uint64 `json:"-"` // by cause: one of the Cause words
}

// Volumes is how many volumes of a driver are in use on this node.
type Volumes struct {
	Staged    int `json:"staged"`
	Published int `json:"published"` // once for each pod
}

// Disabled is the State of a driver that the configuration names but does not want.
const Disabled = "disabled"
