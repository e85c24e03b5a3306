package node_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"csi-registrar/internal/test/e2e/node"
)

const sampleTable = "/usr/lib/csi-registrar/conf.d/20-sample.toml"

// TestVolumes compares the reports of status and doctor about volumes and the kubelet with the
// facts.
func TestVolumes(t *testing.T) {
	t.Parallel()
	s := newStage(t, "bookworm")
	s.volumesAre(2, 2)
	s.healthy()

	for _, c := range []struct {
		name string
		do   func(s *stage)
		long bool
	}{
		{"an empty vol_data.json", (*stage).emptyVolumeData, false},
		{"a pod deleted by force", (*stage).forceDelete, false},
		{"mounts that do not reach the kubelet", (*stage).hiddenMounts, false},
		{"a table that disappears waits for the pods", (*stage).removeTable, false},
		{"a table that is disabled does not", (*stage).disableTable, false},
		// 5 minutes.
		{"the kubelet killed between unpublish and unstage", (*stage).killBeforeUnstage, true},
	} {
		if c.long && !*long {
			continue
		}
		// Each restores the node for the next one.
		ok := t.Run(strings.ReplaceAll(c.name, " ", "-"), func(t *testing.T) {
			outer := s.t
			s.t = t
			defer func() { s.t = outer }()
			cursor := s.cursor()
			s.began = time.Now()
			defer func() {
				if t.Failed() {
					t.Logf("our journal, and what the kubelet said of drivers:\n%s", s.journalOf(cursor))
				}
			}()
			s.During(t, func() { c.do(s) })
			s.volumesAre(2, 2)
			s.healthy()
		})
		if !ok {
			break
		}
	}
}

func (s *stage) emptyVolumeData() {
	path := s.volumeDir(passing) + "/vol_data.json"
	content := s.Read(path)
	s.Write(path, "")
	must(s.t, s.Cluster.API.CoreV1().Pods(metav1.NamespaceDefault).Delete(s.t.Context(), passing, metav1.DeleteOptions{}))
	s.Eventually(soon, "the kubelet to fail", func() error {
		if journal := s.Run("journalctl", "--quiet", "--unit=kubelet.service", "--since=@"+strconv.FormatInt(s.began.Unix(), 10)); !strings.Contains(journal, "failed to parse volume data file") {
			return errors.New("it has said nothing of the file")
		}
		return nil
	})
	if s.Pod(passing) == nil {
		s.t.Error("the pod is gone although its volume could not be unmounted")
	}
	s.Write(path, content) // as troubleshooting.md says, for a pod that does not exist any more
	// The kubelet tries again within 2 minutes.
	s.Eventually(4*time.Minute, "the pod to be gone", func() error {
		if s.Pod(passing) != nil {
			return errors.New("it is still there")
		}
		return nil
	})
	s.volumesAre(1, 1)
	s.CreatePod(node.Writer(passing, passing))
	s.Running(passing)
}

func (s *stage) forceDelete() {
	now := int64(0)
	must(s.t, s.Cluster.API.CoreV1().Pods(metav1.NamespaceDefault).Delete(s.t.Context(), passing, metav1.DeleteOptions{GracePeriodSeconds: &now}))
	s.Gone(passing)
	s.volumesAre(1, 1) // the kubelet unmounts although the API server has forgotten the pod
	s.healthy()
	s.CreatePod(node.Writer(passing, passing))
	s.Running(passing)
}

// hiddenMounts gives the driver a mount namespace of its own, and pastes what doctor prints for a
// pod that writes to the node's disk: nothing of it is lost.
func (s *stage) hiddenMounts() {
	const dropIn = "/etc/systemd/system/" + driverUnit + ".d/mounts.conf"
	s.DeletePod(passing)
	s.Write(dropIn, "[Service]\nPrivateMounts=yes\n")
	s.Run("systemctl", "daemon-reload")
	s.Run("systemctl", "restart", driverUnit)
	s.Registered()
	s.CreatePod(node.Writer(passing, passing))
	s.Running(passing)
	s.finds("volume-misplaced")
	var report struct {
		Findings []struct {
			Found string
			Fix   []string
		}
	}
	out, _ := s.Try("csi-registrar", "doctor", "--json")
	must(s.t, json.Unmarshal([]byte(out), &report))
	s.t.Logf("%v", report.Findings)
	if found := report.Findings[0].Found; !strings.Contains(found, "(pod default/"+passing+", ") || !strings.Contains(found, "PrivateMounts=yes in "+dropIn) {
		s.t.Errorf("the finding is %s", found)
	}
	s.Write("/root/pasted", strings.Join(report.Findings[0].Fix, "\n")+"\n")
	kept := "/var/lib/csi-saved/" + string(s.Pod(passing).UID) + "/" + passing + "/mount/" + node.WriterFile
	out, _ = s.Try("sh", "-v", "/root/pasted") // it has no crictl
	s.t.Log(out)
	if s.Read(kept) == "" {
		s.t.Error("nothing was saved")
	}
	s.healthy() // the kubelet started the container again, with its volume
	s.DeletePod(passing)
	s.CreatePod(node.Writer(passing, passing))
	s.Running(passing)
	s.remove(dropIn)
	s.Run("rm", "-rf", "/etc/systemd/system/"+driverUnit+".d", "/var/lib/csi-saved")
	s.Run("systemctl", "daemon-reload")
}

// killBeforeUnstage stops the driver as soon as the volume is unpublished, and kills the kubelet,
// which waits for the driver. Status and doctor report the actual state, whether or not the
// next kubelet unstages the volume.
func (s *stage) killBeforeUnstage() {
	staged := s.stagingOf(passing)
	dir := s.volumeDir(passing)
	target := dir + "/mount"
	kubelet, driver := s.show("kubelet.service", "MainPID"), s.show(driverUnit, "MainPID")
	must(s.t, s.Cluster.API.CoreV1().Pods(metav1.NamespaceDefault).Delete(s.t.Context(), passing, metav1.DeleteOptions{}))
	// In the machine, because it must be quick.
	s.Run("timeout", "50", "sh", "-c", fmt.Sprintf("while grep -q ' %s ' /proc/self/mountinfo; do :; done; kill -STOP %s; kill -KILL %s", target, driver, kubelet))
	if !s.mounted(staged) {
		s.t.Log("the kubelet was quicker: the volume is unstaged already")
	} else if _, err := os.Lstat(s.Path(dir + "/vol_data.json")); err == nil {
		s.volumesAre(2, 2) // the kubelet does not know that it was unpublished
	} else {
		s.volumesAre(1, 2)
	}
	s.Run("kill", "-CONT", driver)
	s.KubeletHealthy()
	s.Gone(passing)
	// The new kubelet unstages the volume, or has forgotten it. Another pod helps in both cases.
	s.CreatePod(node.Writer(passing, passing))
	s.Running(passing)
	s.DeletePod(passing)
	s.volumesAre(1, 1)
	s.CreatePod(node.Writer(passing, passing))
	s.Running(passing)
}

func (s *stage) removeTable() {
	content := s.Read(sampleTable)
	s.remove(sampleTable)
	s.Eventually(soon, "status to say why the driver stays", func() error {
		out, err := s.Try("csi-registrar", "status", "--json")
		if !strings.Contains(out, "2 volumes in use, no table") {
			return fmt.Errorf("%s %w", out, err)
		}
		return nil
	})
	s.Run("systemctl", "restart", unit) // it remembers the volume
	s.DeletePod(passing)
	if !s.writes.HasDriver() {
		s.t.Error("the driver is withdrawn although a pod uses it")
	}
	s.DeletePod(steady)
	// Without any action.
	s.Eventually(3*time.Minute, "the driver to be withdrawn", func() error {
		if s.writes.HasDriver() {
			return errors.New("the CSINode has it")
		}
		return nil
	})
	if n := s.writes.Count("CSINode", s.began); n != 1 {
		s.t.Errorf("the CSINode was written %d times, want 1", n)
	}
	s.Write(sampleTable, content)
	s.back()
}

func (s *stage) disableTable() {
	const dropIn = "/etc/csi-registrar/conf.d/60-sample.toml"
	cursor := s.cursor()
	s.Write(dropIn, fmt.Sprintf("[driver.%q]\nenabled = false\n", node.Driver))
	start := time.Now()
	s.Eventually(soon, "the driver to be withdrawn", func() error {
		if s.writes.HasDriver() {
			return errors.New("the CSINode has it")
		}
		return nil
	})
	s.t.Logf("withdrawn %s after the file was written", time.Since(start).Round(10*time.Millisecond))
	const want = "the kubelet cannot unmount its volumes until it is registered again"
	// Not by unit: journalctl would leave out the first entry of the unit after a cursor of another
	// one.
	if journal := s.Run("journalctl", "--quiet", "--after-cursor="+cursor); !strings.Contains(journal, want) || !strings.Contains(journal, "2 volumes in use") {
		s.t.Errorf("no warning %q about 2 volumes:\n%s", want, journal)
	}
	s.remove(dropIn)
	s.back()
}

// back waits until the driver is registered and both pods run.
func (s *stage) back() {
	s.t.Helper()
	if err := s.registered(2 * time.Minute); err != nil {
		s.t.Fatal(err)
	}
	for _, pod := range []string{steady, passing} {
		if s.Pod(pod) == nil {
			s.CreatePod(node.Writer(pod, pod))
		}
		s.Running(pod)
	}
}

// volumesAre waits until status shows these numbers.
func (s *stage) volumesAre(published, staged int) {
	s.t.Helper()
	s.Eventually(2*time.Minute, fmt.Sprintf("%d published and %d staged volumes", published, staged), func() error {
		var status struct {
			Drivers []struct {
				Volumes struct{ Published, Staged int }
			}
		}
		out, _ := s.Try("csi-registrar", "status", "--json") // it fails while the driver is stopped
		if err := json.Unmarshal([]byte(out), &status); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		if len(status.Drivers) != 1 || status.Drivers[0].Volumes.Published != published || status.Drivers[0].Volumes.Staged != staged {
			return fmt.Errorf("%+v", status)
		}
		return nil
	})
}

// finding returns the ID of doctor's finding, or "" if there is none. There is at most one here.
func (s *stage) finding() string {
	s.t.Helper()
	var report struct{ Findings []struct{ ID, Found string } }
	out, _ := s.Try("csi-registrar", "doctor", "--json") // it exits 1 if it finds a problem
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		s.t.Fatalf("%v\n%s", err, out)
	}
	switch len(report.Findings) {
	case 0:
		return ""
	case 1:
		return report.Findings[0].ID
	}
	return fmt.Sprint(report.Findings)
}

func (s *stage) finds(id string) {
	s.t.Helper()
	s.Eventually(soon, "doctor to find "+id, func() error {
		if got := s.finding(); got != id {
			return fmt.Errorf("it finds %q", got)
		}
		return nil
	})
}

func (s *stage) healthy() {
	s.t.Helper()
	s.finds("")
}

// mounted reports whether the path is a mount point.
func (s *stage) mounted(path string) bool {
	s.t.Helper()
	b, err := os.ReadFile(s.Path("/proc/1/mountinfo"))
	must(s.t, err)
	return strings.Contains(string(b), " "+path+" ")
}

// stagingOf returns the path at which the volume of a pod is staged.
func (s *stage) stagingOf(pod string) string {
	s.t.Helper()
	path := s.stagingPath(pod)
	if path == "" {
		s.t.Fatalf("the volume of %s is not staged", pod)
	}
	return path
}

func (s *stage) stagingPath(pod string) string {
	s.t.Helper()
	b, err := os.ReadFile(s.Path("/proc/1/mountinfo"))
	must(s.t, err)
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		if strings.Contains(fields[4], "/plugins/kubernetes.io/csi/") && strings.Contains(fields[3], s.ids[pod]) {
			return fields[4]
		}
	}
	return ""
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
