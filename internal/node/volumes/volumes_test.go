package volumes

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/test/fake"
	"csi-registrar/internal/node/status"
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
	return Read(x.root, x.proc)
}

// problems are the expected problems by the end of their Dir.
func (x *tree) problems(want map[string]Problem) {
	x.Helper()
	all, err := x.read()
	x.must(err)
	got := map[string]Problem{}
	for _, v := range all {
		if v.Problem != "" {
			got[strings.TrimPrefix(v.Dir, x.root+"/")] = v.Problem
		}
	}
	if !reflect.DeepEqual(got, want) {
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
	x.problems(map[string]Problem{})
	all, err := x.read()
	x.must(err)
	if got, want := perDriver(all), map[string]status.Volumes{"a.example": {Staged: 2, Published: 3}, "b.example": {Staged: 1, Published: 3}}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	for _, v := range all {
		if age := time.Since(v.Changed); age < 0 || age > time.Hour || v.Mounted == v.Block {
			t.Errorf("%+v", v)
		}
	}
}

func TestProblemsOfVolumes(t *testing.T) {
	x := newTree(t)
	x.staged("a.example", "used")
	x.published("pod-1", "used", "a.example", "used")
	want := map[string]Problem{
		x.staged("a.example", "left"):                        Unused,
		x.staged("b.example", "used"):                        Unused, // that of another driver
		"plugins/kubernetes.io/csi/volumeDevices/block/data": Unused,
		"pods/pod-1/volumes/kubernetes.io~csi/gone":          Unmounted,
		x.published("pod-1", "no data", "a.example", "used"): NoData,
		x.published("pod-1", "empty", "a.example", "used"):   Broken,
		x.published("pod-1", "torn", "a.example", "used"):    Broken,
		x.published("pod-1", "types", "a.example", "used"):   Broken,
		x.published("pod-1", "large", "a.example", "used"):   Broken,
		x.published("pod-1", "fifo", "a.example", "used"):    Broken,
		x.published("pod-1", "handle", "a.example", ""):      Broken,
		x.staged("a.example", "empty"):                       Broken,
	}
	x.block("block", "a.example", "block")
	pods := "pods/pod-1/volumes/kubernetes.io~csi/"
	x.write(pods+"gone/vol_data.json", data("a.example", "used"))
	x.mount("pods/pod-1/volumes/kubernetes.io~projected/token")
	x.must(os.Remove(filepath.Join(x.root, pods, "no data/vol_data.json")))
	x.write(pods+"empty/vol_data.json", "")
	x.write("plugins/kubernetes.io/csi/a.example/hash-of-empty/vol_data.json", "")
	x.write(pods+"torn/vol_data.json", `{"driverName":"a.example","volumeHa`)
	x.write(pods+"types/vol_data.json", `{"driverName":"a.example","volumeHandle":"used","x":1}`)
	x.write(pods+"large/vol_data.json", data("a.example", strings.Repeat("x", maxData)))
	x.must(os.Remove(filepath.Join(x.root, pods, "fifo/vol_data.json")))
	x.must(unix.Mkfifo(filepath.Join(x.root, pods, "fifo/vol_data.json"), 0o644))
	x.problems(want)
	all, err := x.read()
	x.must(err)
	if got, want := perDriver(all), map[string]status.Volumes{"a.example": {Staged: 3, Published: 4}, "b.example": {Staged: 1, Published: 0}}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// The kubelet decodes the first value of the file, whatever follows.
func TestReadsTheFileAsTheKubeletDoes(t *testing.T) {
	x := newTree(t)
	dir := x.published("pod-1", "pv", "a.example", "v")
	x.write(dir+"/vol_data.json", data("a.example", "v")+"}garbage")
	x.problems(map[string]Problem{})
}

func TestNothingToRead(t *testing.T) {
	x := newTree(t)
	x.must(os.RemoveAll(x.root))
	x.problems(map[string]Problem{})
}

// Only the two top directories may be links; the kubelet creates none in them.
func TestLinks(t *testing.T) {
	x := newTree(t)
	x.published("pod-1", "pv", "a.example", "v")
	x.must(os.Symlink("pod-1", filepath.Join(x.root, "pods/pod-2")))
	elsewhere := t.TempDir() + "/pods"
	x.must(os.Rename(x.root+"/pods", elsewhere))
	x.must(os.Symlink(elsewhere, x.root+"/pods"))
	x.mounts = []string{elsewhere + "/pod-1/volumes/kubernetes.io~csi/pv/mount"}
	x.problems(map[string]Problem{})
	if all, err := x.read(); err != nil || len(all) != 1 {
		t.Errorf("%+v (%v), want one volume", all, err)
	}
}

func TestWhatCannotBeReadIsAnError(t *testing.T) {
	x := newTree(t)
	x.published("pod-1", "pv", "a.example", "v")
	x.staged("a.example", "v")
	if _, err := Read(x.root, "/nowhere"); err == nil {
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
		all, err := Read(x.root, "/proc")
		if want := map[string]status.Volumes{"a.example": {Staged: 1, Published: 1}, "c.example": {Staged: 1, Published: 1}}; err == nil && !reflect.DeepEqual(perDriver(all), want) {
			err = fmt.Errorf("counted %v, want %v", perDriver(all), want)
		}
		for _, v := range all {
			if v.Problem != "" {
				err = fmt.Errorf("%+v has no problem", v)
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
