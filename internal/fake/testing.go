package fake

import (
	"os"
	"runtime"
	"runtime/debug"
	"testing"
	"time"
)

// ShortDir returns a directory for Unix sockets, whose paths have at most 107 bytes: it is below
// /tmp wherever TMPDIR points, and is removed after the test.
func ShortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "s")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// CheckLeaks fails the test if it leaks goroutines or descriptors. Call it first.
func CheckLeaks(t testing.TB) {
	t.Helper()
	count := func() (goroutines, descriptors int) {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return runtime.NumGoroutine(), len(fds)
	}
	goroutines, descriptors := count()
	collect := debug.SetGCPercent(-1) // a finalizer would close a leaked descriptor
	t.Cleanup(func() {
		defer debug.SetGCPercent(collect)
		deadline := time.Now().Add(5 * time.Second)
		for {
			g, f := count()
			if g <= goroutines && f <= descriptors {
				return
			}
			if time.Now().After(deadline) {
				stacks := make([]byte, 1<<20)
				t.Fatalf("%d goroutines and %d descriptors, before %d and %d\n%s", g, f, goroutines, descriptors, stacks[:runtime.Stack(stacks, true)])
			}
			time.Sleep(time.Millisecond) // the runtime has no event for the end of a goroutine
		}
	})
}
