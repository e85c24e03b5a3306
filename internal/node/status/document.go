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
