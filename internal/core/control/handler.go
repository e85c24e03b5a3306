// Package control implements the daemon's HTTP API: the control socket, health and metrics on it
// and on TCP, and the client for the commands.
package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
)

const maxProfile = 5 * time.Minute

// Handler returns the whole API, for the control socket: its clients may make changes.
func Handler(b Backend) http.Handler {
	a := api{
		Backend: b, reasons: true, streams: &atomic.Int32{},
		watched: &snapshot[[]byte]{render: func(d status.Document) []byte { return Marshal(d) }},
	}
	mux := a.health()
	mux.HandleFunc("GET /v1/status", a.status)
	mux.HandleFunc("POST /v1/reload", a.reload)
	mux.HandleFunc("POST /v1/drivers/{name}/reregister", a.reregister)
	mux.Handle("GET /debug/pprof/", Profiles())
	return mux
}

// PublicHandler returns the part for TCP, which every user of the node can reach: health, readiness
// and metrics. It changes nothing, accepts only GET and HEAD, and shows no reasons: they quote
// drivers, whose answers may contain credentials.
func PublicHandler(b Backend) http.Handler { return api{Backend: b}.health() }

// health returns the part that both have. All requests share the answers.
func (a api) health() *http.ServeMux {
	mux := http.NewServeMux()
	a.ready = &snapshot[readiness]{render: a.readiness}
	metrics := &snapshot[[]byte]{render: exposition}
	mux.HandleFunc("GET /healthz", a.healthz)
	mux.HandleFunc("GET /readyz", a.readyz)
	mux.HandleFunc("GET /readyz/{driver}", a.readyzDriver)
	mux.HandleFunc("GET /livez/{driver}", a.livezDriver)
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		text, _ := metrics.get(a.Backend)
		write(w, http.StatusOK, "text/plain; version=0.0.4; charset=utf-8", text)
	})
	return mux
}

// Profiles serves /debug/pprof/ for `go tool pprof`.
func Profiles() http.Handler {
	mux := http.NewServeMux()
	for name, h := range map[string]http.HandlerFunc{
		"": pprof.Index, "cmdline": pprof.Cmdline, "profile": pprof.Profile, "symbol": pprof.Symbol, "trace": pprof.Trace,
	} {
		mux.HandleFunc("GET /debug/pprof/"+name, h)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		extendDeadlines(w, maxProfile) // a CPU profile takes ?seconds=
		mux.ServeHTTP(w, r)
	})
}

type api struct {
	Backend
	reasons bool // the caller may read what drivers and the kubelet report
	ready   *snapshot[readiness]

	streams *atomic.Int32     // how many there are
	watched *snapshot[[]byte] // what they send
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
	writeResult(w, r, reloaded{append([]string{}, notes...)}, err, http.StatusUnprocessableEntity)
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
		writeResult(w, r, struct{}{}, a.Reregister(r.Context(), name, forced(r)), http.StatusConflict)
	}
}

// writeResult answers a request that changes something. refused is the code for errors, except when
// the request or the daemon ended.
func writeResult(w http.ResponseWriter, r *http.Request, result any, err error, refused int) {
	switch {
	case err == nil:
		writeJSON(w, http.StatusOK, result)
	case r.Context().Err() != nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		writeJSON(w, http.StatusServiceUnavailable, failure{err.Error()})
	default:
		writeJSON(w, refused, failure{err.Error()})
	}
}

// documentTimeout limits how long a client may take to read one document of a stream.
const documentTimeout = 10 * time.Second

// status answers with the document; with ?watch it sends another one, each in one line, whenever
// something has changed, until the client disconnects or the daemon ends. A client that reads
// slowly misses some documents, but never the last one.
func (a api) status(w http.ResponseWriter, r *http.Request) {
	if !r.URL.Query().Has("watch") {
		writeJSON(w, http.StatusOK, a.Status())
		return
	}
	a.streams.Add(1)
	defer a.streams.Add(-1)
	setHeader(w, "application/x-ndjson")
	for {
		started := time.Now()
		doc, changed := a.watched.get(a.Backend)
		extendDeadlines(w, documentTimeout)
		if _, err := w.Write(doc); err != nil {
			return
		}
		if r.Method == http.MethodHead || http.NewResponseController(w).Flush() != nil {
			return
		}
		// A thousand drivers that change at once would keep a core busy with documents that nobody
		// reads: all streams together use at most a tenth of its time.
		pause := min(9*time.Since(started)*time.Duration(a.streams.Load()), time.Second)
		select {
		case <-r.Context().Done():
			return
		case <-changed:
		}
		if !rate.Pause(r.Context(), pause) {
			return
		}
	}
}

// writeJSON answers with a document.
func writeJSON(w http.ResponseWriter, code int, v any) {
	write(w, code, "application/json", Marshal(v))
}

const plainText = "text/plain; charset=utf-8"

func writeText(w http.ResponseWriter, code int, s string) {
	write(w, code, plainText, []byte(s))
}

func write(w http.ResponseWriter, code int, contentType string, body []byte) {
	setHeader(w, contentType)
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(code)
	_, _ = w.Write(body) // fails only when the client has gone
}

func setHeader(w http.ResponseWriter, contentType string) {
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
}

// extendDeadlines lets a request take longer than the server's limits. An error means that the
// connection has no deadlines, and so no limits.
func extendDeadlines(w http.ResponseWriter, d time.Duration) {
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Time{}) // the deadline would end the request's context
	_ = rc.SetWriteDeadline(time.Now().Add(d))
}

// Marshal returns one line of JSON that is safe on a terminal: documents contain text of drivers,
// so every invisible character is escaped. It panics if the type of v has no JSON form.
func Marshal(v any) []byte {
	doc, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	out := make([]byte, 0, len(doc)+1)
	for _, r := range string(doc) {
		if unicode.IsPrint(r) { // there is no line break: json.Marshal escapes it
			out = utf8.AppendRune(out, r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			out = fmt.Appendf(out, `\u%04x`, unit)
		}
	}
	return append(out, '\n')
}

// Backend is the part of the daemon that its API needs. All methods may be called at any time from
// any goroutine; the texts of their errors are for people.
type Backend interface {
	// Status is a snapshot that does not change.
	Status() status.Document
	// Changed returns a channel that is closed at the next change of the status. A caller that
	// gets the channel first and the status second misses no change.
	Changed() <-chan struct{}
	// Reload reads the configuration again and returns when it is in force, with what the user
	// should know. If it has errors, the old one stays in force, and the error has one line for
	// each. With force, also drivers whose volumes are in use are withdrawn.
	Reload(ctx context.Context, force bool) (notes []string, err error)
	// Reregister makes the kubelet register the driver again. Without force it fails where the
	// kubelet would refuse what the driver reports now.
	Reregister(ctx context.Context, name string, force bool) error
	// Live returns nil if the driver answers Probe now, or did less than a second ago. The text of
	// its error contains no text of the driver, so everybody may read it.
	Live(ctx context.Context, driver string) error
	// Alive returns nil when the agent and all registrars answer, or did less than a second ago.
	// They do not wait for drivers; after 2 s Alive returns an error.
	Alive(ctx context.Context) error
}
