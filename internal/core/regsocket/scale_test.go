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
	const mostBytes = 15000
	w := newWorld(t)
	// Other registrars have sockets there too, and one of them hangs.
	for i := range 5 {
		serveSidecar(t, fmt.Sprintf("%s/o%d.sock", w.dir, i), "CSIPlugin", fmt.Sprintf("other%d", i))
	}
	serveSidecar(t, w.dir+"/hangs.sock", "CSIPlugin", "hangs", func(s *sidecar) { s.hang = make(chan struct{}) })
	r := w.open(func(o *Options) { o.Log = slog.New(slog.DiscardHandler) })
	warm := socket(t, r, "warm")
	publish(t, warm) // asks the others
	before := memory()

	sockets := make([]*Socket, n)
	for i := range sockets {
		sockets[i] = socket(t, r, fmt.Sprintf("driver%d.csi.example.org", i))
	}
	begin, cpu := time.Now(), cpuTime(t)
	var wg sync.WaitGroup
	for _, s := range sockets[:n/2] {
		wg.Go(func() { publish(t, s) })
	}
	wg.Wait()
	together := time.Since(begin)
	begin = time.Now()
	for _, s := range sockets[n/2:] {
		publish(t, s)
	}
	t.Logf("%d published, all at once, in %v, %d one after the other in %v", n/2, together, n/2, time.Since(begin))
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

// memory returns the size of the heap and the stacks in use.
func memory() int {
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapInuse + m.StackInuse)
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
