package e2e

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/harness"
)

// The cases in which node-driver-registrar 2.17 and 2.18 were measured by the project, on a small
// machine. For each, a test with the kubelet's plugin manager shows a better result:
//
//	driver absent 0.2, 3, 10, 60 s         TestAcceptsWithin20msOfTheDriverServing, TestAbsentForLong
//	restart or kill -9                     TestDaemonRestartsThroughTheStore
//	registration socket removed            TestRegistrationSocketRestored
//	its directory removed                  TestRegistryDirectory
//	driver restarts with another name      TestAnotherDriverUnderTheName
//	… node id, topology                    TestDriverRestartsChanged, TestDriverRestartsWithAnotherTopologyValue
//	the kubelet refuses                    TestRefusalIsKeptAndRetriedByTheKubelet
//	another live registrar at the path     TestMovedFromTheSidecar, TestSidecarStealsThePath, TestTwoDaemons
//	GetPluginInfo hangs, fails, is empty   TestBadDriversDelayNobody
//	INT, HUP                               TestSignalsTakeTheSocketsAway
//	memory, idle, start, binary            make bench

// The peer exits after 30 s without its driver, and a supervisor's restarts add seconds.
func TestAbsentForLong(t *testing.T) {
	t.Parallel()
	n := harness.New(t)
	d := n.NewDriver("a.example")
	c := startNamed(n, d.Socket)
	k := n.StartKubelet()
	harness.Never(t, span(35*time.Second, 150*time.Second), "it ended", func() string {
		if !c.Running() {
			return c.Log()
		}
		return ""
	})
	served := d.Start()
	if e := k.Registered(0, d.Name, soon); e.Time.Sub(served) > 5*time.Second {
		t.Errorf("registered %v after the driver served", e.Time.Sub(served))
	}
}

// memory returns a value of /proc/PID/smaps_rollup in MB. kind is "Pss:" or "Pss_Anon:".
func memory(t *testing.T, pid int, kind string) float64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(b) {
		if f := bytes.Fields(line); len(f) == 3 && string(f[0]) == kind {
			kb, err := strconv.Atoi(string(f[1]))
			if err != nil {
				t.Fatal(err)
			}
			return float64(kb) * 1024 / 1e6
		}
	}
	t.Fatalf("no %s in %s", kind, b)
	return 0
}
