package node_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/controlplane"
	"csi-registrar/internal/test/e2e/node"
)

// TestLinkMovesUnderPods moves the link that the kubelet knows between two instances of a driver
// while pods are started and ended. None of the kubelet's calls fails. LINK_MOVES is the number of
// moves.
func TestLinkMovesUnderPods(t *testing.T) {
	t.Parallel()
	moves := 8
	if s := os.Getenv("LINK_MOVES"); s != "" {
		var err error
		if moves, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	const dir = "/var/lib/kubelet/plugins/csi-nfsplugin"
	file := func(name string) string { return read(t, filepath.Join(built.Root(t), "packaging/examples", name)) }
	n := node.New(t, "trixie")
	n.Install(newer, "csi-registrar")
	n.Write("/etc/csi-registrar/conf.d/60-nfs.toml", file("nfs/60-nfs.toml"))
	n.Write("/etc/systemd/system/csi-nfs@.service", file("upgrade/csi-nfs@.service"))
	n.WriteMode("/usr/local/bin/nfsplugin", read(t, built.Command(t, "upstream")), 0o755)
	n.WriteMode("/usr/bin/csi-sample-driver", read(t, built.SampleDriver(t)), 0o755)
	n.Chroot("systemctl", "enable", "csi-nfs@a.service", "csi-nfs@b.service")
	n.Boot()
	n.KubeletHealthy()
	n.Registered()
	n.CreateVolumeOf("nfs.csi.k8s.io", dir+"/csi.sock", "data")
	writes := n.WatchWrites(t)
	controlplane.Eventually(t, time.Minute, "the CSINode", func() error {
		if writes.Count("CSINode", time.Time{}) == 0 {
			return errors.New("not seen yet")
		}
		return nil
	})
	mark := time.Now()

	// A move every 200 ms or so, under the pods below.
	link := n.Path(dir + "/csi.sock")
	ctx, stop := context.WithCancel(t.Context())
	moved, pods := 0, 0
	var moving sync.WaitGroup
	moving.Go(func() {
		defer stop()
		for ; moved < moves && ctx.Err() == nil; moved++ {
			next := filepath.Join(filepath.Dir(link), ".next")
			if err := os.Symlink(string("ba"[moved%2])+".sock", next); err != nil {
				t.Error(err)
				return
			}
			if err := os.Rename(next, link); err != nil {
				t.Error(err)
				return
			}
			select {
			case <-time.After(200 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	})
	defer moving.Wait()
	defer stop()
	for ; ctx.Err() == nil || pods < 2; pods++ {
		name := fmt.Sprintf("writer-%d", pods)
		n.CreatePod(node.Writer(name, "data"))
		n.Running(name)
		n.DeletePod(name)
	}
	moving.Wait()
	if moved != moves {
		t.Errorf("%d moves, want %d", moved, moves)
	}
	events, err := n.Cluster.API.CoreV1().Events(metav1.NamespaceAll).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events.Items {
		if e.Type == corev1.EventTypeWarning && strings.Contains(e.Reason, "ount") {
			t.Errorf("%s: %s", e.Reason, e.Message)
		}
	}
	if count := writes.Count("CSINode", mark); count != 0 {
		t.Errorf("the CSINode was written %d times", count)
	}
	t.Logf("%d moves under %d pods", moved, pods)
}
