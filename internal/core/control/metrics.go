package control

import (
	"bytes"
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
)

// The text format of Prometheus is written here by hand. client_golang was tried: it adds 0.7 MB
// and 8 modules to the program, for one pass over a snapshot. All values are in the status, nothing
// is counted here.

// exposition formats the status. A driver without a valid name (yet) has no series: databases keep
// a label for long.
func exposition(s status.Document) []byte {
	drivers := slices.DeleteFunc(slices.Clone(s.Drivers), func(d status.Driver) bool {
		return csiname.CheckName(d.Name) != nil
	})
	enabled := slices.DeleteFunc(slices.Clone(drivers), func(d status.Driver) bool {
		return d.State == status.Disabled || d.State == status.Invalid
	})
	e := expo{out: &bytes.Buffer{}}
	e.family("build_info", "gauge", "The version of csi-registrar; always 1.")
	e.sample(1, "version", s.Version, "goversion", runtime.Version())
	e.family("start_time_seconds", "gauge", "When the daemon started, in seconds since the epoch.")
	e.sample(seconds(s.StartedAt))
	e.family("config_error", "gauge", "1 while the configuration files have errors and are not all in force, else 0.")
	e.sample(boolean(s.ConfigError != ""))
	e.family("polling", "gauge", "1 while files are checked each second because the kernel does not report changes (inotify), else 0.")
	e.sample(boolean(s.Polling != ""))
	e.family("stuck_calls", "gauge", "How many system calls were abandoned because a file system does not answer.")
	e.sample(float64(len(s.Stuck)))

	e.family("unregistered_volumes", "gauge", "How many volumes are in use of drivers that nobody registers, so that the kubelet cannot unmount them; none if that is not known.")
	if s.NodeVolumes != nil {
		e.sample(float64(s.NodeVolumes.Unregistered))
	}
	e.family("volumes", "gauge", "How many volumes pods use on this node, by phase: published, of these mounted, or waiting for more than a minute; none if that is not known.")
	if v := s.NodeVolumes; v != nil {
		e.sample(float64(v.Published+v.Waiting), "phase", "published")
		e.sample(float64(v.Published), "phase", "mounted")
		e.sample(float64(v.Late), "phase", "waiting")
	}

	e.family("kubelet_up", "gauge", "1 while the kubelet that last reported the result of a registration runs, 0 once it has ended; none if that is not known.")
	if !s.Kubelet.ConfirmedAt.IsZero() {
		e.sample(boolean(s.Kubelet.EndedAt.IsZero()))
	}

	// A state or problem that does not apply has no series, so that queries read few series.
	e.family("driver_state", "gauge", "1 for the state that the driver is in; the other states have no series.")
	for _, d := range drivers {
		e.sample(1, "driver", d.Name, "state", d.State)
	}
	e.family("driver_up", "gauge", "1 if the driver answers that it is ready, else 0; none for a disabled or invalid driver.")
	for _, d := range enabled {
		e.sample(boolean(d.Driver == status.Ready), "driver", d.Name)
	}
	e.family("driver_problem", "gauge", "1 for each problem of the driver; a problem that it does not have has no series.")
	for _, d := range enabled {
		for _, p := range []struct {
			name  string
			there bool
		}{
			{"down", d.Registration == status.Registered && d.Driver != status.Ready},
			{"restarting", d.DriverRestarts >= status.ManyRestarts},
			{"damped", !d.DampedUntil.IsZero()},
			{"not-kept", d.NotKept != ""},
			{"served-by-other", d.ServedBy.PID != 0},
		} {
			if p.there {
				e.sample(1, "driver", d.Name, "problem", p.name)
			}
		}
	}
	e.family("driver_restarts_total", "counter", "How often the driver came back after it was gone, since the daemon started.")
	for _, d := range enabled {
		e.sample(float64(d.RestartsTotal), "driver", d.Name)
	}
	e.family("registrations_total", "counter", "How often the kubelet reported the result of a registration, since the daemon started.")
	for _, d := range enabled {
		e.sample(float64(d.Accepted), "driver", d.Name, "result", "registered")
		e.sample(float64(d.Refusals), "driver", d.Name, "result", "refused")
	}
	// A gauge, not a histogram: registrations are too rare for buckets.
	e.family("registration_duration_seconds", "gauge", "How long the kubelet took to confirm the last registration, from the registration socket published.")
	e.positive(enabled, func(d status.Driver) float64 { return d.Took.Seconds() })
	e.family("republications_total", "counter", "How often the registration socket was recreated, since the daemon started; none before the first time.")
	e.positive(enabled, func(d status.Driver) float64 { return float64(d.Republications) })
	e.family("last_get_info_timestamp_seconds", "gauge", "When the kubelet last called GetInfo on the registration socket, in seconds since the epoch.")
	e.positive(enabled, func(d status.Driver) float64 { return seconds(d.LastGetInfoAt) })
	return e.out.Bytes()
}

// expo writes metric families: a head, then its samples. A head without samples is left out.
type expo struct {
	out        *bytes.Buffer
	name, head string
}

func (e *expo) family(name, kind, help string) {
	e.name = "csi_registrar_" + name
	e.head = fmt.Sprintf("# HELP %s %s\n# TYPE %s %s\n", e.name, help, e.name, kind)
}

// sample writes one line; labels are names and values in turn.
func (e *expo) sample(v float64, labels ...string) {
	var pairs []string
	for pair := range slices.Chunk(labels, 2) {
		pairs = append(pairs, pair[0]+`="`+labelEscapes.Replace(safetext.Clean(pair[1], 200))+`"`)
	}
	list := ""
	if len(pairs) > 0 {
		list = "{" + strings.Join(pairs, ",") + "}"
	}
	fmt.Fprintf(e.out, "%s%s%s %s\n", e.head, e.name, list, strconv.FormatFloat(v, 'f', -1, 64))
	e.head = ""
}

// positive writes the values of drivers that are above zero.
func (e *expo) positive(drivers []status.Driver, value func(status.Driver) float64) {
	for _, d := range drivers {
		if v := value(d); v > 0 {
			e.sample(v, "driver", d.Name)
		}
	}
}

// labelEscapes applies the three escapes of the format.
var labelEscapes = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)

func boolean(on bool) float64 {
	if on {
		return 1
	}
	return 0
}

// seconds formats a time for Prometheus, to the millisecond: a float64 is not much more precise.
func seconds(t time.Time) float64 { return float64(t.UnixMilli()) / 1000 }

// maxReason limits a reason on the health pages; /v1/status has the whole reason.
const maxReason = 1000

// healthz is 200 while the daemon works. A driver that does not work is no reason to restart the
// daemon: see readyz.
func (a api) healthz(w http.ResponseWriter, r *http.Request) {
	writeHealth(w, a.Alive(r.Context()), http.StatusServiceUnavailable)
}

// writeHealth answers "ok", or an error with its code.
func writeHealth(w http.ResponseWriter, err error, code int) {
	if err != nil {
		writeText(w, code, safetext.Clean(err.Error(), maxReason)+"\n")
		return
	}
	writeText(w, http.StatusOK, "ok\n")
}

// readyz is 200 when the kubelet has every enabled driver (status.Driver.Served), and each file and
// table was in force once. Other errors of the configuration are shown but do not count: the last
// valid one is served.
func (a api) readyz(w http.ResponseWriter, _ *http.Request) {
	ready, _ := a.ready.get(a.Backend)
	write(w, ready.code, plainText, ready.text)
}

// readiness is the status with the answer of readyz.
type readiness struct {
	status.Document
	code int
	text []byte
}

func (a api) readiness(s status.Document) readiness {
	code, word := http.StatusOK, "ok"
	if len(s.Unserved())+len(s.InvalidFiles) > 0 {
		code, word = http.StatusServiceUnavailable, "not ready"
	}
	configError := s.ConfigError
	if configError != "" && !a.reasons {
		configError = "it has errors"
	}
	var b bytes.Buffer
	for line := range strings.SplitSeq(configError, "\n") {
		if line != "" {
			fmt.Fprintf(&b, "configuration: %s\n", safetext.Clean(line, maxReason))
		}
	}
	for _, d := range s.Drivers {
		b.WriteString(a.stateLine(d))
	}
	b.WriteString(word + "\n")
	return readiness{Document: s, code: code, text: b.Bytes()}
}

// readyzDriver is 200 when the kubelet has the driver; with ?live only if it answers Probe now,
// too.
func (a api) readyzDriver(w http.ResponseWriter, r *http.Request) {
	ready, _ := a.ready.get(a.Backend)
	d, ok := ready.Driver(r.PathValue("driver"))
	switch {
	case !ok:
		writeText(w, http.StatusNotFound, "no driver of that name is configured\n")
		return
	case !d.Served():
		writeText(w, http.StatusServiceUnavailable, a.stateLine(d))
		return
	}
	var err error
	if r.URL.Query().Has("live") {
		if err = a.Live(r.Context(), d.Name); err != nil {
			err = fmt.Errorf("%s: registered, but %w", safetext.Clean(d.Name, csiname.MaxName), err)
		}
	}
	writeHealth(w, err, http.StatusServiceUnavailable)
}

// livezDriver is 200 if the driver answers Probe now, whatever its registration; 500 if not, as
// kubernetes-csi/livenessprobe answers.
func (a api) livezDriver(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("driver")
	ready, _ := a.ready.get(a.Backend)
	if d, ok := ready.Driver(name); !ok || d.State == status.Disabled || d.State == status.Invalid {
		writeText(w, http.StatusNotFound, "no enabled driver of that name is configured\n")
		return
	}
	writeHealth(w, a.Live(r.Context(), name), http.StatusInternalServerError)
}

func (a api) stateLine(d status.Driver) string {
	line := safetext.Clean(d.Name, csiname.MaxName) + ": " + d.State
	if d.Reason != "" && a.reasons {
		line += ": " + safetext.Clean(d.Reason, maxReason)
	}
	return line + "\n"
}
