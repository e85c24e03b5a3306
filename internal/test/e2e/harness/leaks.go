package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Descriptors returns the open files of a process by descriptor.
func Descriptors(pid int) (map[string]string, error) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	open := map[string]string{}
	for _, e := range entries {
		// else it was closed meanwhile
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil {
			open[e.Name()] = to
		}
	}
	return open, nil
}

// Switches returns the sum of the voluntary context switches of all threads of a process.
func Switches(pid int) (int, error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil {
		return 0, err
	}
	sum := 0
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // the thread has ended
		}
		for line := range strings.Lines(string(b)) {
			if n, ok := strings.CutPrefix(line, "voluntary_ctxt_switches:"); ok {
				i, err := strconv.Atoi(strings.TrimSpace(n))
				if err != nil {
					return 0, err
				}
				sum += i
			}
		}
	}
	return sum, nil
}

// noLeaks fails the test if the daemon has more descriptors than an idle one needs: its own, a
// listener and a connection for each driver, and the test's connections. The same goes for
// goroutines: for each driver the registrar, the driver's observer, the accept loop, and gRPC's 5
// for the connection.
func (d *Daemon) noLeaks() {
	d.t.Helper()
	drivers := len(d.Status().Drivers)
	d.client.CloseIdleConnections()
	maxOpen := 15 + 2*drivers // measured: 12 of its own
	Eventually(d.t, 15*time.Second, "descriptors of an idle daemon", func() string {
		open, err := Descriptors(d.PID())
		if err != nil {
			return err.Error()
		}
		if len(open) > maxOpen {
			return fmt.Sprintf("%d open, at most %d expected with %d drivers: %v", len(open), maxOpen, drivers, open)
		}
		return ""
	})
	d.noGoroutineLeaks(24 + 8*drivers) // measured: 14 of its own
}

func (d *Daemon) noGoroutineLeaks(limit int) {
	d.t.Helper()
	// Retried, because after each mount on the machine a goroutine for each path looks it up again.
	Eventually(d.t, 15*time.Second, "goroutines of an idle daemon", func() string {
		_, body := d.Get("/debug/pprof/goroutine?debug=1")
		d.client.CloseIdleConnections()
		var n int
		if _, err := fmt.Sscanf(body, "goroutine profile: total %d", &n); err != nil {
			return fmt.Sprintf("cannot count them: %v in %.100q", err, body)
		}
		if n > limit {
			return fmt.Sprintf("%d, at most %d expected:\n%s", n, limit, body)
		}
		return ""
	})
}
