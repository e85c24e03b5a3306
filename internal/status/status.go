// Package status holds the words that the others share: what is known of a driver, what the
// kubelet is told of it, what is seen in the plugins_registry, and the status document. Types
// and the rules for names and labels; nothing that runs.
package status

import (
	"maps"
	"slices"
	"time"
)

// DriverState is the first of the two states kept for each driver: what its socket answers.
type DriverState string

// The states of a driver.
const (
	Absent   DriverState = "absent"   // its socket does not answer
	Starting DriverState = "starting" // answers, but is not ready yet
	Ready    DriverState = "ready"    // GetPluginInfo, Probe and NodeGetInfo answered
	Mismatch DriverState = "mismatch" // answers, but is not what was configured: name, owner, path
)

// RegistrationState is the second: how far the kubelet has got with it.
type RegistrationState string

// The states of a registration.
const (
	None       RegistrationState = "none"       // no socket of ours is published
	Published  RegistrationState = "published"  // the socket is up, the kubelet has not confirmed
	Registered RegistrationState = "registered" // the kubelet accepted it
	Refused    RegistrationState = "refused"    // the kubelet refused it
	Conflict   RegistrationState = "conflict"   // another live registrar has the path or the name
)

// State derives the one word that people see: the state of the registration as soon as there
// is one, before that the state of the driver.
func State(d DriverState, r RegistrationState) string {
	if r == None {
		return string(d)
	}
	return string(r)
}

// Identity is what a driver says of itself. Strings are made harmless (safetext)
// by whoever received them, except NodeID and Topology, which are compared as sent.
type Identity struct {
	Name       string            `json:"name"`
	Version    string            `json:"version,omitempty"`
	NodeID     string            `json:"node_id,omitempty"`
	MaxVolumes int64             `json:"max_volumes,omitempty"` // 0: no limit
	Topology   map[string]string `json:"topology,omitempty"`
}

// Equal reports whether both say the same.
func (i Identity) Equal(o Identity) bool {
	return i.Name == o.Name && i.Version == o.Version && i.NodeID == o.NodeID &&
		i.MaxVolumes == o.MaxVolumes && maps.Equal(i.Topology, o.Topology)
}

// Report is the outcome of one round of asking a driver.
type Report struct {
	Driver   DriverState
	Reason   string   // why it is not Ready, in words a person can act on
	Identity Identity // whole only when Ready; as far as it was learned otherwise
	// Replaced: the socket is another file than at the Ready report before, so the driver was
	// away, however quickly it came back. Meaningful only when Ready.
	Replaced bool
}

// Announcement is what the kubelet is told with GetInfo (Name, Endpoint, Versions)
// and what it will learn from the driver because of it (the rest of Identity).
type Announcement struct {
	Endpoint string `json:"endpoint"`
	// LinkTarget: Endpoint is a symbolic link that we keep, and that points there; empty: it is not.
	// The kubelet does not learn it.
	LinkTarget string   `json:"link_target,omitempty"`
	Versions   []string `json:"versions"`
	Identity   Identity `json:"identity"`
}

// Equal reports whether both say the same.
func (a Announcement) Equal(o Announcement) bool {
	return a.Endpoint == o.Endpoint && a.LinkTarget == o.LinkTarget && slices.Equal(a.Versions, o.Versions) && a.Identity.Equal(o.Identity)
}

// Place is what is at the path of a registration socket.
type Place string

// What can be at the path.
const (
	Missing Place = "missing" // nothing
	Ours    Place = "ours"    // the socket that we made and listen on
	Foreign Place = "foreign" // anything else, live or stale
)

// Notification is what the kubelet said last with NotifyRegistrationStatus.
type Notification struct {
	At         time.Time `json:"at,omitzero"` // zero: it said nothing since the socket was published
	Registered bool      `json:"registered"`
	Error      string    `json:"error,omitempty"` // made harmless
}

// Socket is what is known of a registration socket: the path, and the kubelet's part.
type Socket struct {
	Path  string // <plugins_registry>/<driver name>-reg.sock
	Place Place  // as it was seen last
	// DirMissing: there is no plugins_registry; meaningful while Place is Missing.
	DirMissing bool
	// DirRecreated: the plugins_registry is not the directory that it was when this daemon
	// first saw it, so a kubelet that runs since before may watch the deleted one for ever
	// (kubelet v1.36 watches it by inode and never looks again).
	DirRecreated bool
	// Announced is what the socket that we published last tells; meaningful while Up.
	Announced       Announcement
	Up              bool // we listen on a socket that was put in place and not withdrawn; Place tells if it is still there
	PublishedAt     time.Time
	GetInfoAt       time.Time // the kubelet's last GetInfo since PublishedAt, else zero
	Notification    Notification
	FirstAcceptedAt time.Time // when the kubelet accepted it first since PublishedAt, in whatever process of ours; else zero
	Accepted        uint64    // how often the kubelet accepted, since the process started
	Refusals        uint64    // how often it refused
	NotKept         string    // why it would not survive a restart of the daemon; empty if it would
	// AlsoServed says where else in the plugins_registry, and by whom, the same driver is
	// served; empty if nowhere.
	AlsoServed string
	LinkError  string // why the endpoint link does not point where it belongs; empty if it does
	Traced     bool   // the endpoint link points at a recorder
}
