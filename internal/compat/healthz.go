package compat

import (
	"errors"
	"io"
	"io/fs"
	"net/http"
)

// Handler serves what node-driver-registrar does at --http-endpoint: /healthz, and the
// profiles where --enable-pprof asks for them (nil: not).
//
// check looks at the registration socket: nil while it is in place and answers GetInfo
// with the driver's name; an error that is fs.ErrNotExist while there is none, as before
// the driver has answered for the first time; any other error says what is wrong. The
// answers are the peer's: 200 "ok", 404 and 500 with the reason. It answers at
// any method and does not ask whether the kubelet said yes. The peer opens its port only
// once the driver has answered; this one always answers.
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
