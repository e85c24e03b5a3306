package status

import (
	"fmt"
	"slices"
	"time"

	"csi-registrar/internal/sys/safetext"
)

// Document is the document of `status --json` and GET /v1/status. A command that reads it from the
// daemon must check a Claim before it uses it as more than text.
type Document struct {
	Version     string           `json:"version"`
	StartedAt   time.Time        `json:"started_at"`
	ConfigFiles []safetext.Claim `json:"config_files"`
	// the errors of the files, one a line; absent while there are none
	ConfigError string `json:"config_error,omitempty"`
	// InvalidFiles have errors outside of valid drivers' tables, and nothing of them is in force.
	InvalidFiles    []safetext.Claim `json:"invalid_files,omitempty"`
	PluginsRegistry safetext.Claim   `json:"plugins_registry"`
	// Kubelet is the kubelet that last reported a result; absent if it is not known, or cannot
	// be followed.
	Kubelet Kubelet  `json:"kubelet,omitzero"`
	Drivers []Driver `json:"drivers"` // by name
	// Polling is why files are checked for changes each second, instead of the kernel reporting
	// them (inotify); empty if it does.
	Polling string      `json:"polling,omitempty"`
	Stuck   []StuckCall `json:"stuck,omitempty"`
	// Withdrawals are those that failed and are retried, by driver.
	Withdrawals []Withdrawal `json:"withdrawals,omitempty"`
	// LandlockABI is the version of the kernel's Landlock that restricts the daemon; 0: none does.
	LandlockABI int `json:"landlock_abi"`

	// NodeVolumes are those of all drivers; for metrics only. nil: not known.
	NodeVolumes *NodeVolumes `json:"-"`

	VolumesError string `json:"-"` // why `status` cannot count the volumes
	// Unregistered are the drivers without a table whose volumes `status` finds in use, and that
	// have no registration socket, with the number of volumes.
	Unregistered []string `json:"-"`
}

// NodeVolumes is the number of volumes on this node.
type NodeVolumes struct {
	Volumes          // of all drivers
	Unregistered int // in use, of drivers that nobody registers
}

// Kubelet is a process that reported the result of a registration.
type Kubelet struct {
	// absent in a pid namespace that is not visible
	PID         int       `json:"pid,omitempty"`
	ConfirmedAt time.Time `json:"confirmed_at"`      // when it first reported a result
	EndedAt     time.Time `json:"ended_at,omitzero"` // absent while it runs
}

// String names the process for people.
func (k Kubelet) String() string {
	if k.PID == 0 {
		return "the kubelet"
	}
	return fmt.Sprintf("the kubelet (pid %d)", k.PID)
}

// StuckCall is a system call that was abandoned because the file system of Path does not answer.
type StuckCall struct {
	Path  safetext.Claim `json:"path"`
	Since time.Time      `json:"since"`
}

// Withdrawal is a registration that should be withdrawn and could not be.
type Withdrawal struct {
	Driver             string         `json:"driver"`
	RegistrationSocket safetext.Claim `json:"registration_socket"`
	Since              time.Time      `json:"since"`
	Error              string         `json:"error"`
}

// Driver returns the driver of a name.
func (s Document) Driver(name string) (Driver, bool) {
	i := slices.IndexFunc(s.Drivers, func(d Driver) bool { return d.Name == name })
	if i < 0 {
		return Driver{}, false
	}
	return s.Drivers[i], true
}

// KubeletEnded returns a sentence if the kubelet that confirmed the driver's registration has
// ended; empty if it has not, or that is not known.
func (s Document) KubeletEnded(d Driver, now time.Time) string {
	if s.Kubelet.EndedAt.IsZero() || d.Registration != Registered {
		return ""
	}
	text := "%s that confirmed this ended %s ago; none has asked since"
	if d.LastGetInfoAt.After(s.Kubelet.EndedAt) {
		text = "%s that confirmed this ended %s ago; one has asked since, and has not confirmed"
	}
	return fmt.Sprintf(text, s.Kubelet, now.Sub(s.Kubelet.EndedAt).Round(time.Second))
}

// Down returns the registered drivers that do not serve.
func (s Document) Down() []Driver {
	return slices.DeleteFunc(slices.Clone(s.Drivers), func(d Driver) bool { return !d.Down() })
}

// Unserved returns the drivers of Pending that no other registrar serves either.
func (s Document) Unserved() []Driver { return slices.DeleteFunc(s.Pending(), Driver.Served) }

// Pending returns the drivers that are not registered, except for disabled ones.
func (s Document) Pending() []Driver {
	return slices.DeleteFunc(slices.Clone(s.Drivers), func(d Driver) bool {
		return d.State == Disabled || d.State == string(Registered)
	})
}

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
