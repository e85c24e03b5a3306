package control

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
)

func hundred() *daemon {
	d := newDaemon()
	for i := range 100 {
		d.status.Drivers = append(d.status.Drivers, registeredDriver(fmt.Sprintf("d%d.example", i)))
	}
	return d
}

// get is a request to the handler, without a connection.
func get(b *testing.B, path string) {
	h := Handler(hundred())
	req := httptest.NewRequest(http.MethodGet, path, nil)
	b.ReportAllocs()
	for b.Loop() {
		w := httptest.NewRecorder()
		if h.ServeHTTP(w, req); w.Code != http.StatusOK || w.Body.Len() < 1000 {
			b.Fatalf("%d: %s", w.Code, w.Body)
		}
	}
}

// With 100 drivers.
func BenchmarkMetrics(b *testing.B) { get(b, "/metrics") }

// With 100 drivers.
func BenchmarkStatus(b *testing.B) { get(b, "/v1/status") }
