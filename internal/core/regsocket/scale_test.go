package regsocket

import (
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// With many drivers, publishing all at once or one after the other takes little time, and a
// published socket little memory.
func TestAThousandSockets(t *testing.T) {
	const n = 1000
	const mostBytes = 15000 // with the race detector; it is 6,500 without
	w := newWorld(t)
	// Other registrars have sockets there too, and one of them hangs.
	for i := range 5 {
		serveSidecar(t, fmt.Sprintf("%s/o%d.sock", w.dir, i), "CSIPlugin", fmt.Sprintf("other%d", i))
	}
	serveSidecar(t, w.dir+"/hangs.sock", "CSIPlugin", "hangs", func(s *sidecar) { s.hang = make(chan struct{}) })
	r := w.open(func(o *Options) { o.Log = slog.New(slog.DiscardHandler) })
	// The runtime keeps what the most goroutines at a time have needed, which differs from run to
	// run: that is not part of a socket.
	together := func(sockets []*Socket) time.Duration {
		begin := time.Now()
		var wg sync.WaitGroup
		for _, s := range sockets {
			wg.Go(func() { publish(t, s) })
		}
		wg.Wait()
		return time.Since(begin)
	}
	warm := make([]*Socket, n/2)
	for i := range warm {
		warm[i] = socket(t, r, fmt.Sprintf("warm%d", i))
	}
	together(warm)
	for _, s := range warm {
		if err := s.Withdraw(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	before := memory()

	sockets := make([]*Socket, n)
	for i := range sockets {
		sockets[i] = socket(t, r, fmt.Sprintf("driver%d.csi.example.org", i))
	}
	cpu := cpuTime(t)
	atOnce := together(sockets[:n/2])
	begin := time.Now()
	for _, s := range sockets[n/2:] {
		publish(t, s)
	}
	t.Logf("%d published, all at once, in %v, %d one after the other in %v", n/2, atOnce, n/2, time.Since(begin))
	// Not of the clock: other programs may use the machine. With the race detector it takes 10
	// times as much.
	if d := cpuTime(t) - cpu; d > 90*time.Second {
		t.Errorf("took %v of CPU", d)
	}
	each := (memory() - before) / n
	t.Logf("%d bytes a socket", each)
	if each > mostBytes {
		t.Errorf("%d bytes a socket, at most %d are good", each, mostBytes)
	}
	begin = time.Now()
	for _, s := range sockets {
		if err := s.Withdraw(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("withdrawn in %v", time.Since(begin))
	if d := time.Since(begin); d > 30*time.Second {
		t.Errorf("withdrawing took %v", d)
	}
}

// memory returns the size of what is on the heap and of the stacks. The first collection leaves
// what is in pools.
func memory() int {
	for range 2 {
		debug.FreeOSMemory()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc + m.StackInuse)
}

// cpuTime returns the time that this process has used.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var used unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
		t.Fatal(err)
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
