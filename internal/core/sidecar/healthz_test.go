package sidecar

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"testing"
)

func TestHealthz(t *testing.T) {
	var state error
	h := Handler(func() error { return state }, nil)
	for _, test := range []struct {
		state error
		code  int
		body  string
	}{
		{nil, 200, "ok"},
		{fmt.Errorf("cannot look: %w", fs.ErrNotExist), 404, "registration socket does not exist"},
		{errors.New("invalid driver name x"), 500, "invalid driver name x"},
	} {
		state = test.state
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "/healthz", nil))
		if w.Code != test.code || w.Body.String() != test.body {
			t.Errorf("%v: %d %q", test.state, w.Code, w.Body)
		}
	}
}

func TestProfilesOnlyWhenAskedFor(t *testing.T) {
	get := func(h http.Handler) int {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "/debug/pprof/", nil))
		return w.Code
	}
	ok := func() error { return nil }
	if code := get(Handler(ok, nil)); code != 404 {
		t.Errorf("without: %d", code)
	}
	profiles := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) })
	if code := get(Handler(ok, profiles)); code != 204 {
		t.Errorf("with: %d", code)
	}
}
