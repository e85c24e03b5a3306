package compat

import (
	"errors"
	"io"
	"io/fs"
	"net/http"
)

// Handler serves what node-driver-registrar does on --http-endpoint: /healthz, and profiles
// with --enable-pprof (else nil).
//
// check returns nil while the registration socket is in place; an error that is
// fs.ErrNotExist while there is none, as before the driver has answered for the first time;
// or another error. The answers are those of node-driver-registrar: 200 "ok", 404, and 500
// with the error, for any method, whatever the kubelet answered. But that program opens its
// port only when the driver has answered.
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
		_, _ = io.WriteString(w, text) // a client that is gone needs no answer
	})
	if pprof != nil {
		mux.Handle("/debug/pprof/", pprof)
	}
	return mux
}
