package doctor

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"csi-registrar/internal/worker"

	"golang.org/x/sys/unix"
)

// Where the kubelet's root directory is, for each of its flavours.
func TestKubelets(t *testing.T) {
	for _, test := range []struct {
		what                string
		procs               []string // command lines; the first word of one may be "comm:" and the program's name
		files               map[string]string
		flavour, root, from string
		restart             string
	}{
		{"plain", []string{"/usr/bin/kubelet --config=/x.yaml"}, nil,
			"kubelet", "/var/lib/kubelet", "its default", "systemctl restart kubelet.service"},
		{"flag", []string{"/usr/bin/kubelet --root-dir=/data/kubelet/ --v=2"}, nil,
			"kubelet", "/data/kubelet", "its --root-dir", "systemctl restart kubelet.service"},
		{"flag with its value apart, the last one counts", []string{"kubelet -root-dir=/a --root-dir /b"}, nil,
			"kubelet", "/b", "its --root-dir", "systemctl restart kubelet.service"},
		{"k0s is found by its child", []string{"/usr/local/bin/k0s worker --data-dir=/x", "/x/bin/kubelet --root-dir=/x/kubelet"}, nil,
			"kubelet", "/x/kubelet", "its --root-dir", "systemctl restart kubelet.service"},
		{"k0s alone", []string{"/usr/local/bin/k0s worker --data-dir=/x"}, nil,
			"k0s", "/x/kubelet", "its --data-dir", "systemctl restart k0sworker.service"},
		{"k0s by default", []string{"k0s controller --enable-worker"}, nil,
			"k0s", "/var/lib/k0s/kubelet", "k0s' default", "systemctl restart k0sworker.service"},
		{"k0s with a flag of its own", []string{"k0s worker --kubelet-root-dir=/y --data-dir=/x"}, nil,
			"k0s", "/y", "its --kubelet-root-dir", "systemctl restart k0sworker.service"},
		{"k0s controller has none", []string{"k0s controller"}, nil, "", "", "", ""},
		{"k3s", []string{"comm:k3s-server /usr/local/bin/k3s server"}, nil,
			"k3s", "/var/lib/kubelet", "its default", "systemctl restart k3s.service"},
		{"k3s agent by its file", []string{"comm:k3s-agent /usr/local/bin/k3s agent"},
			map[string]string{"etc/rancher/k3s/config.yaml": "token: x\nkubelet-arg:\n  - v=2\n  - root-dir=/data/k\n"},
			"k3s", "/data/k", "/etc/rancher/k3s/config.yaml", "systemctl restart k3s-agent.service"},
		{"k3s by a later file", []string{"comm:k3s-agent /usr/local/bin/k3s agent"},
			map[string]string{"etc/rancher/k3s/config.yaml": "kubelet-arg: root-dir=/a\n", "etc/rancher/k3s/config.yaml.d/10.yaml": "kubelet-arg+: [--root-dir=/b]\n"},
			"k3s", "/b", "/etc/rancher/k3s/config.yaml.d/10.yaml", "systemctl restart k3s-agent.service"},
		{"k3s by flag", []string{"comm:k3s-agent k3s agent --kubelet-arg v=2 --kubelet-arg root-dir=/c"}, nil,
			"k3s", "/c", "its --kubelet-arg", "systemctl restart k3s-agent.service"},
		{"k3s without an agent", []string{"comm:k3s-server k3s server --disable-agent"}, nil, "", "", "", ""},
		{"k3s' kubectl is none", []string{"k3s kubectl get nodes"}, nil, "", "", "", ""},
		{"rke2 is found by its child", []string{"/usr/local/bin/rke2 agent", "/var/lib/rancher/rke2/bin/kubelet --root-dir=/r"}, nil,
			"kubelet", "/r", "its --root-dir", "systemctl restart kubelet.service"},
		{"rke2 alone", []string{"/usr/local/bin/rke2 agent"}, map[string]string{"etc/rancher/rke2/config.yaml": "kubelet-arg: [root-dir=/r]\n"},
			"rke2", "/r", "/etc/rancher/rke2/config.yaml", "systemctl restart rke2-agent.service"},
		{"microk8s", []string{"/snap/microk8s/1/kubelite --kubelet-args-file=/var/snap/microk8s/1/args/kubelet --start-control-plane=true"},
			map[string]string{"var/snap/microk8s/1/args/kubelet": "--kubeconfig=${SNAP_DATA}/credentials/kubelet.config\n--root-dir=${SNAP_COMMON}/var/lib/kubelet\n"},
			"microk8s", "/var/snap/microk8s/common/var/lib/kubelet", "/var/snap/microk8s/1/args/kubelet", "snap restart microk8s.daemon-kubelite"},
		{"microk8s without its file", []string{"/snap/microk8s/1/kubelite"}, nil,
			"microk8s", "/var/snap/microk8s/common/var/lib/kubelet", "microk8s' default", "snap restart microk8s.daemon-kubelite"},
		{"relative", []string{"kubelet --root-dir=k"}, nil, "kubelet", "", "its --root-dir k, which is not absolute", "systemctl restart kubelet.service"},
		{"none", []string{"/usr/bin/kubectl proxy", "vi kubelet"}, nil, "", "", "", ""},
	} {
		t.Run(test.what, func(t *testing.T) {
			n := node{t: t, root: t.TempDir()}
			for i, line := range test.procs {
				args := strings.Fields(line)
				comm := filepath.Base(args[0])
				if c, ok := strings.CutPrefix(args[0], "comm:"); ok {
					comm, args = c, args[1:]
				}
				n.process(200+i, comm, "0::/", args...)
			}
			for file, content := range test.files {
				n.write(file, content)
			}
			x := &diagnosis{o: Options{Root: n.root}, pool: worker.NewPool()}
			all, seen := x.processes(t.Context())
			if seen {
				t.Error("init is seen, and is not there")
			}
			found, _ := x.findKubelets(t.Context(), all)
			if test.flavour == "" {
				if len(found) != 0 {
					t.Errorf("found %+v", found)
				}
				return
			}
			if len(found) != 1 {
				t.Fatalf("found %+v", found)
			}
			k := found[0]
			if k.flavour != test.flavour || k.rootDir != test.root || k.from != test.from {
				t.Errorf("%s, %s, %s", k.flavour, k.rootDir, k.from)
			}
			if got := k.restart().String(); got != test.restart {
				t.Errorf("restart with %q", got)
			}
		})
	}
}

// A link to our directory is our directory; so is a path to it as the kubelet sees it.
func TestSameRootByOtherPaths(t *testing.T) {
	n := newNode(t)
	if err := os.Symlink(n.rootDir, n.path("link")); err != nil {
		t.Fatal(err)
	}
	n.startKubelet("/usr/bin/kubelet", "--root-dir="+n.path("link"))
	if err := os.Symlink("/", n.path("proc/812/root")); err != nil {
		t.Fatal(err)
	}
	if r := n.examine(); len(r.Findings) != 0 {
		t.Errorf("%+v", r.Findings)
	}
}

// A kubelet in a container of this machine has the same path, but another directory.
func TestKubeletsInContainersAreOthers(t *testing.T) {
	n := newNode(t)
	n.startKubelet("/usr/bin/kubelet", "--root-dir="+n.rootDir)
	if err := os.Symlink("/", n.path("proc/812/root")); err != nil {
		t.Fatal(err)
	}
	container := n.path("container")
	n.mkdir(filepath.Join(container, n.rootDir, "plugins_registry"), 0o750)
	for _, pid := range []string{"700", "900"} { // found before and after ours
		number, _ := strconv.Atoi(pid)
		n.process(number, "kubelet", "0::/docker/1/kubelet.slice/kubelet.service", "/usr/bin/kubelet", "--root-dir="+n.rootDir)
		n.write("proc/"+pid+"/fdinfo/9", inotifyLine(t, filepath.Join(container, n.rootDir, "plugins_registry")))
		if err := os.Symlink(container, n.path("proc", pid, "root")); err != nil {
			t.Fatal(err)
		}
	}
	if r := n.examine(); len(r.Findings) != 0 {
		t.Errorf("%+v", r.Findings)
	}
}

func TestUnitOf(t *testing.T) {
	for cgroup, want := range map[string]string{
		"0::/system.slice/kubelet.service\n":                                          "kubelet.service",
		"0::/system.slice/k3s.service/kubelet\n":                                      "k3s.service",
		"12:pids:/x.service\n1:name=systemd:/system.slice/rke2-agent.service\n0::/\n": "rke2-agent.service",
		"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-0a.scope\n":            "cri-containerd-0a.scope",
		"0::/init.scope\n": "init.scope", "0::/\n": "", "": "", "nonsense\n": "",
	} {
		if got := unitOf(cgroup); got != want {
			t.Errorf("%q: %q, want %q", cgroup, got, want)
		}
	}
}

// The kernel's own words about a real inotify watch are understood.
func TestWatchesOfARealProcess(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	ask := func() watching {
		t.Helper()
		w, err := watches("/proc", os.Getpid(), dir)
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
	// The directory recreated, with another inode: the old watch is no good.
	fresh := t.TempDir()
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(fresh, dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Mkdir(fresh, 0o700) })
	if got := ask(); got != elsewhere {
		t.Errorf("with a watch of the directory that was: %v", got)
	}
	if _, err := watches("/proc", os.Getpid(), filepath.Join(dir, "none")); err == nil {
		t.Error("a directory that does not exist is no error")
	}
}
