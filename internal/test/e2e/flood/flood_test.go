// Package flood measures what hostile drivers, which flood the daemon in every way there is,
// cost the node and the drivers beside them.
package flood

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/fake"
)

// Budgets for all hostile drivers together, and for the log of each.
const (
	coreMost   = 0.05 // of one core, and firstMost for the first floods
	firstMost  = time.Second
	memoryMost = 40.0                   // MiB of PSS
	linesMost  = 100                    // of log
	slowerMost = 400 * time.Millisecond // beside twice the usual time, as in the chaos tests
)

// Each of some hostile drivers floods in one way after the other, and one has its directory and
// its socket change all the time. FLOOD_DURATION is how long; FLOOD_DRIVERS, how many drivers;
// FLOOD_FLAP, the time between two changes. In 10 minutes
// everything there is was done.
func TestHostileDrivers(t *testing.T) {
	long := fromEnv(t, "FLOOD_DURATION", 10*time.Second, time.ParseDuration)
	many := fromEnv(t, "FLOOD_DRIVERS", 6, strconv.Atoi)
	flap := fromEnv(t, "FLOOD_FLAP", time.Millisecond, time.ParseDuration)
	n := newNode(t)
	conf, floods := fmt.Sprintf("[kubelet]\nroot_dir = %q\n", filepath.Join(n.root, "k")), ""
	var bad []*hostile
	for i := range many {
		h, err := start(n.root, i, i*len(behaviours)/many)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := h.end(); err != nil {
				t.Error(err)
			}
		})
		if os.Getuid() == 0 { // the directory is the driver's own user's
			if err := os.Chown(h.dir, 65534, 65534); err != nil {
				t.Fatal(err)
			}
		}
		bad = append(bad, h)
		floods += fmt.Sprintf("[driver.%q]\nsocket = %q\nsocket_owner = \"65534\"\n", h.name, h.socket)
	}
	usual, meanwhile := n.addDrivers(4), n.addDrivers(4)
	for _, d := range slices.Concat(usual, meanwhile) {
		conf += fmt.Sprintf("[driver.%q]\nsocket = %q\nsocket_owner = \"any\"\n", filepath.Base(d.Socket), d.Socket)
	}
	file := filepath.Join(n.root, "etc/csi-registrar/config.toml")
	if err := os.WriteFile(file, []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	n.startDaemon(nil)
	before := n.rounds(t.Context(), usual, 0)

	if err := os.WriteFile(file, []byte(conf+floods), 0o644); err != nil {
		t.Fatal(err)
	}
	n.reload()
	cpu, begun := n.cpu(), time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), long)
	defer cancel()
	var running sync.WaitGroup
	defer running.Wait()
	if flap > 0 {
		running.Go(func() { // the others come to what is after the check of the path
			if err := bad[0].flap(ctx, flap); err != nil {
				t.Error(err)
			}
		})
	}
	var memory float64
	running.Go(func() { memory = n.mostMemory(ctx) })
	during := n.rounds(ctx, meanwhile, long)
	<-ctx.Done()
	running.Wait()
	used, took := n.cpu()-cpu, time.Since(begun)

	var asked int64
	for _, h := range bad {
		asked += h.asked.Load()
		if h.asked.Load() == 0 {
			t.Errorf("%s was never connected to", h.name)
		}
	}
	lines := 0
	for _, h := range bad {
		lines = max(lines, n.lines(h.name))
	}
	t.Logf("%d drivers, %d connections, %s: %.1f %% of a core, PSS %.1f MiB at most, %d lines of log, at most %d of one driver",
		len(bad), asked, took.Round(time.Second), 100*used.Seconds()/took.Seconds(), memory, n.lines(""), lines)
	if limit := firstMost + time.Duration(coreMost*float64(took)); used > limit {
		t.Errorf("the daemon used %s of CPU time in %s, at most %s is right", used, took, limit)
	}
	if memory > memoryMost {
		t.Errorf("PSS of %.1f MiB", memory)
	}
	if memory == 0 || lines == 0 {
		t.Errorf("%.1f MiB, %d lines: these are no figures", memory, lines)
	}
	if lines > linesMost {
		t.Errorf("%d lines of log about one driver", lines)
	}
	if lines > linesMost || testing.Verbose() {
		t.Log(n.summary())
	}
	for _, what := range []string{registers, restores} {
		was, is := median(before[what]), median(during[what])
		t.Logf("%s: %d times %s without floods, %d times %s with floods (most %s)", what, len(before[what]), was, len(during[what]), is, slices.Max(append(during[what], 0)))
		if len(during[what]) == 0 || is > 2*was+slowerMost {
			t.Errorf("%s: median %s, without floods %s", what, is, was)
		}
	}
	n.check(meanwhile)
}

func fromEnv[T any](t *testing.T, name string, otherwise T, parse func(string) (T, error)) T {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	v, err := parse(text)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return v
}

// Measurements of the healthy drivers.
const (
	registers = "from the driver's start to its registration socket"
	restores  = "from the removal of the registration socket to the next"
)

// node is a daemon, a kubelet and the drivers that do nothing wrong.
type node struct {
	t       *testing.T
	root    string
	kubelet *fake.Kubelet
	manager *fake.Manager
	daemon  *exec.Cmd
	good    int

	mu  sync.Mutex
	log []string
}

func newNode(t *testing.T) *node {
	root, err := os.MkdirTemp("/dev/shm", "f") // in /tmp others make noise
	if err != nil {
		t.Fatal(err)
	}
	n := &node{t: t, root: root}
	t.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	for _, dir := range []string{"", "k/plugins_registry", "etc/csi-registrar"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	if n.kubelet, err = fake.StartKubelet(filepath.Join(root, "k/plugins_registry"), fake.NewAPIServer(), func(fake.Event) {}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.kubelet.Stop(); err != nil {
			t.Error(err)
		}
	})
	if n.manager, err = fake.StartManager(root); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.manager.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

func (n *node) addDrivers(many int) (all []*fake.Driver) {
	for range many {
		n.good++
		name := fmt.Sprintf("good%d.example", n.good)
		d := fake.NewDriver(filepath.Join(n.root, name), fake.Healthy(name))
		n.t.Cleanup(d.Kill)
		all = append(all, d)
	}
	return all
}

// startDaemon starts the daemon with more flags and variables of its environment.
func (n *node) startDaemon(flags []string, environment ...string) {
	n.t.Helper()
	n.daemon = n.manager.Command(context.Background(), built.Registrar(n.t), append([]string{"run", "--config-root", n.root}, flags...)...)
	n.daemon.Env = append(n.daemon.Env, environment...)
	log, err := n.daemon.StderrPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	if err := n.daemon.Start(); err != nil {
		n.t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		lines := bufio.NewScanner(log)
		for lines.Buffer(nil, 1<<20); lines.Scan(); {
			n.mu.Lock()
			n.log = append(n.log, lines.Text())
			n.mu.Unlock()
		}
	}()
	n.t.Cleanup(func() {
		if err := n.daemon.Process.Signal(syscall.SIGTERM); err != nil {
			n.t.Error(err)
		}
		<-read
		if err := n.daemon.Wait(); err != nil {
			n.t.Errorf("the daemon: %v", err)
		}
	})
	for n.manager.State().Ready == 0 {
		n.pause()
	}
}

// pause is between two looks at what has no event.
func (n *node) pause() {
	if n.t.Context().Err() != nil {
		n.t.FailNow()
	}
	time.Sleep(time.Millisecond)
}

func (n *node) reload() {
	n.t.Helper()
	cmd := exec.Command(built.Registrar(n.t), "reload", "--config-root", n.root)
	if out, err := cmd.CombinedOutput(); err != nil {
		n.t.Fatalf("reload: %v\n%s", err, out)
	}
}

// rounds starts each driver and removes its registration socket three times, in all within
// that time, so that none of the changes is damped.
func (n *node) rounds(ctx context.Context, drivers []*fake.Driver, within time.Duration) map[string][]time.Duration {
	took := map[string][]time.Duration{}
	for round := range 3 {
		for i, d := range drivers {
			select {
			case <-ctx.Done():
				return took
			case <-time.After(within / time.Duration(4*len(drivers))):
			}
			path := filepath.Join(n.root, "k/plugins_registry", filepath.Base(d.Socket)+"-reg.sock")
			if round == 0 {
				at, err := d.Start()
				if err != nil {
					n.t.Fatal(err)
				}
				took[registers] = append(took[registers], n.accepts(path).Sub(at))
				continue
			}
			n.registered(d)
			if err := os.Remove(path); err != nil {
				n.t.Fatalf("round %d of driver %d: %v", round, i, err)
			}
			at := time.Now()
			took[restores] = append(took[restores], n.accepts(path).Sub(at))
		}
	}
	return took
}

// accepts waits until somebody listens there.
func (n *node) accepts(path string) time.Time {
	for {
		if c, err := net.Dial("unix", path); err == nil {
			c.Close()
			return time.Now()
		}
		n.pause()
	}
}

func (n *node) registered(d *fake.Driver) {
	for n.kubelet.Registered()[filepath.Base(d.Socket)].Driver == "" {
		n.pause()
	}
}

// check checks that the drivers are registered in the end.
func (n *node) check(drivers []*fake.Driver) {
	for _, d := range drivers {
		n.registered(d)
	}
}

func median(all []time.Duration) time.Duration {
	if len(all) == 0 {
		return 0
	}
	return slices.Sorted(slices.Values(all))[len(all)/2]
}

// cpu is the time that the daemon used so far.
func (n *node) cpu() time.Duration {
	n.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n.daemon.Process.Pid))
	if err != nil {
		n.t.Fatal(err)
	}
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+2:]))
	var ticks time.Duration
	for _, f := range fields[11:13] { // utime and stime, proc_pid_stat(5)
		v, err := strconv.Atoi(f)
		if err != nil {
			n.t.Fatal(err)
		}
		ticks += time.Duration(v)
	}
	return ticks * time.Second / 100 // USER_HZ
}

// mostMemory is the most PSS that the daemon is seen with, in MiB.
func (n *node) mostMemory(ctx context.Context) (most float64) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		most = max(most, n.memory())
		select {
		case <-tick.C:
		case <-ctx.Done():
			return most
		}
	}
}

// memory is the daemon's PSS in MiB, 0 if it cannot be read.
func (n *node) memory() float64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", n.daemon.Process.Pid))
	_, rest, _ := strings.Cut(string(b), "\nPss:")
	var kib float64
	if _, scanErr := fmt.Sscan(rest, &kib); err != nil || scanErr != nil {
		n.t.Error(err, scanErr)
	}
	return kib / 1024
}

// lines counts the lines of the log about a driver; empty: all.
func (n *node) lines(driver string) (count int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, line := range n.log {
		if driver == "" || strings.Contains(line, " driver="+driver+" ") {
			count++
		}
	}
	return count
}

var message = regexp.MustCompile(`level=(\w+) msg=("[^"]*"|\S+)`)

// summary returns the number of log entries for each message.
func (n *node) summary() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	count := map[string]int{}
	for _, line := range n.log {
		count[message.FindString(line)]++
	}
	var b strings.Builder
	for _, m := range slices.Sorted(maps.Keys(count)) {
		fmt.Fprintf(&b, "%6d %s\n", count[m], m)
	}
	return b.String()
}
