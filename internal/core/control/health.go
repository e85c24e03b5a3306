package control

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"

	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
)

// maxReason limits a reason on the health pages; /v1/status has the whole reason.
const maxReason = 1000

// healthz is 200 while the daemon works. A driver that does not work is no reason to restart the
// daemon: see readyz.
func healthz(b Backend) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if err := b.Alive(r.Context()); err != nil {
			writeText(w, http.StatusServiceUnavailable, safetext.Clean(err.Error(), maxReason)+"\n")
			return
		}
		writeText(w, http.StatusOK, "ok\n")
	}
}

// readyz is 200 when the kubelet has every enabled driver (status.Driver.Served), and each file and
// table was in force once. Other errors of the configuration are shown but do not count: the last
// valid one is served.
func (a api) readyz(w http.ResponseWriter, _ *http.Request) {
	ready := a.ready()
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
	d, ok := a.ready().Driver(r.PathValue("driver"))
	switch {
	case !ok:
		writeText(w, http.StatusNotFound, "no driver of that name is configured\n")
		return
	case !d.Served():
		writeText(w, http.StatusServiceUnavailable, a.stateLine(d))
		return
	}
	if r.URL.Query().Has("live") {
		if err := a.Live(r.Context(), d.Name); err != nil {
			text := fmt.Sprintf("%s: registered, but %v", safetext.Clean(d.Name, csiname.MaxName), err)
			writeText(w, http.StatusServiceUnavailable, safetext.Clean(text, maxReason)+"\n")
			return
		}
	}
	writeText(w, http.StatusOK, "ok\n")
}

// livezDriver is 200 if the driver answers Probe now, whatever its registration; 500 if not, as
// kubernetes-csi/livenessprobe answers.
func (a api) livezDriver(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("driver")
	if d, ok := a.ready().Driver(name); !ok || d.State == status.Disabled || d.State == status.Invalid {
		writeText(w, http.StatusNotFound, "no enabled driver of that name is configured\n")
		return
	}
	if err := a.Live(r.Context(), name); err != nil {
		writeText(w, http.StatusInternalServerError, safetext.Clean(err.Error(), maxReason)+"\n")
		return
	}
	writeText(w, http.StatusOK, "ok\n")
}

func (a api) stateLine(d status.Driver) string {
	line := safetext.Clean(d.Name, csiname.MaxName) + ": " + d.State
	if d.Reason != "" && a.reasons {
		line += ": " + safetext.Clean(d.Reason, maxReason)
	}
	return line + "\n"
}
