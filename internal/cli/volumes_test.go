package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/fake"
	"csi-registrar/internal/status"
)

// kubeletFiles makes the root directory of a kubelet with volumes of a.csi.example: one that
// is staged, and published to two pods.
func kubeletFiles(t *testing.T, root string) (kubelet string) {
	t.Helper()
	kubelet = filepath.Join(root, "kubelet")
	for _, dir := range []string{
		"plugins/kubernetes.io/csi/a.csi.example/0123", "pods/p1/volumes/kubernetes.io~csi/pv", "pods/p2/volumes/kubernetes.io~csi/pv",
	} {
		dir = filepath.Join(kubelet, dir)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "vol_data.json"), []byte(`{"driverName":"a.csi.example","volumeHandle":"v"}`), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return kubelet
}

func TestStatusShowsVolumes(t *testing.T) {
	root := newRoot(t)
	d := newFake(driverIn("a.csi.example", "registered", hour), driverIn("b.csi.example", "registered", hour))
	d.status.PluginsRegistry = filepath.Join(root, "kubelet/plugins_registry")
	d.serve(t, root)
	show := func(args ...string) string {
		t.Helper()
		s := newSession()
		if code := s.run(t.Context(), append([]string{"status", "--config-root", root}, args...)...); code != 0 {
			t.Fatalf("exit code %d, %s", code, s.stderr)
		}
		return s.stdout.String()
	}
	before := show("--json")
	if out := show(); strings.Contains(out, "VOLUMES") {
		t.Errorf("without volumes:\n%s", out)
	}
	kubeletFiles(t, root)
	want := `DRIVER         STATE       SINCE  KUBELET      VOLUMES
a.csi.example  registered  1h     yes 1h ago   2, 1 staged
b.csi.example  registered  1h     yes 1h ago   -

2 of 2 drivers registered
`
	if out := show(); strings.Join(strings.Fields(out), " ") != strings.Join(strings.Fields(want), " ") {
		t.Errorf("got\n%s\nwant\n%s", out, want)
	}
	if out := show("a.csi.example"); !strings.Contains(out, "  volumes             2, 1 staged\n") {
		t.Errorf("got\n%s", out)
	}
	// The rest of the document is as it was, byte by byte.
	after := show("--json")
	var doc status.Document
	if err := json.Unmarshal([]byte(after), &doc); err != nil {
		t.Fatal(err)
	}
	if v := doc.Drivers[0].Volumes; v == nil || *v != (status.Volumes{Staged: 1, Published: 2}) {
		t.Errorf("%+v", v)
	}
	if v := doc.Drivers[1].Volumes; v == nil || *v != (status.Volumes{}) {
		t.Errorf("%+v", v)
	}
	count := func(staged, published int) string {
		return fmt.Sprintf("\"volumes\": {\n        \"staged\": %d,\n        \"published\": %d\n", staged, published)
	}
	if back := strings.Replace(after, count(1, 2), count(0, 0), 1); back != before {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
}

func TestStatusWatchShowsVolumes(t *testing.T) {
	root := newRoot(t)
	d := newFake(driverIn("a.csi.example", "registered", hour))
	d.status.PluginsRegistry = filepath.Join(kubeletFiles(t, root), "plugins_registry")
	d.serve(t, root)
	s := newSession()
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	ended := make(chan int)
	go func() { ended <- s.run(ctx, "status", "--watch", "--json", "--config-root", root) }()
	s.stdout.await(t, `"volumes":{"staged":1,"published":2}`)
	interrupt()
	<-ended
}

// The state of the drivers is shown also where the kubelet's files cannot be read.
func TestStatusWhereTheKubeletsFilesDoNotAnswer(t *testing.T) {
	root := newRoot(t)
	kubelet := filepath.Join(root, "kubelet")
	if err := os.Mkdir(kubelet, 0o755); err != nil {
		t.Fatal(err)
	}
	h, err := fake.MountHangFS(kubelet)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := h.Hang(); err != nil {
		t.Fatal(err)
	}
	d := newFake(driverIn("a.csi.example", "registered", hour))
	d.status.PluginsRegistry = filepath.Join(kubelet, "plugins_registry")
	d.serve(t, root)
	s := newSession()
	start := time.Now()
	code := s.run(t.Context(), "status", "--config-root", root)
	want := "the volumes in use are not known: the file system of " + kubelet + " does not answer"
	if out := strings.Join(strings.Fields(s.stdout.String()), " "); code != 0 || !strings.Contains(out, "a.csi.example registered") || !strings.Contains(out, want) {
		t.Errorf("exit code %d after %s: %s", code, time.Since(start), out)
	}
}
