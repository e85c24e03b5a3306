package config

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
)

// field is a key of a table that is kept in a T.
type field[T any] struct {
	key  string
	want string // what a right value is, for hints
	set  func(t *T, value any) *fault
	get  func(T) any // string, WhenGone, bool, time.Duration or []string
}

// newField is a key whose value parse makes a V of.
func newField[T, V any](key, want string, at func(*T) *V, parse func(value any) (V, *fault)) field[T] {
	return field[T]{
		key, want,
		func(t *T, value any) *fault {
			v, bad := parse(value)
			if bad == nil {
				*at(t) = v
			}
			return bad
		},
		func(t T) any { return *at(&t) },
	}
}

func kubeletFields() []field[Kubelet] {
	return []field[Kubelet]{
		newField("root_dir", `must be an absolute path such as "/var/lib/kubelet"`,
			func(k *Kubelet) *string { return &k.RootDir }, absolute),
	}
}

func logFields() []field[Log] {
	return []field[Log]{
		newField("level", `must be "debug", "info", "warn" or "error"`,
			func(l *Log) *string { return &l.Level }, oneOf("debug", "info", "warn", "error")),
		newField("format", `must be "auto", "journal", "text" or "json"`,
			func(l *Log) *string { return &l.Format }, oneOf("auto", "journal", "text", "json")),
	}
}

func driverFields() []field[Driver] {
	const path = `must be an absolute path such as "/run/csi-nfs/csi.sock"`
	const span = `must be a duration above zero such as "5s" or "1m30s"`
	return []field[Driver]{
		newField("socket", path, func(d *Driver) *string { return &d.Socket }, connectable),
		newField("endpoint", path, func(d *Driver) *string { return &d.Endpoint }, socketPath),
		newField("endpoint_link", "must be true or false, without quotes",
			func(d *Driver) *bool { return &d.EndpointLink }, boolean),
		newField("enabled", "must be true or false, without quotes",
			func(d *Driver) *bool { return &d.Enabled }, boolean),
		newField("timeout", span, func(d *Driver) *time.Duration { return &d.Timeout }, duration),
		newField("supported_versions", `must be a list of versions such as ["1.0.0"]`,
			func(d *Driver) *[]string { return &d.SupportedVersions }, versions),
		newField("when_driver_is_gone", `must be "keep" or "withdraw"`,
			func(d *Driver) *WhenGone { return &d.WhenGone }, oneOf(Keep, Withdraw)),
		newField("withdraw_after", span, func(d *Driver) *time.Duration { return &d.WithdrawAfter }, duration),
		newField("socket_owner", `must be a user's name, a uid such as "1000", or "any"`,
			func(d *Driver) *string { return &d.SocketOwner }, owner),
	}
}

func keys[T any](fields []field[T]) []string {
	out := make([]string, len(fields))
	for i, f := range fields {
		out[i] = f.key
	}
	return out
}

// literal writes a value of a field as TOML. A string has no control characters: the escapes of
// Go that TOML does not have are for these.
func literal(v any) string {
	switch v := v.(type) {
	case bool:
		return strconv.FormatBool(v)
	case []string:
		quoted := make([]string, len(v))
		for i, s := range v {
			quoted[i] = strconv.Quote(s)
		}
		return "[" + strings.Join(quoted, ", ") + "]"
	default:
		return strconv.Quote(fmt.Sprint(v))
	}
}

// knownHere is the hint for a key that is not known where it is.
func knownHere(keys []string) string { return "known here: " + strings.Join(keys, ", ") }

// keyString writes a dotted key as TOML does. The name of a driver is always quoted, as
// the documents write it.
func keyString(parts ...string) string {
	out := make([]string, len(parts))
	for i, p := range parts {
		if out[i] = p; i == 1 && parts[0] == "driver" || (toml.Key{p}).String() != p {
			out[i] = strconv.Quote(p)
		}
	}
	return strings.Join(out, ".")
}
