package cli

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/control"
	"csi-registrar/internal/demo"
	"csi-registrar/internal/demo/sampledriver"
)

// Budget of a registered driver at rest.
const (
	goroutinesEach  = 7 // its registrar, its accept loop, and gRPC's 5 for the connection to the driver
	descriptorsEach = 2 // its listener, the driver's connection
)

// A driver costs what it must, and the figures grow by nothing else: the difference between
// daemons of 1 and of 21 registered drivers.
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

// registeredCost is what a daemon has with n registered drivers, when it has come to rest: at
// most the limit, or else what it has after some seconds. Zero: two looks say the same.
func registeredCost(t *testing.T, n int, limit cost) (now cost) {
	t.Helper()
	root := newRoot(t)
	registry := filepath.Join(root, "k/plugins_registry")
	for _, dir := range []string{registry, filepath.Join(root, "etc/csi-registrar")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	registered := make(chan string, n)
	kubelet, err := demo.NewKubelet(registry, func(e demo.Event) {
		if e.What == demo.Registered {
			registered <- e.Driver
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	wg.Go(func() {
		if err := kubelet.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	conf := fmt.Sprintf("[kubelet]\nroot_dir = %q\n", filepath.Join(root, "k"))
	for i := range n {
		d := &sampledriver.Driver{Name: fmt.Sprintf("d%d.example", i), Version: "1", NodeID: "n", Data: filepath.Join(root, "data"), Log: slog.New(slog.DiscardHandler)}
		socket := filepath.Join(root, d.Name)
		conf += fmt.Sprintf("[driver.%q]\nsocket = %q\nsocket_owner = \"any\"\n", d.Name, socket)
		wg.Go(func() {
			if err := d.Serve(ctx, socket); err != nil {
				t.Error(err)
			}
		})
	}
	if err := os.WriteFile(filepath.Join(root, "etc/csi-registrar/config.toml"), []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	daemon := exec.Command(os.Args[0], "run", "--config-root", root)
	daemon.Env = append(os.Environ(), asProgram+"=1")
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

// costOf asks a daemon, and the kernel about it.
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
