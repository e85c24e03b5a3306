package config

import (
	"slices"
	"strings"
	"time"
)

// field is a key of a table that is kept in a T.
type field[T any] struct {
	key  string
	want string // what a right value is, for hints
	set  func(*T, value) *fault
	get  func(T) any // string, bool, time.Duration or []string
}

func kubeletFields() []field[Kubelet] {
	return []field[Kubelet]{{
		"root_dir", `must be an absolute path such as "/var/lib/kubelet"`,
		func(k *Kubelet, v value) *fault { return assign(&k.RootDir)(absolute(v)) },
		func(k Kubelet) any { return k.RootDir },
	}}
}

func logFields() []field[Log] {
	return []field[Log]{{
		"level", `must be "debug", "info", "warn" or "error"`,
		func(l *Log, v value) *fault { return assign(&l.Level)(oneOf(v, "debug", "info", "warn", "error")) },
		func(l Log) any { return l.Level },
	}, {
		"format", `must be "auto", "journal", "text" or "json"`,
		func(l *Log, v value) *fault { return assign(&l.Format)(oneOf(v, "auto", "journal", "text", "json")) },
		func(l Log) any { return l.Format },
	}}
}

// driverFields are the keys of a driver's table. exists says whether there is a user.
func driverFields(exists func(name string) error) []field[Driver] {
	const aPath = `must be an absolute path such as "/run/csi-nfs/csi.sock"`
	const aSpan = `must be a duration above zero such as "5s" or "1m30s"`
	return []field[Driver]{{
		"socket", aPath,
		func(d *Driver, v value) *fault { return assign(&d.Socket)(socketPath(v)) },
		func(d Driver) any { return d.Socket },
	}, {
		"endpoint", aPath,
		func(d *Driver, v value) *fault { return assign(&d.Endpoint)(socketPath(v)) },
		func(d Driver) any { return d.Endpoint },
	}, {
		"enabled", "must be true or false, without quotes",
		func(d *Driver, v value) *fault { return assign(&d.Enabled)(boolean(v)) },
		func(d Driver) any { return d.Enabled },
	}, {
		"timeout", aSpan,
		func(d *Driver, v value) *fault { return assign(&d.Timeout)(duration(v)) },
		func(d Driver) any { return d.Timeout },
	}, {
		"supported_versions", `must be a list of versions such as ["1.0.0"]`,
		func(d *Driver, v value) *fault { return assign(&d.SupportedVersions)(versions(v)) },
		func(d Driver) any { return d.SupportedVersions },
	}, {
		"when_driver_is_gone", `must be "keep" or "withdraw"`,
		func(d *Driver, v value) *fault {
			word, bad := oneOf(v, string(Keep), string(Withdraw))
			return assign(&d.WhenGone)(WhenGone(word), bad)
		},
		func(d Driver) any { return string(d.WhenGone) },
	}, {
		"withdraw_after", aSpan,
		func(d *Driver, v value) *fault { return assign(&d.WithdrawAfter)(duration(v)) },
		func(d Driver) any { return d.WithdrawAfter },
	}, {
		"socket_owner", `must be a user's name, a uid such as "1000", or "any"`,
		func(d *Driver, v value) *fault { return assign(&d.SocketOwner)(owner(v, exists)) },
		func(d Driver) any { return d.SocketOwner },
	}}
}

// assign puts a value in its place unless it is wrong.
func assign[V any](to *V) func(V, *fault) *fault {
	return func(v V, bad *fault) *fault {
		if bad == nil {
			*to = v
		}
		return bad
	}
}

func keys[T any](fields []field[T]) []string {
	out := make([]string, len(fields))
	for i, f := range fields {
		out[i] = f.key
	}
	return out
}

// literal writes a value of a field as TOML.
func literal(v any) string {
	switch v := v.(type) {
	case bool:
		if v {
			return "true"
		}
		return "false"
	case time.Duration:
		return quote(span(v))
	case []string:
		quoted := make([]string, len(v))
		for i, s := range v {
			quoted[i] = quote(s)
		}
		return "[" + strings.Join(quoted, ", ") + "]"
	case string:
		return quote(v)
	}
	return ""
}

// span writes a duration as people do: 1m, not 1m0s.
func span(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// want says what is right for a key, empty if there is no such key.
func want(path []string) string {
	switch {
	case len(path) == 2 && path[0] == "kubelet":
		return wantIn(kubeletFields(), path[1])
	case len(path) == 2 && path[0] == "log":
		return wantIn(logFields(), path[1])
	case len(path) == 3 && path[0] == "driver":
		return wantIn(driverFields(nil), path[2])
	}
	return ""
}

func wantIn[T any](fields []field[T], key string) string {
	for _, f := range fields {
		if f.key == key {
			return f.want
		}
	}
	return ""
}

// unknownKey says what was probably meant by a key that is not one of known.
func unknownKey(key string, known []string) string {
	if near := nearest(key, known); near != "" {
		return "did you mean " + near + "?"
	}
	if where := home(key); where != "" {
		return "it belongs in " + where
	}
	return "must be " + list(known)
}

// home is the table that a key belongs in.
func home(key string) string {
	switch {
	case slices.Contains(keys(kubeletFields()), key):
		return "[kubelet]"
	case slices.Contains(keys(logFields()), key):
		return "[log]"
	case slices.Contains(keys(driverFields(nil)), key):
		return `[driver."NAME"]`
	}
	return ""
}

// list writes "a, b or c".
func list(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

// nearest is the known word that is most like s, if one is like it at all.
func nearest(s string, known []string) string {
	plain := func(s string) string { return strings.ToLower(strings.ReplaceAll(s, "-", "_")) }
	best, least := "", 3
	for _, k := range known {
		if len(s) > 2*len(k)+3 {
			continue
		}
		// A word that shares only a letter or two is not like it.
		if d := distance(plain(s), plain(k)); d < least && 2*d < len(k) {
			best, least = k, d
		}
	}
	return best
}

// distance is the number of bytes to add, take away, change or swap with their
// neighbour to make b of a.
func distance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			change := 1
			if a[i-1] == b[j-1] {
				change = 0
			}
			d := min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+change)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d = min(d, rows[i-2][j-2]+1)
			}
			rows[i][j] = d
		}
	}
	return rows[len(a)][len(b)]
}
