package node_test

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"csi-registrar/internal/test/e2e/node"
)

const gracefully = "shutdownGracePeriod: 20s\nshutdownGracePeriodCriticalPods: 5s"

// boots are the scenarios that end with a boot, and one that takes long. The CSINode may only be
// written where it was deleted.
var boots = []play{
	{name: "reboot with graceful shutdown", boots: true, do: func(s *stage) {
		s.Poweroff()
		// According to the driver's own record, every volume was unpublished.
		for _, record := range s.glob("/var/lib/csi-sample/vol-*/volume.json") {
			if text := s.Read(record); strings.Contains(text, "targets") {
				s.t.Errorf("after a graceful shutdown a volume is published: %s", text)
			}
		}
		s.Boot()
		s.stoppedAfterKubelet()
	}},
	{name: "reboot without graceful shutdown", boots: true, do: func(s *stage) {
		s.ConfigureKubelet()
		s.Run("systemctl", "restart", "kubelet.service")
		s.KubeletHealthy()
		s.Poweroff()
		s.ConfigureKubelet(gracefully)
		s.Boot()
		s.stoppedAfterKubelet()
	}},
	{name: "power cut", boots: true, do: func(s *stage) {
		s.PowerCut()
		s.Boot()
	}},
	{name: "power cut while a volume is published", boots: true, do: func(s *stage) {
		for range cuts() {
			s.DeletePod(passing)
			s.CreatePod(node.Writer(passing, passing))
			time.Sleep(rand.N(1500 * time.Millisecond)) // at a random moment of the publication
			s.PowerCut()
			s.Boot()
			s.Running(passing)
		}
	}},
	{name: "power cut in an upgrade", boots: true, do: func(s *stage) {
		for range cuts() {
			s.Install(newer, "csi-registrar")
			upgrade := s.Start("dpkg", "--force-confold", "-i", s.Package(older, "csi-registrar"))
			time.Sleep(rand.N(1500 * time.Millisecond))
			s.PowerCut()
			_ = upgrade.Wait() // it was killed
			s.Boot()
			if err := s.registered(soon); err != nil { // without any repair
				s.t.Fatal(err)
			}
			// Unpacked packages are configured; one that was being unpacked has to be installed
			// again, as dpkg reports.
			if out, err := s.Try("dpkg", "--force-confold", "--configure", "-a"); err != nil && !strings.Contains(out, "reinstall") {
				s.t.Fatalf("dpkg --configure: %v\n%s", err, out)
			}
		}
		s.Install(newer, "csi-registrar")
	}},
	{name: "power cut in a configuration change", boots: true, do: func(s *stage) {
		const file = "/etc/csi-registrar/conf.d/60-test.toml"
		for range cuts() {
			// An editor that writes in place was interrupted.
			s.Write(file, "[log]\nlevel = \"deb")
			s.PowerCut()
			s.Boot()
			if err := s.registered(soon); err != nil {
				s.t.Fatal(err)
			}
			s.remove(file)
			s.Run("systemctl", "reload", unit)
		}
	}, journal: []string{"configuration", "without their errors"}},
	{name: "boot without a CSINode", boots: true, csiNode: 3, do: func(s *stage) {
		s.PowerCut()
		s.deleteCSINode()
		s.Boot()
	}},
	{name: "boot with dead registration sockets", boots: true, do: func(s *stage) {
		s.Poweroff()
		for _, name := range []string{node.Driver + "-reg.sock", "." + node.Driver + "-reg.sock"} {
			path := s.Path(filepath.Join(node.Registry, name))
			s.remove(filepath.Join(node.Registry, name))
			if err := syscall.Mknod(path, syscall.S_IFSOCK|0o600, 0); err != nil {
				s.t.Fatal(err)
			}
		}
		s.Boot()
		s.remove(filepath.Join(node.Registry, "."+node.Driver+"-reg.sock")) // it belongs to nobody
	}},
	{name: "boot with a driver slower than the kubelet", boots: true, do: func(s *stage) {
		const dropIn = "/etc/systemd/system/csi-sample-driver.service.d/slow.conf"
		s.Poweroff()
		s.Write(dropIn, "[Unit]\nDefaultDependencies=yes\n[Service]\nExecStartPre=/bin/sleep 5\n")
		s.Boot()
		s.remove(dropIn)
		s.Run("systemctl", "daemon-reload")
	}},
	// The last one, because the kubelet logs errors from this time later.
	{name: "API server away", do: func(s *stage) {
		s.Cluster.StopAPIServer()
		s.Run("systemctl", "restart", unit)
		s.kill("KILL", unit)
		s.Run("systemctl", "restart", driverUnit)
		away := 10 * time.Second
		if *long {
			away = time.Minute
		}
		time.Sleep(away)
		s.Cluster.StartAPIServer()
		// The kubelet cannot look at the claims of the volumes.
	}, journal: slices.Concat(killed, []string{":6443: connect: connection refused"})},
}

// cuts is how often the power is cut at a random moment.
func cuts() int {
	if *long {
		return 5
	}
	return 1
}

// TestBoots runs the scenarios that need a boot.
func TestBoots(t *testing.T) {
	t.Parallel()
	for _, suite := range played("trixie") {
		t.Run(suite, func(t *testing.T) {
			t.Parallel()
			s := newStage(t, suite)
			for _, p := range boots {
				s.play(p)
			}
			s.print()
		})
	}
}

// stoppedAfterKubelet checks in the journal of the previous boot that the driver, which unmounts,
// and the daemon were stopped after the kubelet had ended.
func (s *stage) stoppedAfterKubelet() {
	s.t.Helper()
	journal := s.Run("journalctl", "--quiet", "--boot=-1", "_PID=1")
	kubelet := strings.LastIndex(journal, "Stopped kubelet.service")
	for _, unit := range []string{unit, driverUnit} {
		if at := strings.LastIndex(journal, "Stopping "+unit); at < 0 || kubelet < 0 || at < kubelet {
			s.t.Errorf("%s was not stopped after the kubelet:\n%s", unit, journal[max(0, min(at, kubelet)):])
		}
	}
}

func (s *stage) deleteCSINode() {
	s.t.Helper()
	err := s.Cluster.API.StorageV1().CSINodes().Delete(s.t.Context(), node.Name, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		s.t.Fatal(err)
	}
}

// glob lists paths on the disk.
func (s *stage) glob(pattern string) []string {
	s.t.Helper()
	found, err := filepath.Glob(s.Path(pattern))
	if err != nil {
		s.t.Fatal(err)
	}
	for i := range found {
		found[i] = strings.TrimPrefix(found[i], s.Path("/"))
	}
	if len(found) == 0 {
		s.t.Fatal(fmt.Errorf("nothing is at %s", pattern))
	}
	return found
}
