package repotest

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/test/fake"
)

// The budget of a registered, idle driver.
const (
	// Its registrar, its observer, its accept loop, and gRPC's 5 for the connection to the driver.
	goroutinesEach  = 8
	descriptorsEach = 2 // its listener, the driver's connection
)

// TestBudgetPerDriver compares daemons with 1 and 21 registered drivers.
func TestBudgetPerDriver(t *testing.T) {
	one := registeredCost(t, 1, cost{})
	limit := cost{one.goroutines + 20*goroutinesEach, one.descriptors + 20*descriptorsEach}
	many := registeredCost(t, 21, limit)
	t.Logf("1 driver: %+v; 21: %+v", one, many)
	if many.goroutines > limit.goroutines || many.descriptors > limit.descriptors {
		t.Errorf("1 driver: %+v; 21: %+v, at most %+v are good", one, many, limit)
	}
	if many.goroutines <= one.goroutines || many.descriptors <= one.descriptors {
		t.Errorf("1 driver: %+v; 21: %+v: these are no figures", one, many)
	}
}

type cost struct{ goroutines, descriptors int }

// registeredCost returns the cost of a daemon with n registered drivers after it has settled: as
// soon as it is within the limit, or else after some seconds. With a zero limit it waits until two
// measurements agree.
func registeredCost(t *testing.T, n int, limit cost) (now cost) {
	t.Helper()
	root, err := os.MkdirTemp("/tmp", "r") // short, wherever TMPDIR points
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(root)
	registry := filepath.Join(root, "k/plugins_registry")
	for _, dir := range []string{registry, filepath.Join(root, "etc/csi-registrar")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	registered := make(chan string, n)
	kubelet, err := fake.StartKubelet(registry, fake.NewAPIServer(), func(e fake.Event) {
		if e.What == fake.Registered {
			registered <- e.Driver
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer kubelet.Stop()
	conf := fmt.Sprintf("[kubelet]\nroot_dir = %q\n", filepath.Join(root, "k"))
	for i := range n {
		name := fmt.Sprintf("d%d.example", i)
		d := fake.NewDriver(filepath.Join(root, name), fake.Healthy(name))
		if _, err := d.Start(); err != nil {
			t.Fatal(err)
		}
		defer d.Kill()
		conf += fmt.Sprintf("[driver.%q]\nsocket = %q\nsocket_owner = \"any\"\n", name, d.Socket)
	}
	if err := os.WriteFile(filepath.Join(root, "etc/csi-registrar/config.toml"), []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	binary, _ := program(t)
	daemon := exec.Command(binary, "run", "--config-root", root)
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := daemon.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if err := daemon.Wait(); err != nil {
			t.Error(err)
		}
	}()
	for range n {
		select {
		case <-registered:
		case <-time.After(30 * time.Second):
			t.Fatal("not all drivers are registered")
		}
	}
	var before cost
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		now = costOf(t, root, daemon.Process.Pid)
		within := now.goroutines <= limit.goroutines && now.descriptors <= limit.descriptors
		if within || limit == (cost{}) && now == before {
			return now
		}
		before = now
	}
	return now
}

// costOf returns the goroutines and descriptors of a running daemon.
func costOf(t *testing.T, root string, pid int) (c cost) {
	t.Helper()
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", control.Path(root))
	}}}
	answer, err := client.Get("http://./debug/pprof/goroutine?debug=1")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := fmt.Sscanf(string(text), "goroutine profile: total %d", &c.goroutines); n != 1 {
		first, _, _ := strings.Cut(string(text), "\n")
		t.Fatalf("%q: %v", first, err)
	}
	c.descriptors = len(files)
	return c
}
