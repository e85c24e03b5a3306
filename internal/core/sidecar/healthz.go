package sidecar

import (
	"errors"
	"io"
	"io/fs"
	"net/http"
)

// Handler serves /healthz as node-driver-registrar does on --http-endpoint, and the profiles of
// --enable-pprof if pprof is not nil.
//
// check returns nil while the registration socket is in place, fs.ErrNotExist if there is none (as
// before the driver's first answer), and any other error otherwise. The responses are those of
// node-driver-registrar, for any method: 200 "ok", 404, and 500 with the error. Unlike this
// handler, node-driver-registrar does not listen before the driver has answered.
func Handler(check func() error, pprof http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		code, text := http.StatusOK, "ok"
		switch err := check(); {
		case errors.Is(err, fs.ErrNotExist):
			code, text = http.StatusNotFound, "registration socket does not exist"
		case err != nil:
			code, text = http.StatusInternalServerError, err.Error()
		}
		w.WriteHeader(code)
		_, _ = io.WriteString(w, text) // the client may be gone
	})
	if pprof != nil {
		mux.Handle("/debug/pprof/", pprof)
	}
	return mux
}
