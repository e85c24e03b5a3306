package control

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/registrar"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
)

// The text format of Prometheus is written here by hand. client_golang would cost 0.9 MB
// of binary and 1.3 MB of resident memory on each node, for what is one pass over a
// snapshot: all values are in the status already, nothing is counted here.

func (a api) metrics(w http.ResponseWriter, _ *http.Request) {
	text := exposition(a.Status())
	header(w, "text/plain; version=0.0.4; charset=utf-8", len(text))
	_, _ = io.WriteString(w, text)
}

// states are all values of the label state, in the order of a driver's life.
func states() []string {
	return []string{
		status.Disabled,
		string(status.Absent), string(status.Starting), string(status.Ready), string(status.Mismatch),
		string(status.Published), string(status.Registered), string(status.Refused), string(status.Conflict),
	}
}

// causes are the values of the label reason, none of them counted yet. They are there from
// the start: increase() does not see the first event of a series that begins with it.
func causes() map[string]uint64 {
	return map[string]uint64{
		string(registrar.CauseRemoved): 0, string(registrar.CauseReplaced): 0, string(registrar.CauseChanged): 0,
		string(registrar.CauseAsked): 0, string(registrar.CauseReturned): 0, string(registrar.CauseSilent): 0,
	}
}

// exposition is the status in the text format. A driver whose name is not valid (yet) has
// no series: a label is for ever in somebody's database.
func exposition(s status.Document) string {
	drivers := slices.DeleteFunc(slices.Clone(s.Drivers), func(d status.Driver) bool {
		return status.CheckName(d.Name) != nil
	})
	enabled := slices.DeleteFunc(slices.Clone(drivers), func(d status.Driver) bool {
		return d.State == status.Disabled
	})
	var e expo
	e.out.Grow(2000 + 1500*len(drivers)) // about what it takes: no copies on the way there

	e.family("build_info", "gauge", "Which csi-registrar this is; always 1.")
	e.sample(1, "version", s.Version, "goversion", runtime.Version())
	e.family("start_time_seconds", "gauge", "When the daemon started, in seconds since the epoch.")
	e.sample(seconds(s.StartedAt))
	e.family("config_error", "gauge", "1 while the configuration files have mistakes and are not all in force, else 0.")
	e.sample(flag01(s.ConfigError != ""))

	e.family("driver_state", "gauge", "1 for the state that the driver is in, 0 for all others.")
	for _, d := range drivers {
		for _, state := range states() {
			e.sample(flag01(d.State == state), "driver", d.Name, "state", state)
		}
	}
	e.family("driver_up", "gauge", "1 if the driver answers and says that it is ready, else 0; none for a disabled driver.")
	for _, d := range enabled {
		e.sample(flag01(d.Driver == status.Ready), "driver", d.Name)
	}
	e.family("registrations_total", "counter", "How often the kubelet told the result of a registration, since the daemon started.")
	for _, d := range enabled {
		e.sample(float64(d.Accepted), "driver", d.Name, "result", "registered")
		e.sample(float64(d.Refusals), "driver", d.Name, "result", "refused")
	}
	// The last one, not a histogram: a registration is an event of once a month, and a
	// bucket that is counted up once a month tells nothing.
	e.family("registration_duration_seconds", "gauge", "How long the kubelet took to confirm, from the registration socket published to its yes; of the last registration.")
	for _, d := range enabled {
		if d.Took > 0 {
			e.sample(d.Took.Seconds(), "driver", d.Name)
		}
	}
	e.family("republications_total", "counter", "How often the registration socket was made anew, by reason, since the daemon started.")
	for _, d := range enabled {
		by := causes()
		maps.Copy(by, d.RepublicationsBy)
		for _, reason := range slices.Sorted(maps.Keys(by)) {
			e.sample(float64(by[reason]), "driver", d.Name, "reason", reason)
		}
	}
	e.family("last_get_info_timestamp_seconds", "gauge", "When the kubelet last asked the registration socket with GetInfo, in seconds since the epoch.")
	for _, d := range enabled {
		if !d.LastGetInfoAt.IsZero() {
			e.sample(seconds(d.LastGetInfoAt), "driver", d.Name)
		}
	}
	return e.out.String()
}

// expo writes families: a head, then its samples. A head without samples is left out.
type expo struct {
	out        strings.Builder
	name, head string
}

func (e *expo) family(name, kind, help string) {
	e.name = "csi_registrar_" + name
	e.head = fmt.Sprintf("# HELP %s %s\n# TYPE %s %s\n", e.name, help, e.name, kind)
}

// sample writes one line; labels are names and values in turn.
func (e *expo) sample(v float64, labels ...string) {
	e.out.WriteString(e.head)
	e.head = ""
	e.out.WriteString(e.name)
	sep := byte('{')
	for pair := range slices.Chunk(labels, 2) {
		e.out.WriteByte(sep)
		sep = ','
		e.out.WriteString(pair[0])
		e.out.WriteString(`="`)
		e.out.WriteString(escapeLabel(pair[1]))
		e.out.WriteByte('"')
	}
	if len(labels) > 0 {
		e.out.WriteByte('}')
	}
	e.out.WriteByte(' ')
	e.out.WriteString(strconv.FormatFloat(v, 'f', -1, 64))
	e.out.WriteByte('\n')
}

// escapeLabel makes a label's value: harmless first, then the three escapes that the
// format knows.
func escapeLabel(s string) string {
	s = safetext.Clean(s, 200)
	if !strings.ContainsAny(s, "\\\"\n") {
		return s // a Replacer is a table of 8 kB, and there are dozens of labels a driver
	}
	return strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(s)
}

func flag01(on bool) float64 {
	if on {
		return 1
	}
	return 0
}

// seconds is a time as Prometheus has it, to the millisecond: a float64 of today's
// seconds has little more to give.
func seconds(t time.Time) float64 { return float64(t.UnixMilli()) / 1000 }
