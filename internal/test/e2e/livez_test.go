package e2e

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"csi-registrar/internal/test/e2e/harness"
	"csi-registrar/internal/test/fake"
)

// liveCase is a state of a driver, and the answer of /livez in it.
type liveCase struct {
	name string
	make func(d *harness.Driver)
	want int
}

func liveCases() []liveCase {
	set := func(change func(*fake.Answers)) func(*harness.Driver) {
		return func(d *harness.Driver) { d.Set(change) }
	}
	slow := func(d time.Duration) func(*harness.Driver) {
		return set(func(a *fake.Answers) { a.Delay = map[string]time.Duration{fake.Probe: d} })
	}
	cases := []liveCase{
		{"healthy", set(func(*fake.Answers) {}), 200},
		{"not ready", set(func(a *fake.Answers) { a.NotReady = true }), 500},
		{"answers after 0.5 s", slow(500 * time.Millisecond), 200},
		{"answers after 1.5 s", slow(1500 * time.Millisecond), 200},
		{"answers after 5 s", slow(5 * time.Second), 500},
		{"hangs in Probe", set(func(a *fake.Answers) { a.Hang = map[string]bool{fake.Probe: true} }), 500},
		{"hangs in GetPluginInfo alone", set(func(a *fake.Answers) { a.Hang = map[string]bool{fake.GetPluginInfo: true} }), 200},
		{"fails NodeGetInfo alone", set(func(a *fake.Answers) {
			a.Fail = map[string]error{fake.NodeGetInfo: grpcstatus.Error(codes.Internal, "x")}
		}), 200},
		{"another name", set(func(a *fake.Answers) { a.Name = "other.example" }), 200},
		{"ended, socket left", func(d *harness.Driver) { d.Kill() }, 500},
		{"ended, socket removed", func(d *harness.Driver) { d.Stop() }, 500},
		{"listens and accepts nothing", func(d *harness.Driver) { d.Kill(); d.Listen() }, 500},
		{"hangs up", func(d *harness.Driver) { d.Kill(); d.HangUp() }, 500},
		{"restarted", func(d *harness.Driver) { d.Kill(); d.Start() }, 200},
	}
	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		cases = append(cases, liveCase{"error " + code.String(), set(func(a *fake.Answers) {
			a.Fail = map[string]error{fake.Probe: grpcstatus.Error(code, "token=hunter2")}
		}), 500})
	}
	return cases
}

// TestLivezAsLivenessprobe checks that /livez has the results of kubernetes-csi/livenessprobe. If
// LIVENESSPROBE names that program, its results are compared.
func TestLivezAsLivenessprobe(t *testing.T) {
	t.Parallel()
	peer := os.Getenv("LIVENESSPROBE")
	for _, c := range liveCases() {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := harness.New(t)
			d := n.AddDriver("a.example")
			d.Start()
			daemon := n.StartDaemon()
			ask := map[string]func() int{"csi-registrar": func() int { code, _ := daemon.Get("/livez/a.example"); return code }}
			if peer != "" {
				ask["livenessprobe"] = startLivenessprobe(t, peer, d.Socket)
			}
			c.make(d)
			for who, live := range ask {
				if code := live(); code != c.want {
					t.Errorf("%s answers %d, want %d", who, code, c.want)
				}
			}
			// Concurrent requests share the answer.
			for who, live := range ask {
				var all sync.WaitGroup
				for range 100 {
					all.Go(func() {
						if code := live(); code != c.want {
							t.Errorf("%s answers %d to one of 100 at once, want %d", who, code, c.want)
						}
					})
				}
				all.Wait()
			}
		})
	}
}

// startLivenessprobe starts the sidecar and returns a function that queries it.
func startLivenessprobe(t *testing.T, program, socket string) func() int {
	t.Helper()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().String()
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, program, "--csi-address", socket, "--http-endpoint", address)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // killed
	})
	ask := func() int {
		resp, err := http.Get("http://" + address + "/healthz")
		if err != nil {
			return 0
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	harness.Eventually(t, soon, "the sidecar's first answer", func() string {
		if code := ask(); code != 200 {
			return fmt.Sprint(code)
		}
		return ""
	})
	return ask
}
