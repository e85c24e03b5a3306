package node_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/test/e2e/node"
)

// TestPeer runs the same scenarios with another registrar and only prints the results. PEER= is the
// path of a node-driver-registrar.
func TestPeer(t *testing.T) {
	peer := os.Getenv("PEER")
	if peer == "" {
		t.Skip("PEER= names no other registrar")
	}
	s := newStage(t, "bookworm", peer)
	for _, p := range append(slices.Clone(plays), boots...) {
		s.play(p)
	}
	s.print(filepath.Base(peer))
}

// TestBootTimes measures the time from power-on, after the CSINode was deleted, until the driver is
// in the CSINode and until a pod writes to its volume: BOOTS=10, on an idle machine. With PEER= it
// alternates with another registrar, or with the packages of another commit if PEER is a directory,
// and also prints the differences of consecutive boots.
func TestBootTimes(t *testing.T) {
	rounds, _ := strconv.Atoi(os.Getenv("BOOTS"))
	if rounds == 0 {
		t.Skip("BOOTS= says not how often")
	}
	for _, suite := range node.Suites {
		t.Run(suite, func(t *testing.T) { bootTimes(t, suite, rounds) })
	}
}

func bootTimes(t *testing.T, suite string, rounds int) {
	type measured struct {
		*stage
		who                string
		inCSINode, writing []time.Duration
	}
	var all []*measured
	for _, peer := range slices.Compact([]string{"", os.Getenv("PEER")}) {
		m := &measured{stage: newStage(t, suite, peer), who: "csi-registrar"}
		if peer != "" {
			m.who = filepath.Base(peer)
		}
		m.PowerCut()
		all = append(all, m)
	}
	for range rounds {
		for _, m := range all {
			m.deleteCSINode()
			start, uptime := time.Now(), uptime()
			m.Boot()
			if err := m.registered(soon); err != nil {
				t.Fatal(err)
			}
			absent, _ := m.writes.Absent(start)
			m.inCSINode = append(m.inCSINode, absent)
			m.writing = append(m.writing, m.firstLine(uptime)-uptime)
			m.PowerCut()
		}
		slices.Reverse(all) // the order may matter
	}
	slices.SortFunc(all, func(a, b *measured) int { return strings.Compare(a.who, b.who) })
	for _, m := range all {
		t.Logf("%s: from power-on to the driver in the CSINode %s", m.who, spread(m.inCSINode))
		t.Logf("%s: from power-on to a line of a pod in its volume %s", m.who, spread(m.writing))
	}
	if len(all) == 2 {
		t.Logf("%s less %s, power-on to the CSINode: %s", all[0].who, all[1].who, spread(differences(all[0].inCSINode, all[1].inCSINode)))
		t.Logf("%s less %s, power-on to a line: %s", all[0].who, all[1].who, spread(differences(all[0].writing, all[1].writing)))
	}
}

// differences returns the differences between a and b for each round.
func differences(a, b []time.Duration) []time.Duration {
	d := make([]time.Duration, len(a))
	for i := range a {
		d[i] = a[i] - b[i]
	}
	return d
}

// firstLine waits until the pod steady has written after an uptime, and returns the uptime of the
// first line.
func (s *stage) firstLine(since time.Duration) (at time.Duration) {
	s.t.Helper()
	s.Eventually(soon, "the pod to write", func() error {
		for line := range strings.Lines(s.Read("/var/lib/csi-sample/" + s.ids[steady] + "/data/" + node.WriterFile)) {
			ms, err := strconv.ParseInt(strings.Fields(line + " .")[0], 10, 64)
			if at = time.Duration(ms) * time.Millisecond; err == nil && at > since {
				return nil
			}
		}
		return errors.New("no line yet")
	})
	return at
}

// uptime returns the time of the clock that cmd/pod uses.
func uptime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0 // cannot happen
	}
	return time.Duration(ts.Nano())
}

func spread(all []time.Duration) string {
	all = slices.Sorted(slices.Values(all))
	return fmt.Sprintf("median %.2f s, %.2f to %.2f s, %d times", all[len(all)/2].Seconds(), all[0].Seconds(), all[len(all)-1].Seconds(), len(all))
}

// peerLimit is how long another registrar may be without its socket.
const peerLimit = 20 * time.Second

// repairPeer restarts another registrar that does not recover by itself, and returns a remark then.
func (s *stage) repairPeer() (remark string) {
	s.t.Helper()
	time.Sleep(quiet) // until a loss is noticed
	deadline := time.Now().Add(peerLimit)
	for {
		_, has := s.writes.Absent(time.Time{})
		if _, err := os.Lstat(s.Path(node.Registry + "/" + node.Driver + "-reg.sock")); err == nil && has {
			return ""
		}
		if time.Now().After(deadline) {
			s.Run("systemctl", "restart", s.unit)
			return fmt.Sprintf("not back after %s", peerLimit)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// installPeer installs another registrar as a unit.
func (s *stage) installPeer(program string) {
	s.t.Helper()
	b, err := os.ReadFile(program)
	if err != nil {
		s.t.Fatal(err)
	}
	s.unit = "peer.service"
	s.WriteMode("/opt/peer", string(b), 0o755)
	s.Write("/usr/lib/systemd/system/"+s.unit, `[Unit]
Before=kubelet.service
StartLimitIntervalSec=0
[Service]
ExecStart=/opt/peer --csi-address=/run/csi-sample/csi.sock --kubelet-registration-path=/run/csi-sample/csi.sock \
	--plugin-registration-path=/var/lib/kubelet/plugins_registry --v=2
Restart=always
[Install]
WantedBy=multi-user.target
`)
	s.Chroot("systemctl", "enable", s.unit)
}
