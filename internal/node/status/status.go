// Package status has the types that other packages share: the state of a driver, what the
// kubelet is told about it, what is in the plugins_registry, and the status document. Nothing in
// it has side effects.
package status

import (
	"maps"
	"time"
)

// DriverState is the state of the driver itself.
type DriverState string

// The states of a driver.
const (
	Absent   DriverState = "absent"   // nobody listens at its socket
	Starting DriverState = "starting" // answers, but is not ready yet
	Ready    DriverState = "ready"    // GetPluginInfo, Probe and NodeGetInfo answered
	// accepts connections, but did not answer twice, after it was published
	Hanging  DriverState = "hanging"
	Mismatch DriverState = "mismatch" // answers, but its name, owner or path is not as configured
)

// RegistrationState is the state of its registration with the kubelet.
type RegistrationState string

// The states of a registration.
const (
	None       RegistrationState = "none"       // the daemon has published no socket
	Published  RegistrationState = "published"  // the socket is up, the kubelet has not confirmed
	Registered RegistrationState = "registered" // the kubelet accepted it
	Refused    RegistrationState = "refused"    // the kubelet refused it
	Conflict   RegistrationState = "conflict"   // another live registrar has the path or the name
)

// State returns the state that people see: that of the registration if there is one, else that of
// the driver.
func State(d DriverState, r RegistrationState) string {
	if r == None {
		return string(d)
	}
	return string(r)
}

// Identity is what a driver reports about itself. The receiver sanitizes its strings (safetext),
// except NodeID and Topology, which are compared as sent.
type Identity struct {
	Name       string            `json:"name"`
	Version    string            `json:"version,omitempty"`
	NodeID     string            `json:"node_id,omitempty"`
	MaxVolumes int64             `json:"max_volumes,omitempty"` // 0: no limit
	Topology   map[string]string `json:"topology,omitempty"`
}

// Equal reports whether both are the same.
func (i Identity) Equal(o Identity) bool {
	return i.Name == o.Name && i.Version == o.Version && i.NodeID == o.NodeID &&
		i.MaxVolumes == o.MaxVolumes && maps.Equal(i.Topology, o.Topology)
}

// Report is the result of asking a driver.
type Report struct {
	Driver   DriverState // empty: there is no report
	Reason   string      // why it is not Ready, for a person who can act on it
	Identity Identity    // complete only when Ready
	// Replaced: the socket is not the same file as at the previous Ready report, so the driver was
	// away, however briefly. Meaningful only when Ready.
	Replaced bool
	// Silent: the driver did not answer a call within its time limit.
	Silent bool
	// Connection is the number of the connection over which Probe and NodeGetInfo were called,
	// which may be expensive for the driver; 0: they were not.
	Connection uint64
	Server     Server // who serves the socket, or served it when it was connected to last
}

// View is what is known of a driver.
type View struct {
	Report            // the last one
	AskedAt time.Time // when the query that returned it began; zero: none has returned
	// Known is the identity of the last Ready report; without a name: there was none.
	Known         Identity
	KnownSince    time.Time   // when the driver first reported it
	ReadySince    time.Time   // when the driver was last ready after it was not
	LastPresent   time.Time   // when the driver was last not absent, or the start
	ReturnedAt    time.Time   // when it last came back; zero: never
	Restarts      []time.Time // the last ones, oldest first; not changed in place
	RestartsTotal uint64
}

// Announcement is what the kubelet is told by GetInfo (Name, Endpoint, Versions) and what it then
// learns from the driver (the rest of Identity).
type Announcement struct {
	Endpoint string   `json:"endpoint"`
	Versions []string `json:"versions"`
	Identity Identity `json:"identity"`
}

// Place is what is at the path of a registration socket.
type Place string

// The values of Place describe what is at the path.
const (
	Missing Place = "missing" // nothing
	Ours    Place = "ours"    // the socket that the daemon created and listens on
	Foreign Place = "foreign" // anything else, live or stale
)

// Notification is the kubelet's last NotifyRegistrationStatus.
type Notification struct {
	At         time.Time `json:"at,omitzero"` // zero: there was none since the socket was published
	Registered bool      `json:"registered"`
	Error      string    `json:"error,omitempty"` // sanitized
}

// Publication is the content of a published socket, with the calls of the kubelet since. It is part
// of the record, for the next process.
type Publication struct {
	PublishedAt  time.Time    `json:"published_at"`
	GetInfoAt    time.Time    `json:"get_info_at,omitzero"` // the last one
	Announced    Announcement `json:"announced"`
	Notification Notification `json:"notification,omitzero"`
	// FirstAcceptedAt shows how long the registration took. Notification does not: a kubelet
	// accepts again after its restart.
	FirstAcceptedAt time.Time `json:"first_accepted_at,omitzero"`
}

// Socket is the state of a registration socket: its path, and the calls of the kubelet.
type Socket struct {
	Path  string // <plugins_registry>/<driver name>-reg.sock
	Place Place  // as last checked
	// DirMissing: there is no plugins_registry. Meaningful while Place is Missing.
	DirMissing bool
	// DirRecreated: the plugins_registry is not the directory that this daemon saw first, so a
	// kubelet that is older may watch the deleted one forever (kubelet v1.36 watches the inode
	// and does not look again).
	DirRecreated bool
	// Up: we listen on a published socket that was not withdrawn. Place is whether it is still
	// there.
	Up bool
	// Adopted: an earlier process published it.
	Adopted bool
	Publication
	Accepted uint64 // accepted by the kubelet since the process started
	Refusals uint64 // refused since then
	NotKept  string // why it would not survive a restart of the daemon; empty if it would
	// AlsoServed describes other sockets in the plugins_registry that served the same driver when
	// the kubelet refused ours; empty: there were none.
	AlsoServed string
	// ServedBy is who serves the driver at Path in place of us, as last asked; zero: nobody.
	ServedBy ServedBy
	// Yields: a csi-registrar with a descriptor store has the path, and we have no store.
	Yields bool
}

// ByWallClock returns t in UTC. If the wall clock was set after t was taken, it returns the time
// that is as long before now, by the wall clock of now.
func ByWallClock(t, now time.Time) time.Time {
	if t.IsZero() {
		return t.UTC()
	}
	// The clocks are read one after the other, so they always differ a little.
	if by := now.Add(t.Sub(now)); by.Round(0).Sub(t.Round(0)).Abs() > time.Second {
		t = by
	}
	return t.UTC()
}
