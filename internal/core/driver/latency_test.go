package driver

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/fswatch"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/worker"
	"csi-registrar/internal/test/fake"
)

var _ rate.Hinter = (*fswatch.Subscription)(nil)

func watcher(t testing.TB) *fswatch.Watcher {
	t.Helper()
	w := fswatch.New(slog.New(slog.DiscardHandler), worker.NewPool())
	up := w.Subscribe("/")
	defer up.Close()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	<-up.Hints()
	for !watchesMounts(t) { // there is no event for it, and client counts descriptors
		time.Sleep(time.Millisecond)
	}
	return w
}

// watchesMounts reports whether the watcher has opened the list of mounts.
func watchesMounts(t testing.TB) bool {
	t.Helper()
	descriptors, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return slices.ContainsFunc(descriptors, func(fd os.DirEntry) bool {
		file, _ := os.Readlink("/proc/self/fd/" + fd.Name()) // it may be closed by now
		return strings.HasSuffix(file, "/mountinfo")
	})
}

// The time from when the driver serves until it is Ready, by hints alone. Its directories do not
// exist before.
func TestLatency(t *testing.T) {
	w := watcher(t)
	dir := fake.ShortDir(t)
	var took []time.Duration
	for i := range 50 {
		socket := filepath.Join(dir, fmt.Sprint("plugin-", i), "sub/csi.sock")
		c := client(t, config.Connection{Name: name, Socket: socket}, w.Subscribe(socket))
		if r := ask(t, c); r.Driver != status.Absent {
			t.Fatalf("%+v", r)
		}
		serving := make(chan time.Time, 1)
		go func() {
			if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
				t.Error(err)
			}
			l := listen(t, socket)
			serving <- time.Now()
			t.Cleanup((&fakeDriver{}).serve(l))
		}()
		for {
			select {
			case <-c.Hints():
			case <-time.After(5 * time.Second):
				t.Fatal("no hint")
			}
			if ask(t, c).Driver == status.Ready {
				break
			}
		}
		took = append(took, time.Since(<-serving))
	}
	slices.Sort(took)
	t.Logf("median %v, worst %v", took[len(took)/2], took[len(took)-1])
	if m := took[len(took)/2]; m > 500*time.Millisecond { // a few ms, unless the machine is busy
		t.Errorf("median %v: that is no hint", m)
	}
}

// The end of a driver and its return give hints in the same channel, whatever notices them first.
func TestRestartWithWatcher(t *testing.T) {
	w := watcher(t)
	_, socket := paths(t)
	stop := start(t, socket, &fakeDriver{})
	c := client(t, config.Connection{Name: name, Socket: socket}, w.Subscribe(socket))
	until := func(want status.DriverState) time.Duration {
		begun := time.Now()
		for {
			if r := ask(t, c); r.Driver == want {
				return time.Since(begun)
			}
			select {
			case <-c.Hints():
			case <-time.After(5 * time.Second):
				t.Fatalf("no hint on the way to %s", want)
			}
		}
	}
	until(status.Ready)
	for range 5 {
		stop()
		expectHint(t, c, "its end")
		must(t, os.Remove(socket))
		until(status.Absent)
		stop = start(t, socket, &fakeDriver{})
		expectHint(t, c, "its return")
		t.Logf("ready after %v", until(status.Ready))
	}
}
