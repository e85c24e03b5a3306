package regsocket

import (
	"context"
	"testing"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
)

// publishedSocket makes a registry with one published driver for a benchmark.
func publishedSocket(tb testing.TB) *Socket {
	tb.Helper()
	r, err := Open(fake.ShortDir(tb), options())
	if err != nil {
		tb.Fatal(err)
	}
	s, err := r.Socket("foo.example")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.Close(context.Background(), false); err != nil {
			tb.Error(err)
		}
		r.Close(context.Background())
	})
	if err := s.Publish(tb.Context(), announcement(s.name)); err != nil {
		tb.Fatal(err)
	}
	return s
}

func getInfoOf(tb testing.TB, s *Socket) func() {
	k := dialAsKubelet(tb, s.path)
	return func() {
		if _, err := k.GetInfo(tb.Context(), &registerapi.InfoRequest{}); err != nil {
			tb.Fatal(err)
		}
	}
}

// GetInfo through the registration server, over an existing connection. The figures include the
// caller's part.
func BenchmarkGetInfo(b *testing.B) {
	call := getInfoOf(b, publishedSocket(b))
	call()
	b.ReportAllocs()
	for b.Loop() {
		call()
	}
}

// BenchmarkLook measures Look, which a registrar calls for each event.
func BenchmarkLook(b *testing.B) {
	s := publishedSocket(b)
	b.ReportAllocs()
	for b.Loop() {
		if s.Look().Place != status.Ours {
			b.Fatal("not ours")
		}
	}
}

// A GetInfo allocates what gRPC needs for a call, on both sides together, and next to nothing of
// ours: a client that opens connections and calls cannot make the daemon grow.
func TestAllocationsOfGetInfo(t *testing.T) {
	const most = 170
	call := getInfoOf(t, publishedSocket(t))
	call()
	if n := testing.AllocsPerRun(200, call); n > most {
		t.Errorf("%.0f allocations, at most %d are good", n, most)
	} else {
		t.Logf("%.0f allocations", n)
	}
}
