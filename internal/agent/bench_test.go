package agent

import (
	"fmt"
	"testing"
	"time"

	"csi-registrar/internal/status"
)

func boardOf(n int) *Agent {
	a := &Agent{store: newStatusStore("test", time.Now())}
	for i := range n {
		name := fmt.Sprintf("d%d.example", i)
		a.store.set(key{name: name}, &status.Driver{Name: name, State: "registered"})
	}
	return a
}

// BenchmarkStatus is the snapshot of 100 drivers.
func BenchmarkStatus(b *testing.B) {
	a := boardOf(100)
	b.ReportAllocs()
	for b.Loop() {
		if len(a.Status().Drivers) != 100 {
			b.Fatal("some are missing")
		}
	}
}

// BenchmarkObserve is what one driver's change costs among 100: it must not grow with them.
func BenchmarkObserve(b *testing.B) {
	a := boardOf(100)
	s := status.Driver{Name: "d7.example", State: "ready"}
	b.ReportAllocs()
	for b.Loop() {
		a.store.set(key{name: s.Name}, &s)
	}
}
