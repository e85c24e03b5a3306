package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestFindKubelets(t *testing.T) {
	for _, test := range []struct {
		what         string
		comm, cgroup string
		rootDirs     []string
		root         string // empty: not known
		unknown      string
		restart      string
	}{
		{"plain", "kubelet", "0::/system.slice/kubelet.service", []string{"/var/lib/kubelet"}, "/var/lib/kubelet", "", "kubelet.service"},
		{"a path with spaces", "kubelet", "0::/", []string{"/data/the kubelet"}, "/data/the kubelet", "", "kubelet.service"},
		{"k3s", "k3s-server", "0::/system.slice/k3s.service", []string{"/data"}, "/data", "", "k3s.service"},
		{"rke2's child", "kubelet", "0::/system.slice/rke2-agent.service", []string{"/r"}, "/r", "", "rke2-agent.service"},
		{"microk8s", "kubelite", "0::/system.slice/snap.microk8s.daemon-kubelite.service", []string{"/m"}, "/m", "", "snap.microk8s.daemon-kubelite.service"},
		{"k3s without an agent", "k3s-server", "0::/", nil, "", "does not listen in a directory pod-resources", "kubelet.service"},
		{"a forged line", "kubelet", "0::/", []string{"/var/lib/kubelet", "/forged"}, "", "listens in 2 directories", "kubelet.service"},
	} {
		t.Run(test.what, func(t *testing.T) {
			n := node{t: t, root: t.TempDir()}
			n.process(200, test.comm, test.cgroup)
			n.process(201, "kubectl", "0::/")
			n.listens(200, test.rootDirs...)
			n.listens(201, "/not/a/kubelet")
			x := newDiagnosis(Options{Root: n.root})
			all, seen := x.processes(t.Context())
			if seen {
				t.Error("init does not exist, but is seen")
			}
			found, _, _ := x.findKubelets(t.Context(), all)
			if len(found) != 1 {
				t.Fatalf("found %+v", found)
			}
			k := found[0]
			if k.rootDir != test.root || test.unknown == "" != (k.unknown == nil) || test.unknown != "" && !strings.Contains(k.unknown.Error(), test.unknown) {
				t.Errorf("root directory %q, %v", k.rootDir, k.unknown)
			}
			if got := k.restart().String(); got != "systemctl restart "+test.restart {
				t.Errorf("restart with %q", got)
			}
		})
	}
}

// The socket is renamed after it was bound, as the kubelet does.
func TestRootDirOfARealProcess(t *testing.T) {
	root, err := os.MkdirTemp("/tmp", "the kubelet") // short, wherever TMPDIR points
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	if dir, err := rootDir("/proc/self"); err == nil {
		t.Fatalf("before it listens: %s", dir)
	}
	dir := filepath.Join(root, "pod-resources")
	if err := os.Mkdir(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("unix", filepath.Join(dir, "3141592"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if err := os.Rename(filepath.Join(dir, "3141592"), filepath.Join(dir, "kubelet.sock")); err != nil {
		t.Fatal(err)
	}
	if dir, err := rootDir("/proc/self"); dir != root || err != nil {
		t.Errorf("%s, %v", dir, err)
	}
}

// The kubelet may reach our directory through a link, or from its own view of the file system.
func TestRootDirByAnotherPath(t *testing.T) {
	n := newNode(t)
	if err := os.Symlink(n.rootDir, n.path("link")); err != nil {
		t.Fatal(err)
	}
	n.startKubelet()
	n.listens(812, n.path("link"))
	if err := os.Symlink("/", n.path("proc/812/root")); err != nil {
		t.Fatal(err)
	}
	if r := n.examine(); len(r.Findings) != 0 {
		t.Errorf("%+v", r.Findings)
	}
}

// A kubelet in a container of this machine has the same path, but another directory.
func TestKubeletsInContainersAreIgnored(t *testing.T) {
	n := newNode(t)
	n.startKubelet()
	if err := os.Symlink("/", n.path("proc/812/root")); err != nil {
		t.Fatal(err)
	}
	container := n.path("container")
	n.mkdir(filepath.Join(container, n.rootDir, "plugins_registry"), 0o750)
	for _, pid := range []string{"700", "900"} { // found before and after ours
		number, _ := strconv.Atoi(pid)
		n.process(number, "kubelet", "0::/docker/1/kubelet.slice/kubelet.service")
		n.listens(number, n.rootDir)
		n.write("proc/"+pid+"/fdinfo/9", inotifyLine(t, filepath.Join(container, n.rootDir, "plugins_registry")))
		if err := os.Symlink(container, n.path("proc", pid, "root")); err != nil {
			t.Fatal(err)
		}
	}
	r := n.examine()
	if len(r.Findings) != 0 {
		t.Errorf("%+v", r.Findings)
	}
	var others []string
	for _, c := range r.Checks {
		if c.Step == "kubelet" && c.Result == Skipped {
			others = append(others, c.Says)
		}
	}
	slices.Sort(others)
	if want := []string{
		"kubelet (pid 700, kubelet.service) has its own root file system and is ignored",
		"kubelet (pid 900, kubelet.service) has its own root file system and is ignored",
	}; !slices.Equal(others, want) {
		t.Errorf("the other kubelets are shown as %q", others)
	}
}

func TestWatchesOfARealProcess(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	ask := func() watching {
		t.Helper()
		w, err := watches("/proc/self", dir)
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	if got := ask(); got != nothing {
		t.Errorf("before any watch: %v", got)
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	watch := func(path string) {
		if _, err := unix.InotifyAddWatch(fd, path, unix.IN_CREATE); err != nil {
			t.Fatal(err)
		}
	}
	watch(other)
	if got := ask(); got != elsewhere {
		t.Errorf("with a watch of another directory: %v", got)
	}
	watch(dir)
	if got := ask(); got != watched {
		t.Errorf("with a watch: %v", got)
	}
	// The directory is recreated with another inode.
	fresh := t.TempDir()
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(fresh, dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Mkdir(fresh, 0o700) })
	if got := ask(); got != elsewhere {
		t.Errorf("with a watch of the deleted directory: %v", got)
	}
	if _, err := watches("/proc/self", filepath.Join(dir, "none")); err == nil {
		t.Error("no error for a directory that does not exist")
	}
}

// A process named kubelet in a pod or in its own root file system must not choose the root_dir that
// doctor recommends.
func TestKubeletsOfOthersDoNotChooseTheRootDirectory(t *testing.T) {
	for what, make := range map[string]func(n *node){
		"in a pod": func(n *node) {
			n.process(700, "kubelet", "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-0a.scope")
		},
		"in a chroot": func(n *node) { n.process(700, "kubelet", "0::/system.slice/kubelet.service") },
	} {
		t.Run(what, func(t *testing.T) {
			n := newNode(t)
			n.remove(n.path("proc/812"))
			make(n)
			chroot := n.path("chroot")
			n.mkdir(filepath.Join(chroot, "evil/plugins_registry"), 0o750)
			if err := os.Symlink(chroot, n.path("proc/700/root")); err != nil {
				t.Fatal(err)
			}
			n.listens(700, "/evil")
			r := n.examine()
			if text := fmt.Sprintf("%+v", r); strings.Contains(text, "evil") {
				t.Error(text)
			}
			if !slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.ID == "no-kubelet" }) {
				t.Errorf("%+v", r.Findings)
			}
		})
	}
}

// A volume that is mounted only in a mount namespace of the kubelet's own is not reported.
func TestVolumeInTheMountNamespaceOfTheKubelet(t *testing.T) {
	n := newNode(t)
	n.volume(volumeOfPod, volData, time.Hour)
	target := n.path("kubelet", volumeOfPod, "mount")
	const root = "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
	n.write("proc/812/mountinfo", root+"30 21 0:1 / "+target+"-other rw - nfs x rw\n")
	if r := n.examine(); len(r.Findings) != 1 || r.Findings[0].ID != "volume-not-mounted" {
		t.Errorf("mounted nowhere: %+v", r.Findings)
	}
	n.write("proc/812/mountinfo", root+"30 21 0:1 / "+target+" rw - nfs x rw\n")
	if r := n.examine(); len(r.Findings) != 0 {
		t.Errorf("mounted where the kubelet sees it: %+v", r.Findings)
	}
}

// kubeadm's packages may be left on a node of k3s.
func TestUnitOfAKubeletThatIsDown(t *testing.T) {
	n := newNode(t)
	n.remove(n.path("proc/812"))
	for _, test := range []struct{ kubelet, k3s, want string }{
		{"", "", "kubelet.service"},
		{"disabled", "enabled", "k3s.service"},
		{"enabled", "enabled", "kubelet.service"},
		{"disabled", "disabled", "kubelet.service"},
		{"", "disabled", "k3s.service"},
	} {
		for unit, state := range map[string]string{"kubelet.service": test.kubelet, "k3s.service": test.k3s} {
			if delete(n.units, unit); state != "" {
				n.units[unit] = map[string]string{"LoadState": "loaded", "UnitFileState": state, "ActiveState": "failed"}
			}
		}
		if fix := lines(n.examine().Findings[0].Fix); !strings.HasPrefix(fix, "systemctl start "+test.want) {
			t.Errorf("%+v: %s", test, fix)
		}
	}
}

// A k3s server without an agent has the name of a kubelet, and no root directory.
func TestKubeletBesideAServerWithoutAgent(t *testing.T) {
	n := newNode(t)
	n.remove(n.path("proc/812"))
	n.process(300, "k3s-server", "0::/system.slice/k3s.service")
	n.listens(300)
	n.process(700, "kubelet", "0::/system.slice/rke2-agent.service")
	n.listens(700, "/var/lib/kubelet")
	if r := n.examine(); len(r.Findings) == 0 || r.Findings[0].ID != "root-dir-mismatch" || !strings.Contains(r.Findings[0].Found, "pid 700") {
		t.Errorf("%+v", r.Findings)
	}
}

// The kubelet moves itself into the cgroup that kubeletCgroups names: on k0s
// /system.slice/containerd.service.
func TestUnitOfAKubeletThatLeftItsCgroup(t *testing.T) {
	n := newNode(t)
	for _, test := range []struct{ cgroup, parent, mainPID, want string }{
		{"/system.slice/containerd.service", "0::/system.slice/k0sworker.service", "", "k0sworker.service"},
		{"/system.slice/containerd.service", "", "812", "kubelet.service"},
		{"/podruntime", "", "812", "kubelet.service"},
		{"/system.slice/k3s-second.service", "", "", "k3s-second.service"},
		// RKE1's kubelet is in a container: its parent is a shim.
		{"/system.slice/docker-0a1b.scope", "0::/system.slice/containerd.service", "", "docker-0a1b.scope"},
		{"/system.slice/k0sworker.service", "0::/user.slice/x.service", "", "k0sworker.service"},
	} {
		n.process(812, "kubelet", "0::"+test.cgroup)
		n.units["kubelet.service"] = map[string]string{"LoadState": "loaded", "MainPID": test.mainPID}
		if test.parent != "" {
			n.process(700, "k0s", test.parent)
			n.write("proc/812/status", "PPid:\t700\nUid:\t0\t0\t0\t0\n")
		}
		want := "kubelet (pid 812, " + test.want + "), root directory "
		if r := n.examine(); !slices.ContainsFunc(r.Checks, func(c Check) bool { return strings.HasPrefix(c.Says, want) }) {
			t.Errorf("%+v: %+v", test, r.Checks)
		}
	}
}

// The kubelet of a node in a container, as of kind, is no second kubelet.
func TestKubeletInAContainer(t *testing.T) {
	n := newNode(t)
	n.process(900, "kubelet", "0::/system.slice/x.scope")
	n.listens(900, n.rootDir)
	for pid, root := range map[int]string{812: n.root, 900: n.path("container")} {
		n.rooted(pid, root)
		own := filepath.Join(root, n.rootDir)
		if err := errors.Join(os.MkdirAll(filepath.Dir(own), 0o755), os.Symlink(n.rootDir, own)); err != nil {
			t.Fatal(err)
		}
	}
	r := n.examine()
	ignored := func(c Check) bool {
		return c.Step == "kubelet" && c.Result == Skipped && strings.HasPrefix(c.Says, "another kubelet is ignored: kubelet (pid 900,")
	}
	if len(r.Findings) > 0 || !slices.ContainsFunc(r.Checks, ignored) {
		t.Errorf("%+v", r)
	}
}

// hangingSystemd does not answer, and counts how often it was asked.
type hangingSystemd struct{ asked *int }

func (h hangingSystemd) Show(context.Context, string, ...string) (map[string]string, error) {
	*h.asked++
	return nil, errors.New("systemctl does not answer")
}

func (hangingSystemd) Journal(context.Context, string, ...string) []string { return nil }

// Each question takes Systemctl its time limit, so doctor does not ask about every known unit.
func TestHangingSystemdIsNotAskedForEachKubeletUnit(t *testing.T) {
	for what, breaks := range map[string]func(n *node){
		"no kubelet":            func(n *node) { n.remove(n.path("proc/812")) },
		"kubelet left its unit": func(n *node) { n.process(812, "kubelet", "0::/podruntime") },
	} {
		t.Run(what, func(t *testing.T) {
			n := newNode(t)
			breaks(n)
			asked := 0
			Run(t.Context(), Options{Source: n.source(), Units: hangingSystemd{&asked}, Root: n.root})
			if asked > 4 {
				t.Errorf("asked %d times", asked)
			}
		})
	}
}
