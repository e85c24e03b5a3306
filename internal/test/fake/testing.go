package fake

import (
	"bytes"
	"errors"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
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
	goroutines, descriptors := runtime.NumGoroutine(), Descriptors(t)
	collect := debug.SetGCPercent(-1) // a finalizer would close a leaked descriptor
	t.Cleanup(func() {
		defer debug.SetGCPercent(collect)
		deadline := time.Now().Add(5 * time.Second)
		for {
			g, f := runtime.NumGoroutine(), Descriptors(t)
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

// Descriptors counts the open descriptors of this process, with those of Go's poller, which it
// opens when the first file needs it.
func Descriptors(t testing.TB) int {
	t.Helper()
	r, w, err := os.Pipe()
	if err == nil {
		err = errors.Join(r.Close(), w.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// Buffer is a buffer for several goroutines, such as one for a log.
type Buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements io.Writer.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

// String returns what was written.
func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
