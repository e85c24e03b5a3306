package volumes

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/worker"
	"csi-registrar/internal/test/fake"
)

// tree is a kubelet's root directory, and a /proc with the mounts.
type tree struct {
	*testing.T
	root, proc string
	mounts     []string
}

func newTree(t *testing.T) *tree {
	x := &tree{T: t, root: filepath.Join(t.TempDir(), "kubelet"), proc: t.TempDir()}
	x.mkdir("pods")
	return x
}

func (x *tree) must(err error) {
	x.Helper()
	if err != nil {
		x.Fatal(err)
	}
}

func (x *tree) mkdir(name string) {
	x.Helper()
	x.must(os.MkdirAll(filepath.Join(x.root, name), 0o755))
}

func (x *tree) write(name, text string) {
	x.Helper()
	x.mkdir(filepath.Dir(name))
	x.must(os.WriteFile(filepath.Join(x.root, name), []byte(text), 0o644))
}

func (x *tree) mount(name string) {
	x.mounts = append(x.mounts, strings.NewReplacer(`\`, `\134`, " ", `\040`).Replace(filepath.Join(x.root, name)))
}

// published and staged create what the kubelet creates, and return the directory.
func (x *tree) published(pod, pv, driver, handle string) string {
	dir := "pods/" + pod + "/volumes/kubernetes.io~csi/" + pv
	x.write(dir+"/vol_data.json", data(driver, handle))
	x.mkdir(dir + "/mount")
	x.mount(dir + "/mount")
	return dir
}

func (x *tree) staged(driver, handle string) string {
	dir := "plugins/kubernetes.io/csi/" + driver + "/hash-of-" + handle
	x.write(dir+"/vol_data.json", data(driver, handle))
	x.mkdir(dir + "/globalmount")
	x.mount(dir + "/globalmount")
	return dir
}

func (x *tree) block(pv, driver, handle string, pods ...string) {
	devices := "plugins/kubernetes.io/csi/volumeDevices/"
	x.write(devices+pv+"/data/vol_data.json", data(driver, handle))
	x.mkdir(devices + "staging/" + pv)
	for _, pod := range pods {
		x.write(devices+"publish/"+pv+"/"+pod, "")
		x.write(devices+pv+"/dev/"+pod, "")
	}
}

func data(driver, handle string) string {
	return fmt.Sprintf(`{"driverName":%q,"nodeName":"n","specVolID":"pv","volumeHandle":%q}`+"\n", driver, handle)
}

func (x *tree) read() ([]Volume, error) {
	x.Helper()
	text := "21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"
	for i, m := range x.mounts {
		text += fmt.Sprintf("%d 21 0:%d / %s rw,relatime shared:9 - tmpfs tmpfs rw\n", 30+i, i, m)
	}
	x.must(os.MkdirAll(filepath.Join(x.proc, "self"), 0o755))
	x.must(os.WriteFile(filepath.Join(x.proc, "self/mountinfo"), []byte(text), 0o644))
	return Read(x.root, x.proc, 0)
}

// counts returns the numbers, also if a driver is not known.
func counts(all []Volume) map[string]status.Volumes {
	n, _ := perDriver(all)
	return n
}

// unmounted are the expected unmounted volumes, by the end of their Dir.
func (x *tree) unmounted(want ...string) {
	x.Helper()
	all, err := x.read()
	x.must(err)
	var got []string
	for _, v := range all {
		if v.Unmounted() {
			got = append(got, strings.TrimPrefix(v.Dir, x.root+"/"))
		}
	}
	if !slices.Equal(got, want) {
		x.Errorf("found %q, want %q", got, want)
	}
}

func TestVolumesAreCountedForEachDriver(t *testing.T) {
	x := newTree(t)
	for _, v := range []string{"v1", "v2"} {
		x.staged("a.example", v)
	}
	x.published("pod-1", "pv1", "a.example", "v1")
	x.published("pod-2", "pv1", "a.example", "v1")
	x.published("pod-2", "pv2", "a.example", "v2")
	x.published("pod-2", "inline", "b.example", "csi-0123")
	x.block("pv3", "b.example", "v3", "pod-1", "pod-3")
	x.mkdir("pods/pod-4/volumes/kubernetes.io~secret/x")
	x.mkdir("pods/pod-4/volumes/kubernetes.io~csi/not-yet/mount")
	x.write("pods/a-file", "")
	x.unmounted()
	all, err := x.read()
	x.must(err)
	if got, want := counts(all), map[string]status.Volumes{"a.example": {Staged: 2, Published: 3}, "b.example": {Staged: 1, Published: 3}}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	for _, v := range all {
		if age := time.Since(v.Changed); age < 0 || age > time.Hour || v.Mounted == v.Block {
			t.Errorf("%+v", v)
		}
	}
}

// A volume waits until it is mounted for the kubelet, which can have a mount namespace of its own.
// It is late a minute after its directory was made, whatever the kubelet writes again.
func TestWaitingVolumes(t *testing.T) {
	x := newTree(t)
	dir := x.published("pod-1", "pv", "a.example", "v")
	mounted := x.mounts[0]
	x.mounts = nil
	for name, c := range map[string]struct {
		kubelet string // its mount
		age     time.Duration
		want    status.Volumes
	}{
		"new":              {"/", 0, status.Volumes{Waiting: 1}},
		"just below":       {"/", 50 * time.Second, status.Volumes{Waiting: 1}},
		"late":             {"/", time.Minute, status.Volumes{Waiting: 1, Late: 1}},
		"in the kubelet's": {mounted, time.Hour, status.Volumes{Published: 1}},
	} {
		x.must(os.MkdirAll(filepath.Join(x.proc, "812"), 0o755))
		x.must(os.WriteFile(filepath.Join(x.proc, "812/mountinfo"), []byte("40 21 0:9 / "+c.kubelet+" rw - tmpfs tmpfs rw\n"), 0o644))
		x.write(dir+"/vol_data.json", data("a.example", "v"))
		at := time.Now().Add(-c.age)
		x.must(os.Chtimes(filepath.Join(x.root, dir), at, at))
		_, err := x.read() // writes the mounts of this process
		x.must(err)
		all, err := Read(x.root, x.proc, 812)
		x.must(err)
		if got := counts(all)["a.example"]; got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}

// Damaged files count for the driver that can still be read from them, or that the directory of a
// staged volume is named after.
func TestDamagedFiles(t *testing.T) {
	x := newTree(t)
	x.staged("a.example", "used")
	x.staged("a.example", "left")
	x.staged("b.example", "used")
	for _, pv := range []string{"used", "no data", "empty", "torn", "types"} {
		x.published("pod-1", pv, "a.example", "used")
	}
	x.published("pod-1", "handle", "a.example", "")
	x.staged("a.example", "empty")
	x.block("block", "a.example", "block")
	pods := "pods/pod-1/volumes/kubernetes.io~csi/"
	x.write(pods+"gone/vol_data.json", data("a.example", "used"))
	x.mount("pods/pod-1/volumes/kubernetes.io~projected/token")
	x.must(os.Remove(filepath.Join(x.root, pods, "no data/vol_data.json")))
	x.write(pods+"empty/vol_data.json", "")
	x.write("plugins/kubernetes.io/csi/a.example/hash-of-empty/vol_data.json", "")
	x.write(pods+"torn/vol_data.json", `{"driverName":"a.example","volumeHa`)
	x.write(pods+"types/vol_data.json", `{"driverName":"a.example","volumeHandle":"used","x":1}`)
	x.mkdir("plugins/kubernetes.io/csi/b.example/hash-of-nothing/globalmount")
	x.write("plugins/kubernetes.io/csi/b.example/hash-of-unmounted/vol_data.json", "")
	x.unmounted("pods/pod-1/volumes/kubernetes.io~csi/gone")
	all, err := x.read()
	x.must(err)
	if got, want := counts(all), map[string]status.Volumes{"a.example": {Staged: 4, Published: 3, Waiting: 1}, "b.example": {Staged: 1}}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestAFileThatCannotBeRead checks that Read, and so Count, names a vol_data.json that is there and
// cannot be read: the volume can be any driver's.
func TestAFileThatCannotBeRead(t *testing.T) {
	for what, damage := range map[string]func(x *tree, file string){
		"large": func(x *tree, file string) { x.write(file, data("a.example", strings.Repeat("x", maxData))) },
		"fifo": func(x *tree, file string) {
			x.must(os.Remove(filepath.Join(x.root, file)))
			x.must(unix.Mkfifo(filepath.Join(x.root, file), 0o644))
		},
		"link": func(x *tree, file string) {
			x.must(os.Remove(filepath.Join(x.root, file)))
			x.must(os.Symlink(filepath.Base(file), filepath.Join(x.root, file)))
		},
	} {
		x := newTree(t)
		for _, dir := range []string{x.published("pod-1", "pv", "a.example", "v"), x.staged("a.example", "v")} {
			x.write(dir+"/vol_data.json", data("a.example", "v"))
			damage(x, dir+"/vol_data.json")
			if all, err := x.read(); err == nil || !strings.Contains(err.Error(), filepath.Join(x.root, dir, "vol_data.json")) || len(all) == 0 {
				t.Errorf("%s: %v (%v)", what, all, err)
			}
			x.must(os.Remove(filepath.Join(x.root, dir, "vol_data.json")))
		}
	}
}

// TestVolumesOfAnUnknownDriver checks that Count is an error with the path while something is
// mounted for a pod and no driver is known: that driver must stay registered. Without a mount, as
// after a power cut that emptied the file, nothing is left to unmount.
func TestVolumesOfAnUnknownDriver(t *testing.T) {
	x := newTree(t)
	x.published("pod-1", "pv", "a.example", "v")
	dir := x.published("pod-2", "pv", "a.example", "v")
	count := func() (map[string]status.Volumes, error) {
		all, err := x.read()
		x.must(err)
		return perDriver(all)
	}
	for text, known := range map[string]bool{data("a.example", "v"): true, "": false, "{}": false, `{"driverNa`: false} {
		x.write(dir+"/vol_data.json", text)
		got, err := count()
		if (err == nil) != known || !known && !strings.Contains(err.Error(), filepath.Join(x.root, dir, "vol_data.json")) {
			t.Errorf("%q: %v", text, err)
		}
		if got["a.example"].Published == 0 || len(got) != 1 {
			t.Errorf("%q: %v", text, got)
		}
	}
	x.must(os.Remove(filepath.Join(x.root, dir, "vol_data.json")))
	if _, err := count(); err == nil {
		t.Error("mounted, and no file")
	}
	x.write(dir+"/vol_data.json", "")
	x.mounts = x.mounts[:1]
	if got, err := count(); err != nil || got["a.example"].Published != 1 {
		t.Errorf("not mounted: %v, %v", got, err)
	}
}

// registrar serves a driver.
type registrar struct {
	registerapi.UnimplementedRegistrationServer
	driver string
}

func (r registrar) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{Type: registerapi.CSIPlugin, Name: r.driver}, nil
}

// TestDropRegistered checks that a driver is registered by a registrar that listens, also if it is
// busy, and by no file that one has left.
func TestDropRegistered(t *testing.T) {
	dir := fake.ShortDir(t)
	listen := func(name string) *net.UnixListener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: filepath.Join(dir, name)})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		t.Cleanup(func() { l.Close() })
		return l
	}
	serve := func(name, driver string) {
		s := grpc.NewServer()
		registerapi.RegisterRegistrationServer(s, registrar{driver: driver})
		served, l := make(chan error, 1), listen(name)
		go func() { served <- s.Serve(l) }()
		t.Cleanup(func() { s.Stop(); <-served })
	}
	serve("a.example-reg.sock", "a.example")
	serve("other-name.sock", "b.example")
	listen("busy.example-reg.sock")
	listen("killed.example-reg.sock").Close()
	serve("renamed.example-reg.sock", "a.example")
	if err := os.Symlink("nothing", filepath.Join(dir, "moved.example-reg.sock")); err != nil {
		t.Fatal(err)
	}
	counts := map[string]status.Volumes{}
	for _, name := range []string{"a", "b", "busy", "killed", "renamed", "moved", "nobody"} {
		counts[name+".example"] = status.Volumes{Staged: 1}
	}
	if err := DropRegistered(t.Context(), worker.NewPool(), dir, counts); err != nil {
		t.Error(err)
	}
	if got, want := slices.Sorted(maps.Keys(counts)), []string{"killed.example", "moved.example", "nobody.example", "renamed.example"}; !slices.Equal(got, want) {
		t.Errorf("nobody registers %q, want %q", got, want)
	}
}

// The kubelet decodes the first value of the file, whatever follows.
func TestReadsTheFileAsTheKubeletDoes(t *testing.T) {
	x := newTree(t)
	dir := x.published("pod-1", "pv", "a.example", "v")
	x.write(dir+"/vol_data.json", data("a.example", "v")+"}garbage")
	x.unmounted()
}

func TestNothingToRead(t *testing.T) {
	x := newTree(t)
	x.must(os.RemoveAll(x.root))
	x.unmounted()
}

// The two top directories may be links. The kubelet creates none in them; one that leads out of
// them is an error.
func TestLinks(t *testing.T) {
	x := newTree(t)
	x.published("pod-1", "pv", "a.example", "v")
	elsewhere := t.TempDir() + "/pods"
	x.must(os.Rename(x.root+"/pods", elsewhere))
	x.must(os.Symlink(elsewhere, x.root+"/pods"))
	x.mounts = []string{elsewhere + "/pod-1/volumes/kubernetes.io~csi/pv/mount"}
	x.unmounted()
	if all, err := x.read(); err != nil || len(all) != 1 {
		t.Errorf("%+v (%v), want one volume", all, err)
	}
	outside := t.TempDir()
	x.must(os.Rename(elsewhere+"/pod-1", outside+"/pod-1"))
	x.must(os.Symlink(outside+"/pod-1", elsewhere+"/pod-1"))
	if all, err := x.read(); err == nil || len(all) != 0 {
		t.Errorf("%+v (%v), want an error", all, err)
	}
}

func TestWhatCannotBeReadIsAnError(t *testing.T) {
	x := newTree(t)
	x.published("pod-1", "pv", "a.example", "v")
	x.staged("a.example", "v")
	if _, err := Read(x.root, "/nowhere", 0); err == nil {
		t.Error("no mountinfo is no error")
	}
	r := &reader{left: 1, mounts: map[string]bool{}}
	r.within(x.root+"/pods", r.pods)
	if r.err == nil || !strings.Contains(r.err.Error(), "more than") {
		t.Errorf("too many names are %v", r.err)
	}
}

// A mount whose server is gone is not touched, whether it is a volume's or in an unexpected place.
func TestMountsThatHang(t *testing.T) {
	x := newTree(t)
	x.staged("a.example", "v")
	x.block("pv", "c.example", "v", "pod-1")
	for _, dir := range []string{
		x.published("pod-1", "pv", "a.example", "v") + "/mount",
		"pods/pod-2/volumes/kubernetes.io~csi/wrong",
		"pods/pod-3",
		"plugins/kubernetes.io/csi/b.example",
		"plugins/kubernetes.io/csi/volumeDevices/staging/pv",
	} {
		x.mkdir(dir)
		h, err := fake.MountHangFS(filepath.Join(x.root, dir))
		if err != nil {
			t.Skip(err)
		}
		t.Cleanup(func() { x.must(h.Close()) })
		x.must(h.Hang())
	}
	done := make(chan error, 1)
	go func() {
		all, err := Read(x.root, "/proc", 0)
		if want := map[string]status.Volumes{"a.example": {Staged: 1, Published: 1}, "c.example": {Staged: 1, Published: 1}}; err == nil && !reflect.DeepEqual(counts(all), want) {
			err = fmt.Errorf("counted %v, want %v", counts(all), want)
		}
		for _, v := range all {
			if v.Unmounted() {
				err = fmt.Errorf("%+v is mounted", v)
			}
		}
		done <- err
	}()
	select {
	case err := <-done:
		x.must(err)
	case <-time.After(time.Minute):
		t.Error("it blocks")
	}
}

// FuzzVolData checks that whatever a vol_data.json has is counted for at most one driver, and that
// a file as the kubelet writes it is counted for its driver.
func FuzzVolData(f *testing.F) {
	f.Add(data("a.example", "v"), true)
	f.Add(`{"driverName":"a.example"}{"driverName":"b.example"}`, false)
	f.Add("null", true)
	f.Fuzz(func(t *testing.T, text string, mounted bool) {
		x := newTree(t)
		dir := x.published("pod-1", "pv", "a.example", "v")
		x.write(dir+"/vol_data.json", text)
		if !mounted {
			x.mounts = nil
		}
		all, err := x.read()
		if (err != nil) != (len(text) > maxData) || len(all) > 1 || mounted && len(all) != 1 {
			t.Fatalf("%d volumes, %v", len(all), err)
		}
		counts, err := perDriver(all)
		if len(counts) > 1 || counts[""] != (status.Volumes{}) || (err != nil) != (mounted && len(counts) == 0) {
			t.Errorf("%v, %v", counts, err)
		}
		var kubelets map[string]string
		if json.Unmarshal([]byte(text), &kubelets) == nil && len(text) <= maxData && kubelets["driverName"] != "" {
			if n := counts[kubelets["driverName"]]; n.Published+n.Waiting != 1 || n.InUse() != 1 || mounted != (n.Published == 1) {
				t.Errorf("%v, want one of %q", counts, kubelets["driverName"])
			}
		}
	})
}
