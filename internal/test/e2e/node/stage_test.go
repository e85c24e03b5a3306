package node_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"csi-registrar/internal/test/e2e/node"
)

const (
	unit       = "csi-registrar.service"
	driverUnit = "csi-sample-driver.service"

	// Two versions of this tree, to go from one to the other.
	older, newer = "0.1.98", "0.1.99"

	// The pod steady runs during all scenarios, passing is deleted and created again after each.
	steady, passing = "steady", "passing"

	soon = 60 * time.Second
	// The kubelet acts in a loop of one second.
	quiet = 2500 * time.Millisecond
	// maxGap is the longest allowed time between two lines of the pod.
	maxGap = time.Second
)

// orphaned is logged by a kubelet that deletes and recreates the CSINode, because it registered a
// driver before it knew the UID of its Node (kubelet 1.36 and 1.37). The registrar is not the
// cause.
const orphaned = "is owned by different node"

// play is a scenario: something that happens to a node, and its permitted effects.
type play struct {
	name string
	do   func(*stage)
	// csiNode is how often the CSINode may be written. With 0, the driver must not be missing there
	// at any time, and the Node must not be written either.
	csiNode int
	// journal has parts of the warnings and errors that this scenario causes.
	journal []string
	// boots means that the pods do not survive the scenario.
	boots bool
}

// stage is a node on which scenarios are run.
type stage struct {
	*node.Node
	t      *testing.T
	writes *node.Writes
	ids    map[string]string // volume handles, by pod
	left   []string          // our files and units on the idle node
	began  time.Time         // start of the scenario
	rows   []row
}

// row has the observed effects of a scenario.
type row struct {
	play          string
	csiNode, node int
	absent, gap   time.Duration
}

// newStage boots a node with both pods.
func newStage(t *testing.T, suite string) *stage {
	t.Helper()
	s := &stage{Node: node.New(t, suite), t: t, ids: map[string]string{}}
	s.Chroot("mkdir", "-p", "/var/log/journal") // kept over a reboot
	s.Install(newer, "csi-registrar", "csi-sample-driver")
	s.writes = s.WatchWrites(t)
	s.Boot()
	if err := s.registered(soon); err != nil {
		t.Fatal(err)
	}
	for _, pod := range []string{steady, passing} {
		s.ids[pod] = s.CreateVolume(pod)
		s.CreatePod(node.Writer(pod, pod))
	}
	for pod := range s.ids {
		s.Running(pod)
	}
	s.left = s.ours()
	return s
}

// play runs a scenario, and checks its effects and what it left behind.
func (s *stage) play(p play) {
	s.t.Run(strings.ReplaceAll(p.name, " ", "-"), func(t *testing.T) {
		outer := s.t
		s.t = t
		defer func() { s.t = outer }()
		s.During(t, func() { s.playHere(p) })
	})
}

func (s *stage) playHere(p play) {
	cursor := s.cursor()
	from := s.lines(steady)
	s.began = time.Now()
	defer func() {
		if s.t.Failed() {
			s.t.Logf("our journal, and what the kubelet said of drivers:\n%s", s.journalOf(cursor))
		}
	}()
	p.do(s)
	r := row{play: p.name}
	if err := s.registered(soon); err != nil {
		s.t.Fatal(err)
	}
	s.accepts(node.DriverSocket) // its unit is active before it serves
	s.republish(p.boots)
	// Wait, to see that nothing more happens.
	time.Sleep(quiet)

	r.csiNode, r.node = s.writes.Count("CSINode", s.began), s.writes.Count("Node", s.began)
	r.absent, _ = s.writes.Absent(s.began)
	if !p.boots {
		r.gap = s.gap(steady, from)
	}
	s.rows = append(s.rows, r)
	allowed := p.csiNode
	if n := strings.Count(s.Run("journalctl", "--quiet", "--unit=kubelet.service", "--after-cursor="+cursor), orphaned); n > 0 {
		s.t.Logf("in %d boots the kubelet deleted the CSINode, not knowing its Node yet", n)
		allowed += 3 * n
	}
	if r.csiNode > allowed || allowed == 0 && r.node > 0 {
		s.t.Errorf("the CSINode was written %d times and the Node %d times, want %d at most: %v", r.csiNode, r.node, allowed, s.writes.Since(s.began))
	}
	if allowed == 0 && r.absent > 0 {
		s.t.Errorf("the driver was not in the CSINode for %s", r.absent)
	}
	if r.gap > maxGap {
		s.t.Errorf("the pod wrote nothing for %s", r.gap)
	}
	s.checkMounts()
	if left := s.ours(); !slices.Equal(left, s.left) {
		s.t.Errorf("of ours there is\n%s\nwant\n%s", strings.Join(left, "\n"), strings.Join(s.left, "\n"))
	}
	s.checkJournal(cursor, p.journal)
	if out, err := s.Try("csi-registrar", "doctor"); err != nil {
		s.t.Errorf("doctor: %v\n%s", err, out)
	}
}

// registered waits until the kubelet answers and the driver is in the CSINode.
func (s *stage) registered(limit time.Duration) error {
	s.t.Helper()
	s.KubeletHealthy()
	// With a name it succeeds also while a file has errors.
	s.Run("csi-registrar", "wait", "--timeout", "55s", node.Driver)
	deadline := time.Now().Add(limit)
	for {
		_, has := s.writes.Absent(time.Time{})
		if has {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the driver is not in the CSINode after %s", limit)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// republish checks that volumes can be unpublished and published.
func (s *stage) republish(boots bool) {
	s.t.Helper()
	s.DeletePod(passing)
	s.CreatePod(node.Writer(passing, passing))
	// A pod that was terminated gracefully is never restarted.
	if p := s.Pod(steady); boots && (p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed) {
		s.DeletePod(steady)
		s.CreatePod(node.Writer(steady, steady))
	}
	s.Running(passing)
	s.Running(steady)
}

// print shows the rows as a table.
func (s *stage) print() {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n| | CSINode writes | Node writes | driver missing, s | longest gap, s |\n|---|---|---|---|---|\n", s.Suite)
	for _, r := range s.rows {
		fmt.Fprintf(&b, "| %s | %d | %d | %.1f | %.1f |\n", r.play, r.csiNode, r.node, r.absent.Seconds(), r.gap.Seconds())
	}
	s.t.Log(b.String())
}

// volumeDir returns the kubelet's directory of a pod's volume.
func (s *stage) volumeDir(pod string) string {
	s.t.Helper()
	p := s.Pod(pod)
	if p == nil {
		s.t.Fatalf("there is no pod %s", pod)
	}
	return fmt.Sprintf("/var/lib/kubelet/pods/%s/volumes/kubernetes.io~csi/%s", p.UID, pod)
}

// writerLines returns the lines of a pod, read at the kubelet's mount point of the volume.
func (s *stage) writerLines(pod string) []string {
	s.t.Helper()
	lines := strings.Split(s.Read(s.volumeDir(pod)+"/mount/"+node.WriterFile), "\n")
	return lines[:len(lines)-1] // the last one is empty or incomplete
}

func (s *stage) lines(pod string) int { return len(s.writerLines(pod)) }

// gap returns the longest time without a line, after the first lines.
func (s *stage) gap(pod string, from int) time.Duration {
	s.t.Helper()
	lines := s.writerLines(pod)
	if len(lines) <= from {
		s.t.Fatalf("%s: %d lines, as before", pod, len(lines))
	}
	worst, err := node.LongestGap(lines[max(0, from-1):])
	if err != nil {
		s.t.Fatalf("%s: %v", pod, err)
	}
	return worst
}

// checkMounts checks that each pod has its volume, that the kubelet's files name its driver and
// handle, and that there are no other mounts.
func (s *stage) checkMounts() {
	s.t.Helper()
	var want []string
	for pod, id := range s.ids {
		dir := s.volumeDir(pod)
		source := " /var/lib/csi-sample/" + id + "/data"
		want = append(want, dir+"/mount"+source, "globalmount"+source) // published and staged
		var data struct{ DriverName, VolumeHandle string }
		text := s.Read(dir + "/vol_data.json")
		if err := json.Unmarshal([]byte(text), &data); err != nil || data.DriverName != node.Driver || data.VolumeHandle != id {
			s.t.Errorf("%s/vol_data.json: %q %v", dir, text, err)
		}
	}
	var got []string
	mounts := bufio.NewScanner(strings.NewReader(s.Run("cat", "/proc/self/mountinfo")))
	for mounts.Scan() {
		fields := strings.Fields(mounts.Text())
		target := fields[4]
		if strings.HasSuffix(target, "/globalmount") {
			target = "globalmount" // below a directory whose name is a hash
		} else if !strings.Contains(target, "/kubernetes.io~csi/") {
			continue
		}
		got = append(got, target+" "+fields[3][max(0, strings.Index(fields[3], "/var/lib/csi-sample")):])
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		s.t.Errorf("the mounts are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// ours lists our files, the descriptors that systemd keeps, and failed units.
func (s *stage) ours() []string {
	s.t.Helper()
	var all []string
	for _, dir := range []string{"/run/csi-registrar", node.Registry} {
		top := s.Path(dir)
		err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			// The record of the directory for which the sandbox was renewed stays, so that it is
			// renewed once.
			if err == nil && !d.IsDir() && d.Name() != "sandbox.json" {
				all = append(all, dir+strings.TrimPrefix(path, top)+" "+d.Type().String())
			}
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		})
		if err != nil {
			s.t.Fatal(err)
		}
	}
	all = append(all, "descriptors in store: "+s.show(unit, "NFileDescriptorStore"))
	for line := range strings.Lines(s.Run("systemctl", "list-units", "--all", "--plain", "--no-legend", "csi-*")) {
		all = append(all, strings.Join(strings.Fields(line)[:4], " "))
	}
	return all
}

func (s *stage) show(unit, property string) string {
	s.t.Helper()
	return strings.TrimSpace(s.Run("systemctl", "show", "--value", "--property="+property, unit))
}

// cursor returns the current position in the journal.
func (s *stage) cursor() string {
	s.t.Helper()
	_, cursor, ok := strings.Cut(s.Run("journalctl", "--quiet", "-n0", "--show-cursor"), "cursor: ")
	if !ok {
		s.t.Fatal("the journal has no cursor")
	}
	return strings.TrimSpace(cursor)
}

// entry is a journal entry.
type entry struct {
	Message    string `json:"MESSAGE"`
	Priority   string `json:"PRIORITY"`
	From       string `json:"_SYSTEMD_UNIT"`
	About      string `json:"UNIT"`
	Identifier string `json:"SYSLOG_IDENTIFIER"`
}

// checkJournal checks that each warning and error from or about our units since a cursor is
// expected, and that the kubelet has logged no error about our driver.
func (s *stage) checkJournal(cursor string, causes []string) {
	s.t.Helper()
	for line := range strings.Lines(s.Run("journalctl", "--quiet", "--output=json", "--after-cursor="+cursor)) {
		var e entry
		if json.Unmarshal([]byte(line), &e) != nil {
			continue // a field that is not text; ours all are
		}
		unit := e.From
		if e.About != "" {
			unit = e.About
		}
		ours := strings.HasPrefix(unit, "csi-") && e.Priority <= "4"
		kubelet := unit == "kubelet.service" && strings.HasPrefix(e.Message, "E") &&
			(strings.Contains(e.Message, node.Driver) || strings.Contains(e.Message, "plugins_registry"))
		// A kubelet that has just started logs this for each mount until it has registered the
		// driver. In other cases the CSINode would show that the driver was missing.
		kubelet = kubelet && !strings.Contains(e.Message, "not found in the list of registered CSI drivers")
		if (ours || kubelet) && !slices.ContainsFunc(causes, func(c string) bool { return strings.Contains(e.Message, c) }) {
			s.t.Errorf("the journal has an entry without a cause: %s: <%s> %s", unit, e.Priority, e.Message)
		}
	}
}

// journalOf returns the journal entries about us since a cursor.
func (s *stage) journalOf(cursor string) string {
	var b strings.Builder
	out, err := s.Try("journalctl", "--quiet", "--output=short-precise", "--after-cursor="+cursor)
	for line := range strings.Lines(out) {
		if strings.Contains(line, "csi-") && !strings.Contains(line, "FLAG:") || strings.Contains(line, "csi_plugin") || strings.Contains(line, "CSINode") {
			b.WriteString(line)
		}
	}
	if err != nil {
		b.WriteString(err.Error())
	}
	return b.String()
}

// kill signals the main process of a unit.
func (s *stage) kill(signal, unit string) {
	s.t.Helper()
	s.Run("systemctl", "kill", "--kill-who=main", "--signal="+signal, unit)
}

// replaced calls do, which ends the main process of a unit, and waits for the new one.
func (s *stage) replaced(unit string, do func()) {
	s.t.Helper()
	old := s.show(unit, "MainPID")
	do()
	s.Eventually(soon, unit+" to have another process", func() error {
		if now := s.show(unit, "MainPID"); now == old || now == "0" {
			return fmt.Errorf("it has %s, had %s", now, old)
		}
		return nil
	})
	s.active(unit)
}

func (s *stage) active(unit string) {
	s.t.Helper()
	s.Eventually(soon, unit+" to be active", func() error {
		_, err := s.Try("systemctl", "is-active", unit)
		return err
	})
}
