package status

import (
	"time"

	"csi-registrar/internal/sys/safetext"
)

// Driver is the status of a driver: an immutable snapshot that its registrar reports at each
// change. Its JSON form is an element of "drivers" in the status document. Fields may be added, but
// not renamed; unknown ones are absent.
type Driver struct {
	Name     string         `json:"name"`
	Socket   safetext.Claim `json:"socket"`
	Endpoint safetext.Claim `json:"endpoint"` // what the kubelet is told

	State        string            `json:"state"` // State, or "disabled"
	Driver       DriverState       `json:"driver"`
	Registration RegistrationState `json:"registration"`
	Since        time.Time         `json:"since,omitzero"` // when State was entered
	Reason       string            `json:"reason,omitempty"`
	// when Driver was entered; zero: it was not asked yet
	DriverSince time.Time `json:"driver_since,omitzero"`
	// NoTable: its table is not in the files any more, and its volumes are in use.
	NoTable bool `json:"no_table,omitempty"`
	// DriverRestarts is how often the driver came back within RestartWindow.
	DriverRestarts int `json:"driver_restarts,omitempty"`

	RegistrationSocket safetext.Claim    `json:"registration_socket,omitempty"`
	NodeID             string            `json:"node_id,omitempty"`
	Topology           map[string]string `json:"topology,omitempty"`
	MaxVolumes         int64             `json:"max_volumes_per_node,omitempty"` // 0: no limit
	// KubeletMaxVolumes is the limit that the kubelet learned at the registration, 0 if none; nil
	// if that is MaxVolumes.
	KubeletMaxVolumes *int64    `json:"kubelet_max_volumes_per_node,omitempty"`
	DriverVersion     string    `json:"driver_version,omitempty"`
	RegisteredAt      time.Time `json:"registered_at,omitzero"`
	LastGetInfoAt     time.Time `json:"last_get_info_at,omitzero"`
	KubeletError      string    `json:"kubelet_error,omitempty"`
	Republications    uint64    `json:"republications"`
	// RefusedChange is what changed in the driver's answers that the kubelet would refuse, so that
	// it was not told.
	RefusedChange string `json:"refused_change,omitempty"`
	// ServedBy is another registrar that serves the driver in place of the daemon, while State is
	// "conflict".
	ServedBy ServedBy `json:"served_by,omitzero"`
	// NotKept is why the registration would not survive a restart of the daemon.
	NotKept string `json:"not_kept,omitempty"`
	// Server is the process that serves the driver's socket, or served it last.
	Server Server `json:"server,omitzero"`
	// DampedUntil is when the registration socket, which changed too often, is changed again at
	// the latest.
	DampedUntil time.Time `json:"damped_until,omitzero"`
	// Volumes is set by `status`; the daemon does not count volumes.
	Volumes *Volumes `json:"volumes,omitempty"`

	// Yields: a csi-registrar that has a descriptor store serves the driver.
	Yields bool `json:"-"`

	// WithdrawalError is why the registration could not be withdrawn, since WithdrawalFailedAt;
	// see Document.Withdrawals.
	WithdrawalError    string    `json:"-"`
	WithdrawalFailedAt time.Time `json:"-"`

	Restarts      []time.Time `json:"-"` // the last ones, also before RestartWindow, oldest first
	RestartsTotal uint64      `json:"-"` // since the daemon started

	// For metrics only.
	// from published to the kubelet's first confirmation; 0: there was none
	Took     time.Duration `json:"-"`
	Accepted uint64        `json:"-"` // by the kubelet, since the start
	Refusals uint64        `json:"-"` // by the kubelet, since the start
}

// ServedBy is a process of root that has listened at a driver's registration socket for at least 15
// seconds, and answered GetInfo with the driver and the endpoint that the daemon would announce.
type ServedBy struct {
	PID     int       `json:"pid"`
	Since   time.Time `json:"since"`    // when it was found there first
	AskedAt time.Time `json:"asked_at"` // when it answered last
}

// AnswerLasts is for how long an answer of another registrar is relied upon.
const AnswerLasts = 15 * time.Second

// Server is a process that serves a driver's socket, and where to find its log: in the journal of
// its unit, or in that of its container. Of these one is known, or none.
type Server struct {
	PID       int            `json:"pid"`
	Unit      safetext.Claim `json:"unit,omitempty"`
	Pod       safetext.Claim `json:"pod,omitempty"` // its UID
	Container safetext.Claim `json:"container,omitempty"`
}

// Volumes is the number of volumes of a driver that are in use on this node.
type Volumes struct {
	Staged    int `json:"staged"`
	Published int `json:"published"` // mounted, once for each pod
	Waiting   int `json:"waiting"`   // for a pod, and not mounted yet
	Late      int `json:"-"`         // of Waiting, those for more than a minute
}

// InUse returns how many volumes the kubelet has to unmount.
func (v Volumes) InUse() int { return max(v.Published+v.Waiting, v.Staged) }

// RestartWindow is the period in which the restarts of a driver are counted.
const RestartWindow = 10 * time.Minute

// ManyRestarts within RestartWindow are more than an upgrade or a repair needs.
const ManyRestarts = 3

// Served reports whether the kubelet has the driver: registered by the daemon, or, as far as can be
// seen from here, by another registrar.
func (d Driver) Served() bool { return d.State == string(Registered) || d.ServedBy.PID != 0 }

// Down reports whether the driver is registered and does not serve.
func (d Driver) Down() bool {
	return d.Registration == Registered && d.State != Disabled && d.Driver != Ready && !d.DriverSince.IsZero()
}

// States of a driver without a registrar.
const (
	Disabled = "disabled" // enabled = false
	Invalid  = "invalid"  // its table was never in force because of an error
)
