package control

import (
	"context"
	"errors"
	"net/http"
	"time"

	"csi-registrar/internal/status"
)

const (
	maxBody    = 4 << 10         // no request here needs a body at all
	aliveLimit = 2 * time.Second // the supervisor answers in microseconds, or is stuck
)

// Handler is the whole API, for the control socket: whoever reaches it may change things.
func Handler(b Backend) http.Handler {
	a := api{b}
	mux := http.NewServeMux()
	a.publish(mux)
	mux.HandleFunc("GET /v1/status", a.status)
	mux.HandleFunc("POST /v1/reload", a.reload)
	mux.HandleFunc("POST /v1/drivers/{name}/reregister", a.reregister)
	profile(mux)
	return http.MaxBytesHandler(mux, maxBody)
}

// PublicHandler is the part that may be seen by everybody, for TCP: health, readiness and
// metrics. It changes nothing and takes GET and HEAD only.
func PublicHandler(b Backend) http.Handler {
	mux := http.NewServeMux()
	api{b}.publish(mux)
	return http.MaxBytesHandler(mux, maxBody)
}

type api struct{ Backend }

func (a api) publish(mux *http.ServeMux) {
	mux.HandleFunc("GET /healthz", a.healthz)
	mux.HandleFunc("GET /readyz", a.readyz)
	mux.HandleFunc("GET /readyz/{driver}", a.readyzDriver)
	mux.HandleFunc("GET /metrics", a.metrics)
}

// failure is the body of every answer of /v1 that is not a success.
type failure struct {
	Error string `json:"error"` // may have several lines
}

func (a api) reload(w http.ResponseWriter, r *http.Request) {
	err := a.Reload(r.Context())
	switch {
	case err == nil:
		writeJSON(w, http.StatusOK, struct{}{})
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		writeJSON(w, http.StatusServiceUnavailable, failure{err.Error()})
	default:
		writeJSON(w, http.StatusUnprocessableEntity, failure{err.Error()})
	}
}

func (a api) reregister(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	d, ok := a.Status().Driver(name)
	switch {
	case !ok:
		writeJSON(w, http.StatusNotFound, failure{"cannot register " + name + " again: no driver of that name is configured"})
		return
	case d.State == status.Disabled:
		writeJSON(w, http.StatusConflict, failure{"cannot register " + name + " again: the driver is disabled in the configuration"})
		return
	}
	err := a.Reregister(r.Context(), name)
	switch {
	case err == nil:
		writeJSON(w, http.StatusOK, struct{}{})
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		writeJSON(w, http.StatusServiceUnavailable, failure{err.Error()})
	default:
		writeJSON(w, http.StatusConflict, failure{err.Error()})
	}
}
