// Package sanity holds the sample driver against the conformance suite for CSI drivers
// (kubernetes-csi/csi-test), as a process of the built binary and with real mounts.
package sanity

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	"github.com/onsi/gomega"
)

// leftOut are the reasons for which the suite may skip specs: parts of CSI that the
// sample driver does not have and does not claim (a directory needs no attaching, staging or
// growing). Another reason is a failure, so that no spec goes quiet unseen.
var leftOut = []string{
	"Controller Publish, UnpublishVolume not supported",
	"ControllerExpandVolume not supported",
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
	"NodeExpandVolume not supported",
	"NodeGetStorageHealth not supported",
	"NodeGetVolumeHealth not supported",
	"NodeStageVolume not supported",
	"NodeUnstageVolume not supported",
	"Service does not have single node multi writer capability",
	"Snapshot not supported",
	"Volume Cloning not supported",
}

func TestSampleDriver(t *testing.T) {
	needMounts(t)
	dir, err := os.MkdirTemp("", "sanity") // short: a socket's path has 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	socket := filepath.Join(dir, "csi.sock")
	serve(t, program(t), "--socket", socket, "--data", filepath.Join(dir, "volumes"),
		"--node-id", "sanity-node", "--topology", "csi-registrar.dev/host=sanity", "--max-volumes", "16")

	config := sanity.NewTestConfig()
	config.Address = "unix:" + socket
	config.TargetPath = filepath.Join(dir, "target")
	config.StagingPath = filepath.Join(dir, "staging")
	suite := sanity.GinkgoTest(&config)
	defer suite.Finalize()
	gomega.RegisterFailHandler(ginkgo.Fail)
	ginkgo.ReportAfterSuite("count", func(r ginkgo.Report) { count(t, r) })
	suiteConfig, reporter := ginkgo.GinkgoConfiguration()
	reporter.NoColor, reporter.Succinct = true, true // reads as well in a log
	ginkgo.RunSpecs(t, "the sample driver", suiteConfig, reporter)

	left, err := os.ReadDir(filepath.Join(dir, "volumes"))
	if err != nil || len(left) > 0 {
		t.Errorf("left in the driver's directory: %v, %v", left, err)
	}
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
	// Pending are those that the suite itself has switched off.
	t.Logf("passed %d, failed %d, left out %d, pending %d", states[types.SpecStatePassed],
		r.SpecReports.CountWithState(types.SpecStateFailureStates),
		states[types.SpecStateSkipped], states[types.SpecStatePending])
	if states[types.SpecStatePassed] == 0 {
		t.Error("no spec passed")
	}
}

// needMounts skips where nothing can be mounted. Under CI=true that is a failure.
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

// ownMounts puts a process into a mount namespace of its own, all private (os/exec sees
// to that), so that no mount outlives it or is seen by anyone else.
func ownMounts() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
}

// program builds the driver as it is shipped.
func program(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if out, err := exec.Command("../../../scripts/build", "", dir).CombinedOutput(); err != nil {
		t.Fatalf("scripts/build: %v\n%s", err, out)
	}
	return filepath.Join(dir, "csi-sample-driver")
}

// serve runs the driver until the test ends, and returns when it says that it serves.
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
