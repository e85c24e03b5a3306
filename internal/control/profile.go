package control

import (
	"context"
	"fmt"
	"net/http"
	"runtime/pprof"
	"strconv"
	"strings"
	"time"
)

const (
	defaultProfile = 30 * time.Second
	maxProfile     = 5 * time.Minute
)

// profile serves /debug/pprof for `go tool pprof`, with runtime/pprof alone (0.3 MB of
// binary): net/http/pprof costs another 0.25 MB for execution traces, differences of
// profiles and symbols, which the profiles carry themselves.
func profile(mux *http.ServeMux) {
	mux.HandleFunc("GET /debug/pprof/{$}", profileIndex)
	mux.HandleFunc("GET /debug/pprof/profile", profileCPU)
	mux.HandleFunc("GET /debug/pprof/{name}", profileNamed)
}

// Profiles serves them alone.
func Profiles() http.Handler {
	mux := http.NewServeMux()
	profile(mux)
	return mux
}

func profileIndex(w http.ResponseWriter, _ *http.Request) {
	var b strings.Builder
	b.WriteString("profile?seconds=30\n")
	for _, p := range pprof.Profiles() {
		fmt.Fprintf(&b, "%s?debug=1 (%d)\n", p.Name(), p.Count())
	}
	writeText(w, http.StatusOK, b.String())
}

// profileNamed gives a profile for go tool pprof, or with ?debug=1 or 2 as text.
func profileNamed(w http.ResponseWriter, r *http.Request) {
	p := pprof.Lookup(r.PathValue("name"))
	if p == nil {
		writeText(w, http.StatusNotFound, "no such profile\n")
		return
	}
	var debug int
	switch r.URL.Query().Get("debug") {
	case "1":
		debug = 1
	case "2":
		debug = 2
	}
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Content-Type", "application/octet-stream")
	if debug > 0 {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	}
	_ = p.WriteTo(w, debug) // fails only when the client has gone
}

// profileCPU measures for ?seconds=, and ends early when the client leaves.
func profileCPU(w http.ResponseWriter, r *http.Request) {
	d := defaultProfile
	if s := r.URL.Query().Get("seconds"); s != "" {
		n, err := strconv.ParseUint(s, 10, 16)
		d = time.Duration(n) * time.Second
		if err != nil || d == 0 || d > maxProfile {
			writeText(w, http.StatusBadRequest, fmt.Sprintf("seconds must be 1 to %.0f\n", maxProfile.Seconds()))
			return
		}
	}
	if r.Method == http.MethodHead {
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), d)
	defer cancel()
	lift(w, d+callTimeout)
	w.Header().Set("Content-Type", "application/octet-stream")
	if err := pprof.StartCPUProfile(w); err != nil {
		writeText(w, http.StatusConflict, err.Error()+"\n")
		return
	}
	<-ctx.Done()
	pprof.StopCPUProfile()
}
