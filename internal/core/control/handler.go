package control

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/pprof"
	"net/url"
	"time"

	"csi-registrar/internal/node/status"
)

const maxProfile = 5 * time.Minute

// Handler returns the whole API, for the control socket: its clients may make changes.
func Handler(b Backend) http.Handler {
	mux := http.NewServeMux()
	a := api{
		Backend: b, reasons: true, streams: newGate(maxStreams),
		watched: &snapshot[[]byte]{render: func(d status.Document) []byte { return Marshal(d) }},
	}
	a.ready = func() readiness { return a.readiness(b.Status()) }
	mux.HandleFunc("GET /healthz", healthz(b))
	mux.HandleFunc("GET /readyz", a.readyz)
	mux.HandleFunc("GET /readyz/{driver}", a.readyzDriver)
	mux.HandleFunc("GET /livez/{driver}", a.livezDriver)
	mux.HandleFunc("GET /metrics", a.metrics)
	mux.HandleFunc("GET /v1/status", a.status)
	mux.HandleFunc("POST /v1/reload", a.reload)
	mux.HandleFunc("POST /v1/drivers/{name}/reregister", a.reregister)
	mux.Handle("GET /debug/pprof/", Profiles())
	return mux
}

// PublicHandler returns the part for TCP, which every user of the node can reach: health, readiness
// and metrics. It changes nothing, accepts only GET and HEAD, and shows no reasons: they quote
// drivers, whose answers may contain credentials. It limits the number of concurrent requests that
// cost more than reading memory.
func PublicHandler(b Backend) http.Handler {
	mux := http.NewServeMux()
	a := api{Backend: b}
	last := &snapshot[readiness]{render: a.readiness}
	a.ready = func() readiness { r, _ := last.get(b); return r }
	metrics := &snapshot[[]byte]{render: exposition}
	scrapes := newGate(maxScrapes)
	mux.HandleFunc("GET /healthz", healthz(b))
	mux.HandleFunc("GET /readyz", a.readyz)
	mux.HandleFunc("GET /readyz/{driver}", a.readyzDriver)
	mux.HandleFunc("GET /livez/{driver}", newGate(maxProbes).limit(a.livezDriver))
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		if !scrapes.enter(r.Context(), gateWait) {
			refuse(w)
			return
		}
		text, _ := metrics.get(b)
		writeMetrics(w, text)
		// Its place becomes free later, so that a flood of requests does not use all CPU time.
		time.AfterFunc(time.Duration(len(text))*maxScrapes*time.Second/metricsRate, scrapes.leave)
	})
	return mux
}

// Profiles serves /debug/pprof/ for `go tool pprof`.
func Profiles() http.Handler {
	mux := http.NewServeMux()
	const root = "GET /debug/pprof/"
	for name, h := range map[string]http.HandlerFunc{
		"": pprof.Index, "cmdline": pprof.Cmdline, "profile": pprof.Profile, "symbol": pprof.Symbol, "trace": pprof.Trace,
	} {
		mux.HandleFunc(root+name, func(w http.ResponseWriter, r *http.Request) {
			extendDeadlines(w, maxProfile) // a CPU profile takes ?seconds=
			h(w, r)
		})
	}
	return mux
}

type api struct {
	Backend
	reasons bool             // the caller may read what drivers and the kubelet report
	ready   func() readiness // on the public port, all requests share it

	streams gate
	watched *snapshot[[]byte] // what streams send
}

// localHostOnly serves requests to a loopback address only if Host names it. A web page that a user
// of the node visits can make its own name resolve to 127.0.0.1 (DNS rebinding) and read the
// responses; its requests then have that name in Host. Any other address can be reached directly,
// under names that are not known here.
func localHostOnly(addr net.Addr, h http.Handler) http.Handler {
	if tcp, ok := addr.(*net.TCPAddr); !ok || !tcp.IP.IsLoopback() {
		return h
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		u := url.URL{Host: r.Host}
		host := u.Hostname()
		// A request without Host is HTTP/1.0, and not from a browser.
		if ip := net.ParseIP(host); r.Host == "" || host == "localhost" || ip.IsLoopback() {
			h.ServeHTTP(w, r)
			return
		}
		writeText(w, http.StatusMisdirectedRequest, "Host must be localhost or the address\n")
	})
}

// failure is the body of every answer of /v1 that is not a success.
type failure struct {
	Error string `json:"error"` // may have several lines
}

// reloaded is the body of the answer to a reload.
type reloaded struct {
	Notes []string `json:"notes"`
}

func (a api) reload(w http.ResponseWriter, r *http.Request) {
	notes, err := a.Reload(r.Context(), forced(r))
	writeResult(w, reloaded{append([]string{}, notes...)}, err, http.StatusUnprocessableEntity)
}

func forced(r *http.Request) bool { return r.URL.Query().Get("force") == "true" }

func (a api) reregister(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	switch d, ok := a.Status().Driver(name); {
	case !ok:
		writeJSON(w, http.StatusNotFound, failure{"cannot register " + name + " again: no driver of that name is configured"})
	case d.State == status.Disabled:
		writeJSON(w, http.StatusConflict, failure{"cannot register " + name + " again: the driver is disabled in the configuration"})
	default:
		writeResult(w, struct{}{}, a.Reregister(r.Context(), name, forced(r)), http.StatusConflict)
	}
}

// writeResult answers a request that changes something. refused is the code for errors, except when
// the request or the daemon ended.
func writeResult(w http.ResponseWriter, result any, err error, refused int) {
	switch {
	case err == nil:
		writeJSON(w, http.StatusOK, result)
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		writeJSON(w, http.StatusServiceUnavailable, failure{err.Error()})
	default:
		writeJSON(w, refused, failure{err.Error()})
	}
}
