package config

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/sys/trust"
)

// WhenGone is what happens to the registration of a driver that does not answer.
type WhenGone string

// The values of WhenGone. Keep is the default: without a registration nothing can be unmounted.
const (
	Keep     WhenGone = "keep"
	Withdraw WhenGone = "withdraw"
)

// WhenLimitChanges is what happens when the driver reports another volume limit.
type WhenLimitChanges string

// The values of WhenLimitChanges. Republish is the default: the driver is registered again.
const (
	Republish WhenLimitChanges = "republish"
	Leave     WhenLimitChanges = "leave"
)

// Connection is the part of a driver's table that the client of the driver gets: a change needs a
// new connection to the driver.
type Connection struct {
	Name        string            // that GetPluginInfo must report; passes csiname.CheckName
	Socket      string            // where the driver listens; absolute, clean, at most 107 bytes
	Endpoint    string            // the socket as the kubelet sees it; as Socket, never empty
	Timeout     time.Duration     // of GetPluginInfo and Probe; above 0
	SocketOwner trust.SocketOwner // who besides root may serve Socket

	// OwnerUnknown means that the SocketOwner was lost with the table. A socket of another owner
	// is no mismatch then. It is not a key of the table.
	OwnerUnknown bool
}

// Driver is one table [driver."NAME"].
type Driver struct {
	Connection
	Enabled           bool
	SupportedVersions []string // never empty, one of them 1.x
	WhenGone          WhenGone
	WithdrawAfter     time.Duration // with Withdraw: how long the driver may be gone; above 0
	ProbeEvery        time.Duration // of a registered driver; zero: never
	WhenLimitChanges  WhenLimitChanges

	// KeptFor is why the driver is still in force although its table disappeared from the files
	// for longer than the grace period. It is not a key of the table.
	KeptFor string
}

// field is a key of a table that is kept in a T.
type field[T any] struct {
	key   string
	want  string // a valid value, for hints
	set   func(t *T, value any) *fault
	unset func(t *T)  // sets the default
	get   func(T) any // string, bool, time.Duration, []string or a type of these
}

// newField returns a key whose value is kept at a place in T, and parsed by parse.
func newField[T, V any](key string, def V, want string, at func(*T) *V, parse func(value any) (V, *fault)) field[T] {
	return field[T]{
		key, want,
		func(t *T, value any) *fault {
			v, err := parse(value)
			if err == nil {
				*at(t) = v
			}
			return err
		},
		func(t *T) { *at(t) = def },
		func(t T) any { return *at(&t) },
	}
}

// defaults returns a table with all defaults.
func defaults[T any](fields []field[T]) (t T) {
	for _, f := range fields {
		f.unset(&t)
	}
	return t
}

func kubeletFields() []field[Kubelet] {
	return []field[Kubelet]{
		newField("root_dir", "/var/lib/kubelet", `must be an absolute path such as "/var/lib/kubelet"`,
			func(k *Kubelet) *string { return &k.RootDir }, absolute),
	}
}

func logFields() []field[Log] {
	return []field[Log]{
		newField("level", "info", `must be "debug", "info", "warn" or "error"`,
			func(l *Log) *string { return &l.Level }, oneOf("debug", "info", "warn", "error")),
		newField("format", "auto", `must be "auto", "journal", "text" or "json"`,
			func(l *Log) *string { return &l.Format }, oneOf("auto", "journal", "text", "json")),
	}
}

// driverFields defines each key of a driver's table: its default, a hint, its field and its parser.
func driverFields() []field[Driver] {
	const path = `must be an absolute path such as "/run/csi-nfs/csi.sock"`
	const span = `must be a duration above zero such as "5s" or "1m30s"`
	const onOff = "must be true or false, without quotes"
	aboveZero := duration(func(d time.Duration) bool { return d > 0 }, "is not above zero")
	secondOrZero := duration(func(d time.Duration) bool { return d == 0 || d >= time.Second }, "is below a second")
	return []field[Driver]{
		newField("socket", "", path, func(d *Driver) *string { return &d.Socket }, socketPath),
		// empty: socket
		newField("endpoint", "", path, func(d *Driver) *string { return &d.Endpoint }, socketPath),
		newField("enabled", true, onOff, func(d *Driver) *bool { return &d.Enabled }, boolean),
		newField("timeout", 5*time.Second, span, func(d *Driver) *time.Duration { return &d.Timeout }, aboveZero),
		newField("supported_versions", []string{"1.0.0"}, `must be a list of versions such as ["1.0.0"]`,
			func(d *Driver) *[]string { return &d.SupportedVersions }, versions),
		newField("when_driver_is_gone", Keep, `must be "keep" or "withdraw"`,
			func(d *Driver) *WhenGone { return &d.WhenGone }, oneOf(Keep, Withdraw)),
		newField("withdraw_after", 30*time.Second, span, func(d *Driver) *time.Duration { return &d.WithdrawAfter }, aboveZero),
		newField("probe_every", time.Minute, `must be "0" or a duration of at least a second such as "1m"`,
			func(d *Driver) *time.Duration { return &d.ProbeEvery }, secondOrZero),
		newField("when_limit_changes", Republish, `must be "republish" or "leave"`,
			func(d *Driver) *WhenLimitChanges { return &d.WhenLimitChanges }, oneOf(Republish, Leave)),
		newField("socket_owner", "root", "must be "+trust.ValidOwner,
			func(d *Driver) *trust.SocketOwner { return &d.SocketOwner }, owner),
	}
}

func keys[T any](fields []field[T]) []string {
	out := make([]string, len(fields))
	for i, f := range fields {
		out[i] = f.key
	}
	return out
}

// literal writes a value of a field as TOML. Strings have no control characters, the only ones
// for which Go has escapes that TOML does not have.
func literal(v any) string {
	switch v := v.(type) {
	case bool:
		return strconv.FormatBool(v)
	case []string:
		return `["` + strings.Join(v, `", "`) + `"]` // versions, which need no escapes
	default:
		return strconv.Quote(fmt.Sprint(v))
	}
}

// knownHere returns the hint for an unknown key.
func knownHere(keys []string) string { return "known here: " + strings.Join(keys, ", ") }

var bareKey = regexp.MustCompile(`^[A-Za-z0-9_-]+$`)

// keyString writes a dotted key as TOML. The name of a driver is always quoted, as in the
// documentation.
func keyString(parts ...string) string {
	out := make([]string, len(parts))
	for i, part := range parts {
		if out[i] = part; i == 1 && parts[0] == "driver" || !bareKey.MatchString(part) {
			out[i] = strconv.Quote(part)
		}
	}
	return strings.Join(out, ".")
}
