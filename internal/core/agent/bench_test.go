package agent

import (
	"fmt"
	"testing"

	"csi-registrar/internal/node/status"
)

func boardOf(n int) *Agent {
	a := New(nil, nil, "test")
	for i := range n {
		name := fmt.Sprintf("d%d.example", i)
		a.running[name] = &running{status: status.Driver{Name: name, State: "registered"}}
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
		a.change(func() { a.running[s.Name].status = s })
	}
}
