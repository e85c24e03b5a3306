package flood

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"csi-registrar/internal/node/pluginreg"
	"csi-registrar/internal/test/fake"
)

// Budgets for a flood of the public port.
const (
	flooders     = 4
	connections  = 60          // of each of them
	answerMost   = time.Second // beside what the machine itself is late
	giveUp       = 10 * time.Second
	watchdogMost = time.Second // WatchdogSec= of this test is twice that
	moreMost     = 32.0        // MiB of PSS
)

// floodEnv makes the test's binary a process that floods the address which it holds.
const floodEnv = "FLOOD_HTTP"

func TestMain(m *testing.M) {
	if address := os.Getenv(floodEnv); address != "" {
		floodHTTP(address)
		return
	}
	os.Exit(m.Run())
}

// floodHTTP requests pages over many connections at once, without end. Some read the answers, some
// do not.
func floodHTTP(address string) {
	paths := []string{"/metrics", "/metrics", "/readyz", "/healthz", "/metrics", "/livez/d0.example"}
	for i := range connections {
		go func() {
			for {
				c, err := net.Dial("tcp", address)
				if err != nil {
					time.Sleep(time.Millisecond)
					continue
				}
				_ = c.SetDeadline(time.Now().Add(3 * time.Second))
				_, _ = fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n", paths[i%len(paths)])
				if i%5 == 0 {
					time.Sleep(2 * time.Second) // what it does not read is the daemon's
				} else {
					_, _ = io.Copy(io.Discard, c)
				}
				c.Close()
			}
		}()
	}
	select {}
}

// TestFloodOfThePublicPort floods the port, to which any user of the node can connect. The kubelet,
// the watchdog and monitoring are answered meanwhile, and the memory stays small.
//
// FLOOD_DRIVERS is the number of drivers. With 1,000 it is for a quiet machine: on a busy one they
// need minutes to register.
func TestFloodOfThePublicPort(t *testing.T) {
	floodPublicPort(t, fromEnv(t, "FLOOD_DRIVERS", 300, strconv.Atoi))
}

func floodPublicPort(t *testing.T, drivers int) {
	long := fromEnv(t, "FLOOD_DURATION", 10*time.Second, time.ParseDuration)
	n := newNode(t)
	var conf strings.Builder
	fmt.Fprintf(&conf, "[kubelet]\nroot_dir = %q\n[log]\nlevel = \"warn\"\n", filepath.Join(n.root, "k"))
	for i := range drivers {
		name := fmt.Sprintf("d%d.example", i)
		d := fake.NewDriver(filepath.Join(n.root, name), fake.Healthy(name))
		if _, err := d.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(d.Kill)
		fmt.Fprintf(&conf, "[driver.%q]\nsocket = %q\nsocket_owner = \"any\"\n", name, d.Socket)
	}
	if err := os.WriteFile(filepath.Join(n.root, "etc/csi-registrar/config.toml"), []byte(conf.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	address := freeAddress(t)
	n.startDaemon([]string{"--http-endpoint=" + address}, fmt.Sprintf("WATCHDOG_USEC=%d", 2*watchdogMost.Microseconds()), "GOMAXPROCS=2", "GOGC=50", "GOMEMLIMIT=192MiB")
	for len(n.kubelet.Registered()) < drivers {
		n.pause()
	}
	time.Sleep(6 * time.Second) // until the daemon has returned what its start needed
	idle := n.memory()

	var flood []*exec.Cmd
	for range flooders {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), floodEnv+"="+address)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		flood = append(flood, cmd)
	}
	defer func() {
		for _, cmd := range flood {
			_ = cmd.Process.Kill()
			_ = cmd.Wait() // killed
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), long)
	defer cancel()
	var watching sync.WaitGroup
	defer watching.Wait()
	var memory float64
	watching.Go(func() { memory = n.mostMemory(ctx) })
	var fed time.Duration
	watching.Go(func() { fed = n.longestUnfed(ctx) })
	getInfo, health, machine := &latencies{}, &latencies{}, &latencies{}
	watching.Go(func() {
		for ctx.Err() == nil {
			machine.measure(ctx, func(context.Context) error { time.Sleep(time.Millisecond); return nil })
		}
	})
	watching.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			path := filepath.Join(n.root, "k/plugins_registry", fmt.Sprintf("d%d.example-reg.sock", i%drivers))
			getInfo.measure(ctx, func(ctx context.Context) error {
				_, _, err := pluginreg.GetInfo(ctx, path)
				return err
			})
			time.Sleep(20 * time.Millisecond)
		}
	})
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	watching.Go(func() {
		for ctx.Err() == nil {
			health.measure(ctx, func(ctx context.Context) error {
				req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/readyz", nil)
				if err != nil {
					return err
				}
				resp, err := client.Do(req)
				if err != nil {
					return err
				}
				defer resp.Body.Close()
				if _, err := io.Copy(io.Discard, resp.Body); err != nil {
					return err
				}
				if resp.StatusCode != http.StatusOK {
					return errors.New(resp.Status)
				}
				return nil
			})
			time.Sleep(50 * time.Millisecond)
		}
	})
	<-ctx.Done()
	watching.Wait()
	// On a busy machine several processes wait for a CPU in turn before an answer is there.
	late := 5 * machine.worst
	t.Logf("%d drivers: GetInfo %s; readyz %s; a sleep of 1 ms took up to %s; PSS %.1f MiB idle, %.1f at most; WATCHDOG=1 after %s at most", drivers, getInfo, health, machine.worst.Round(time.Millisecond), idle, memory, fed)
	for what, l := range map[string]*latencies{"GetInfo": getInfo, "readyz": health} {
		if len(l.errs) > 0 || l.count == 0 || l.worst > answerMost+late {
			t.Errorf("%s: %s", what, l)
		}
	}
	// With GOGC=50 the heap may grow by half before it is collected.
	if memory > idle+max(moreMost, idle/2) {
		t.Errorf("PSS of %.1f MiB, %.1f before", memory, idle)
	}
	if fed > 2*watchdogMost+late {
		t.Errorf("no WATCHDOG=1 for %s", fed)
	}
}

// freeAddress is an address of this machine that nobody listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

// latencies are how long calls took. It has one owner at a time.
type latencies struct {
	count int
	worst time.Duration
	errs  []error
}

func (l *latencies) measure(ctx context.Context, call func(context.Context) error) {
	// A call outlives the flood.
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), giveUp)
	defer cancel()
	begun := time.Now()
	err := call(limited)
	l.count++
	l.worst = max(l.worst, time.Since(begun))
	if err != nil {
		l.errs = append(l.errs, err)
	}
}

func (l *latencies) String() string {
	s := fmt.Sprintf("%d calls, worst %s", l.count, l.worst.Round(time.Millisecond))
	if len(l.errs) > 0 {
		s += fmt.Sprintf(", %d errors, such as %v", len(l.errs), l.errs[0])
	}
	return s
}

// longestUnfed is the longest time between two WATCHDOG=1.
func (n *node) longestUnfed(ctx context.Context) (longest time.Duration) {
	count, since := n.manager.State().Watchdog, time.Now()
	for ctx.Err() == nil {
		if now := n.manager.State().Watchdog; now != count {
			count, since = now, time.Now()
		}
		longest = max(longest, time.Since(since))
		time.Sleep(10 * time.Millisecond)
	}
	return longest
}
