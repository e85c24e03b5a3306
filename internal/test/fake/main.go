package fake

import (
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Main is TestMain of a package whose tests must leave no descriptors and no goroutines: with an
// error, too, everything is released. Only one of all tests together is checked, because those that
// run in parallel share what CheckLeaks counts.
func Main(m *testing.M) { os.Exit(RunTests(m)) }

// RunTests is Main without the end of the process.
func RunTests(m *testing.M) int {
	flag.Parse()
	if f := flag.Lookup("test.fuzz"); f != nil && f.Value.String() != "" {
		return m.Run()
	}
	// Otherwise a finalizer would close a leaked descriptor. The limit is for the tests that need
	// much memory.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(512 << 20)
	signals := make(chan os.Signal, 1) // package os/signal has a goroutine from its first use on
	signal.Notify(signals, syscall.SIGHUP)
	signal.Stop(signals)
	before, goroutines := openFiles(), runtime.NumGoroutine()
	code := m.Run()
	for deadline := time.Now().Add(5 * time.Second); code == 0; time.Sleep(time.Millisecond) {
		left, running := openFiles(), runtime.NumGoroutine()
		for number := range before {
			delete(left, number)
		}
		if len(left) == 0 && running <= goroutines {
			break
		}
		if time.Now().After(deadline) { // nothing reports the end of a goroutine
			fmt.Fprintf(os.Stderr, "the tests left the descriptors %v, and %d goroutines; before there were %d\n", left, running, goroutines)
			stacks := make([]byte, 1<<20)
			fmt.Fprintf(os.Stderr, "%s\n", stacks[:runtime.Stack(stacks, true)])
			code = 1
		}
	}
	return code
}

// openFiles returns the targets of the open descriptors, without those of Go's poller.
func openFiles() map[string]string {
	open := map[string]string{}
	entries, _ := os.ReadDir("/proc/self/fd") // without /proc nothing is found
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name()))
		if err == nil && !strings.HasPrefix(target, "anon_inode:[event") && !strings.HasPrefix(target, "/proc/") {
			open[e.Name()] = target
		}
	}
	return open
}
