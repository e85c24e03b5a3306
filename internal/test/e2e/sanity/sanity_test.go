// Package sanity runs the conformance suite for CSI drivers (kubernetes-csi/csi-test) with the
// sample driver, as a process of the built binary and with real mounts.
package sanity

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	"github.com/onsi/gomega"
	"google.golang.org/grpc"
)

// leftOut are the reasons for which the suite may skip specs: parts of CSI that the sample driver
// does not implement or report (a directory needs no attaching). Any other reason is a failure, so
// that no spec is skipped unnoticed.
var leftOut = []string{
	"Controller Publish, UnpublishVolume not supported",
	"ControllerGetVolumeHealth not supported",
	"ControllerListVolumeHealth not supported",
	"ControllerModifyVolume not supported",
	"ControllerPublishVolume not supported",
	"ControllerUnpublishVolume not supported",
	"CreateSnapshot not supported",
	"DeleteSnapshot not supported",
	"GetSnapshot not supported",
	"GroupControllerService not supported",
	"ListSnapshots not supported",
	"Modify Volume not supported",
	"Modify volume not supported",
	"Snapshot not supported",
	"Volume Cloning not supported",
}

// suite is the environment variable with the directory in which a child process of this test runs
// the suite, because ginkgo can only run once per process.
const suite = "CSI_REGISTRAR_TEST_SUITE"

// Files in that directory, relative to it.
const (
	driverSocket = "csi.sock"
	suiteSocket  = "suite.sock" // the address that the suite calls: the driver, or a trace
	resultsFile  = "results"    // a line for each spec, and its result
	callsFile    = "calls"      // a line for each method that the suite called, and how often
	recordFile   = "record"     // of the trace
)

// The driver passes the suite with the same results directly and through a trace, and the record
// has every call.
func TestSampleDriver(t *testing.T) {
	needMounts(t)
	bin := programs(t)
	direct := directory(t)
	startDriver(t, bin, direct)
	link(t, direct)
	runSuite(t, direct)

	traced := directory(t)
	startDriver(t, bin, traced)
	summary := startTrace(t, bin, traced)
	runSuite(t, traced)
	text := summary()

	if want, got := read(t, direct, resultsFile), read(t, traced, resultsFile); got != want {
		t.Errorf("results directly:\n%s\nthrough the trace:\n%s", want, got)
	}
	recorded := map[string]int{}
	lines := 0
	for line := range strings.Lines(read(t, traced, recordFile)) {
		var call struct{ Method, End string }
		if err := json.Unmarshal([]byte(line), &call); err != nil || call.End != "answered" {
			t.Errorf("%v: %s", err, line)
		}
		recorded["/"+call.Method]++
		lines++
	}
	if want, got := read(t, traced, callsFile), counted(recorded); got != want {
		t.Errorf("the suite called\n%s\nthe record has\n%s", want, got)
	}
	if strings.Contains(text, "left out") || strings.Contains(text, "finding") || lines < 50 {
		t.Errorf("%d calls\n%s", lines, text)
	}
	t.Logf("%d calls\n%s", lines, text)
}

// directory returns a directory with a short path, because a socket path has at most 107 bytes.
func directory(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "sanity") // short, wherever TMPDIR points
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	for _, sub := range []string{"pods", "plugins"} { // of a kubelet
		if err := os.Mkdir(filepath.Join(dir, sub), 0o750); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// startDriver serves the driver in the directory, until the test ends.
func startDriver(t *testing.T, bin, dir string) {
	t.Helper()
	serve(t, filepath.Join(bin, "csi-sample-driver"), "--socket", filepath.Join(dir, driverSocket), "--data", filepath.Join(dir, "volumes"),
		"--root-dir", dir, "--node-id", "sanity-node", "--topology", "csi-registrar.dev/host=sanity", "--max-volumes", "16")
}

// link lets the suite call the driver directly.
func link(t *testing.T, dir string) {
	t.Helper()
	if err := os.Symlink(driverSocket, filepath.Join(dir, suiteSocket)); err != nil {
		t.Fatal(err)
	}
}

// startTrace puts a trace between the suite and the driver. The function ends it and returns
// its summary.
func startTrace(t *testing.T, bin, dir string) (end func() string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	t.Cleanup(cancel)
	trace := exec.CommandContext(ctx, filepath.Join(bin, "csi-registrar"), "trace",
		"--listen", filepath.Join(dir, suiteSocket), "--connect", filepath.Join(dir, driverSocket), "--output", filepath.Join(dir, recordFile))
	trace.WaitDelay = 10 * time.Second
	out := &output{written: make(chan struct{})}
	trace.Stdout, trace.Stderr = out, out
	if err := trace.Start(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-out.written: // the head of the table is printed, so it listens
	case <-time.After(time.Minute):
		t.Fatal("the trace writes nothing")
	}
	return func() string {
		if err := trace.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if err := trace.Wait(); err != nil {
			t.Errorf("the trace: %v\n%s", err, out.String())
		}
		_, summary, _ := strings.Cut(out.String(), "\n\n")
		return summary
	}
}

// output collects the output of a process. written is closed at the first write.
type output struct {
	buf     bytes.Buffer // not embedded: io.Copy would use its ReadFrom
	once    sync.Once
	written chan struct{}
}

func (o *output) Write(b []byte) (int, error) {
	defer o.once.Do(func() { close(o.written) })
	return o.buf.Write(b)
}

func (o *output) String() string { return o.buf.String() } // only after the process has ended

// runSuite runs the suite as a process of its own.
func runSuite(t *testing.T, dir string) {
	t.Helper()
	run := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestSuite$", "-test.v", "-test.timeout=10m")
	run.Env = append(os.Environ(), suite+"="+dir)
	out, err := run.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, dir, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// counted returns the counts as sorted lines.
func counted(counts map[string]int) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		fmt.Fprintf(&b, "%s: %d\n", name, counts[name])
	}
	return b.String()
}

// TestSuite is the process that runs the suite.
func TestSuite(t *testing.T) {
	dir := os.Getenv(suite)
	if dir == "" {
		t.Skip("run by the other tests")
	}
	config := sanity.NewTestConfig()
	config.Address = "unix:" + filepath.Join(dir, suiteSocket)
	config.TargetPath = filepath.Join(dir, "pods", "target")
	config.StagingPath = filepath.Join(dir, "plugins", "staging")
	calls := map[string]int{}
	config.DialOptions = append(config.DialOptions, grpc.WithChainUnaryInterceptor(
		func(ctx context.Context, method string, request, response any, c *grpc.ClientConn, invoke grpc.UnaryInvoker, o ...grpc.CallOption) error {
			calls[method]++
			return invoke(ctx, method, request, response, c, o...)
		}))
	s := sanity.GinkgoTest(&config)
	defer s.Finalize()
	gomega.RegisterFailHandler(ginkgo.Fail)
	ginkgo.ReportAfterSuite("count", func(r ginkgo.Report) {
		count(t, r)
		write(t, dir, resultsFile, results(r))
	})
	suiteConfig, reporter := ginkgo.GinkgoConfiguration()
	reporter.NoColor, reporter.Succinct = true, true // readable in a log
	ginkgo.RunSpecs(t, "the sample driver", suiteConfig, reporter)
	write(t, dir, callsFile, counted(calls))

	left, err := os.ReadDir(filepath.Join(dir, "volumes"))
	if err != nil || len(left) > 0 {
		t.Errorf("left in the driver's directory: %v, %v", left, err)
	}
}

func write(t *testing.T, dir, name, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// results has a line for each spec, sorted: the suite runs them in a random order.
func results(r ginkgo.Report) string {
	var lines []string
	for _, spec := range r.SpecReports.WithLeafNodeType(types.NodeTypeIt) {
		lines = append(lines, fmt.Sprintf("%s: %s %s\n", spec.FullText(), spec.State, spec.Failure.Message))
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

// count logs how many specs passed, how many failed, and which were left out and why.
func count(t *testing.T, r ginkgo.Report) {
	skipped := map[string]int{}
	states := map[types.SpecState]int{}
	for _, spec := range r.SpecReports.WithLeafNodeType(types.NodeTypeIt) {
		states[spec.State]++
		if spec.State == types.SpecStateSkipped {
			skipped[spec.Failure.Message]++
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(skipped)) {
		t.Logf("left out: %2d specs: %s", skipped[reason], reason)
		if !slices.Contains(leftOut, reason) {
			t.Errorf("the suite skipped %d specs: %s", skipped[reason], reason)
		}
	}
	// Pending specs are disabled by the suite itself.
	t.Logf("passed %d, failed %d, left out %d, pending %d", states[types.SpecStatePassed],
		r.SpecReports.CountWithState(types.SpecStateFailureStates),
		states[types.SpecStateSkipped], states[types.SpecStatePending])
	if states[types.SpecStatePassed] == 0 {
		t.Error("no spec passed")
	}
}

// needMounts skips the test if nothing can be mounted. Under CI=true that is a failure.
func needMounts(t *testing.T) {
	t.Helper()
	try := exec.Command("true")
	try.SysProcAttr = ownMounts()
	if err := try.Run(); err != nil {
		reason := "conformance suite: cannot make a mount namespace (root with CAP_SYS_ADMIN can): " + err.Error()
		if os.Getenv("CI") == "true" {
			t.Fatal(reason)
		}
		t.Skip(reason)
	}
}

// ownMounts puts a process into a mount namespace of its own, which os/exec makes private, so that
// no mount outlives the process or is visible to others.
func ownMounts() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
}

// programs builds the shipped programs, and returns their directory.
func programs(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if out, err := exec.Command("../../../../scripts/build", "", dir).CombinedOutput(); err != nil {
		t.Fatalf("scripts/build: %v\n%s", err, out)
	}
	return dir
}

// serve runs the driver until the test ends, and returns when the driver reports that it serves.
func serve(t *testing.T, path string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	driver := exec.CommandContext(ctx, path, args...)
	driver.SysProcAttr = ownMounts()
	driver.Cancel = func() error { return driver.Process.Signal(syscall.SIGTERM) }
	driver.WaitDelay = 10 * time.Second
	stderr, err := driver.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := driver.Start(); err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	drained := make(chan struct{})
	var said bytes.Buffer
	go func() {
		defer close(drained)
		lines := bufio.NewScanner(io.TeeReader(stderr, &said))
		for first := true; lines.Scan(); first = false {
			if first && bytes.Contains(lines.Bytes(), []byte("serving")) {
				close(served)
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-drained
		var exit *exec.ExitError
		if err := driver.Wait(); errors.As(err, &exit) {
			t.Errorf("the driver: %v\n%s", err, said.String())
		}
	})
	select {
	case <-served:
	case <-drained:
		t.Fatalf("the driver does not serve:\n%s", said.String())
	case <-time.After(30 * time.Second):
		t.Fatal("the driver does not serve")
	}
}
