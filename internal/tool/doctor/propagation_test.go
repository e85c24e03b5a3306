package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// mounts writes the mounts of a process. In a line, ROOT is the kubelet's root directory.
func (n *node) mounts(pid int, lines ...string) {
	n.t.Helper()
	text := "21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n" + strings.Join(lines, "\n") + "\n"
	n.write(fmt.Sprintf("proc/%d/mountinfo", pid), strings.ReplaceAll(text, "ROOT", n.rootDir))
	n.mkdir(n.path(fmt.Sprintf("proc/%d/ns", pid)), 0o755)
	ns := n.path(fmt.Sprintf("proc/%d/ns/mnt", pid))
	n.remove(ns)
	if err := os.Symlink(fmt.Sprintf("mnt:[%d]", pid), ns); err != nil {
		n.t.Fatal(err)
	}
}

// rooted gives a process a root directory.
func (n *node) rooted(pid int, dir string) {
	n.t.Helper()
	link := n.path(fmt.Sprintf("proc/%d/root", pid))
	n.remove(link)
	if err := os.Symlink(dir, link); err != nil {
		n.t.Fatal(err)
	}
}

// A volume is reported if the driver has its mount and the kubelet does not, or if a pod has the
// directory below the mount. Each line is one of mountinfo.
func TestMisplacedVolumes(t *testing.T) {
	const (
		mount  = "90 21 0:40 / ROOT/" + volumeOfPod + "/mount rw shared:7 - tmpfs tmpfs rw"
		inPod  = "95 80 0:40 / /data rw - tmpfs tmpfs rw"
		below  = "95 80 8:1 ROOT/" + volumeOfPod + "/mount /data rw - ext4 /dev/sda1 rw"
		self   = "90 21 8:1 ROOT/" + volumeOfPod + "/mount ROOT/" + volumeOfPod + "/mount rw shared:7 - ext4 /dev/sda1 rw"
		staged = "plugins/kubernetes.io/csi/" + name + "/0a1b"
	)
	for what, c := range map[string]struct {
		driver, kubelet, pod string
		host                 bool // it is mounted for doctor
		found                string
		fix                  string // in its order
	}{
		"healthy":                            {mount, mount, inPod, true, "", ""},
		"no mount yet":                       {"", "", "", false, "", ""},
		"only the driver has it":             {mount, "", "", false, "pod shop/db, 0 bytes in 0 files", "systemctl stop kubelet.service|mv --backup=numbered|systemctl start kubelet.service|# where kubectl works: kubectl -n shop delete pod db, then copy /var/lib/csi-saved/0123/pv into"},
		"and a pod writes":                   {mount, "", below, false, "pod shop/db, 6 bytes in 2 files", "systemctl stop kubelet.service|# end the container of process 900, which only the kubelet starts again|kill 900|timeout 30 tail --pid=900 -f /dev/null|kill -KILL 900|mkdir -p -m 700 /var/lib/csi-saved/0123/pv|--backup=numbered|mkdir -p -m 750"},
		"nobody has it, and a pod writes":    {"", "", below, false, "6 bytes in 2 files", "systemctl stop kubelet.service|end the container|mv --backup=numbered|systemctl start"},
		"repaired, and the pod runs on":      {mount, mount, below, true, "6 bytes in 2 files", "end the container|umount |mv --backup=numbered|systemctl start"},
		"saved, and the pod runs on":         {mount, mount, "95 80 8:1 " + saved + "/0123/pv/mount /data rw - ext4 /dev/sda1 rw", true, "6 bytes in 2 files", "kill 900|systemctl start"},
		"another pod's, saved":               {mount, mount, "95 80 8:1 " + saved + "/0124/pv/mount /data rw - ext4 /dev/sda1 rw", true, "", ""},
		"by subPath":                         {mount, mount, strings.Replace(below, "/mount /data", "/mount/sub /data", 1), true, "6 bytes in 2 files", "umount "},
		"the kubelet's mount of a subPath":   {"", "", strings.Replace(below, "/data", "ROOT/pods/x/volume-subpaths/pv/c/0", 1), false, "", ""},
		"a pod with another volume":          {mount, mount, strings.Replace(below, "/mount /data", "x/mount /data", 1), true, "", ""},
		"a pod with all pods of the node":    {mount, mount, "95 80 8:1 ROOT/pods /host rw - ext4 /dev/sda1 rw", true, "", ""},
		"mounted on itself":                  {self, self, below, true, "", ""},
		"mounted on itself by the driver":    {self, "", "", false, "pod shop/db", ""},
		"by nsenter":                         {"", mount, inPod, true, "", ""},
		"where only the kubelet sees it":     {"", mount, inPod, false, "", ""},
		"the kubelet at another path":        {mount, strings.Replace(mount, "ROOT", "/var/snap/x", 1), inPod, false, "", ""},
		"staged, and only the driver has it": {"90 21 0:40 / ROOT/" + staged + "/globalmount rw - tmpfs tmpfs rw", mount, inPod, true, staged, ""},
	} {
		t.Run(what, func(t *testing.T) {
			n := newNode(t)
			n.volume(volumeOfPod, volData, 0)
			if strings.Contains(c.found, staged) {
				n.volume(staged, volData, 0)
			}
			n.mkdir(n.path("kubelet", volumeOfPod, "mount"), 0o750)
			if c.host {
				n.mounted(volumeOfPod + "/mount")
			}
			n.mkdir(n.path("var/log/pods/shop_db_"+strings.Split(volumeOfPod, "/")[1]), 0o755)
			n.process(os.Getpid(), "driver", "0::/system.slice/csi-nfs.service")
			n.mounts(os.Getpid(), c.driver)
			n.mounts(812, c.kubelet)
			n.process(900, "app", "0::/system.slice/x.scope")
			n.mounts(900, c.pod)
			n.write("container/data/a", "abc")
			n.write("container/data/b/c", "def")
			n.rooted(900, n.path("container"))
			r := n.examine()
			f, ok := finding(r, "volume-misplaced")
			if ok != (c.found != "") || r.Healthy == ok || !strings.Contains(f.Found, c.found) {
				t.Fatalf("%+v, want %q", r.Findings, c.found)
			}
			for _, other := range r.Findings {
				if other.ID != "volume-misplaced" {
					t.Errorf("%+v", other)
				}
			}
			rest, order := lines(f.Fix), strings.Split(c.fix, "|")
			for _, step := range order {
				i := strings.Index(rest, step)
				if i < 0 {
					t.Fatalf("no %q, in this order, in\n%s", step, lines(f.Fix))
				}
				rest = rest[i:]
			}
			if strings.Contains(lines(f.Fix), "umount") != (c.host && c.fix != "" && !strings.Contains(c.pod, saved)) {
				t.Errorf("it is mounted: %v, the fix is\n%s", c.host, lines(f.Fix))
			}
		})
	}
}

// A driver that does not have the kubelet's directory is a warning as long as none of its volumes
// is mounted.
func TestMountsThatDoNotReachTheKubelet(t *testing.T) {
	for what, c := range map[string]struct {
		group    string // of the driver's process
		root     string // its root directory
		settings string // of its unit
		runtime  string // root directory of the runtime
		found    string
		fix      string
	}{
		"same":               {"/system.slice/csi-nfs.service", "", "", "", "", ""},
		"a pod without":      {"/kubepods.slice/kubepods-pod0f9e8d7c_1111_2222_3333_444455556666.slice/cri-containerd-" + strings.Repeat("ab", 32) + ".scope", "empty", "", "", "has no ", "mountPropagation: Bidirectional"},
		"a pod with another": {"/kubepods.slice/kubepods-pod0f9e8d7c_1111_2222_3333_444455556666.slice/cri-containerd-" + strings.Repeat("ab", 32) + ".scope", "other", "", "", "has another directory than the kubelet at ", "mountPropagation: Bidirectional"},
		"a Quadlet":          {"/system.slice/csi-nfs.service", "empty", "", "", "has no ", ":rshared"},
		"a unit":             {"/system.slice/csi-nfs.service", "other", "PrivateTmp=yes", "", "PrivateTmp=yes in /etc/systemd/system/csi-nfs.service.d/x.conf", "PrivateTmp=no"},
		"nothing is known":   {"/user.slice/x", "empty", "", "", "has no ", ""},
		// it can be one of another kubelet
		"the runtime without":       {"/system.slice/csi-nfs.service", "", "", "empty", "", ""},
		"the runtime with another":  {"/system.slice/csi-nfs.service", "", "", "other", "containerd (pid 77, containerd.service) does not see the mounts of driver", "systemctl restart containerd.service"},
		"one of the runtimes is ok": {"/system.slice/csi-nfs.service", "", "", "", "", ""},
	} {
		t.Run(what, func(t *testing.T) {
			n := newNode(t)
			n.mkdir(n.rootDir+"/pods", 0o755)
			n.mkdir(n.path("empty"), 0o755)
			n.mkdir(n.path("other", n.rootDir, "pods"), 0o755)
			root := func(pid int, name string) {
				dir := "/"
				if name != "" {
					dir = n.path(name)
				}
				n.rooted(pid, dir)
				n.mounts(pid)
			}
			n.process(os.Getpid(), "driver", "0::"+c.group)
			root(os.Getpid(), c.root)
			root(812, "")
			n.process(77, "containerd", "0::/system.slice/containerd.service")
			root(77, c.runtime)
			if c.settings != "" {
				n.units["csi-nfs.service"] = map[string]string{"FragmentPath": "/usr/lib/systemd/system/csi-nfs.service", "DropInPaths": "/etc/systemd/system/csi-nfs.service.d/x.conf"}
				n.write("usr/lib/systemd/system/csi-nfs.service", "[Service]\nPrivateMounts=yes\nProtectSystem=no\n")
				n.write("etc/systemd/system/csi-nfs.service.d/x.conf", "[Service]\nPrivateMounts=no\n"+c.settings+"\n")
			}
			r := n.examine()
			f, ok := finding(r, "mounts-not-propagated")
			if ok != (c.found != "") || !r.Healthy || !strings.Contains(f.Found, c.found) || !strings.Contains(lines(f.Fix), c.fix) || strings.Contains(f.Found, "PrivateMounts=") {
				t.Fatalf("%+v, want %q", r.Findings, c.found)
			}
			// A volume that is mounted shows that the driver mounts elsewhere.
			n.volume(volumeOfPod, volData, 0)
			n.mounts(812, "90 21 0:40 / ROOT/"+volumeOfPod+"/mount rw - tmpfs tmpfs rw")
			n.mounted(volumeOfPod + "/mount")
			if r := n.examine(); len(r.Findings) > 0 {
				t.Errorf("with a volume: %+v", r.Findings)
			}
			// A volume from before the driver's start shows nothing.
			n.write("proc/uptime", "10000.00 1.00\n")
			n.write(fmt.Sprintf("proc/%d/stat", os.Getpid()), "1 (x) S"+strings.Repeat(" 0", 18)+" 999000 0\n")
			n.volume(volumeOfPod, volData, time.Minute)
			if _, ok := finding(n.examine(), "mounts-not-propagated"); ok != (c.found != "") {
				t.Errorf("with an earlier volume: %v", ok)
			}
			n.remove(n.path(fmt.Sprintf("proc/%d/stat", os.Getpid())))
			// The problem has the cause and its repair.
			n.mounts(os.Getpid(), "90 21 0:40 / ROOT/"+volumeOfPod+"/mount rw - tmpfs tmpfs rw")
			n.mounts(812)
			// from before the driver was changed
			n.volume("pods/4567/volumes/kubernetes.io~csi/old", volData, 0)
			n.mounts(812, "91 21 0:41 / ROOT/pods/4567/volumes/kubernetes.io~csi/old/mount rw - tmpfs tmpfs rw")
			r = n.examine()
			if f, ok = finding(r, "volume-misplaced"); !ok || len(r.Findings) != 1 || !strings.Contains(f.Found, c.found) || !strings.Contains(lines(f.Fix), c.fix) {
				t.Errorf("misplaced: %+v, want %q", r.Findings, c.found)
			}
			// Only a running kubelet replaces the pod of a driver.
			fix := lines(f.Fix)
			if first := strings.Index(fix, c.fix) < strings.Index(fix, "systemctl stop kubelet"); c.fix != "" && first != strings.Contains(c.group, "kubepods") {
				t.Errorf("the order is wrong:\n%s", fix)
			}
		})
	}
}

// doctor knows each setting that was seen to hide mounts.
func TestSettingsOfDriversMd(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "..", "..", "packaging", "doc", "drivers.md"))
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, line := range regexp.MustCompile(`(?m)^    hides(?:, 257)?: +(.*)$`).FindAllStringSubmatch(string(page), -1) {
		for _, m := range regexp.MustCompile(`(\w+)=(\S+?)(,|$| )`).FindAllStringSubmatch(line[1], -1) {
			keys = append(keys, m[1])
			n := newNode(t)
			n.units["x.service"] = map[string]string{"FragmentPath": "/x.service"}
			n.write("x.service", "[Service]\n "+m[1]+"="+m[2]+"\n")
			x := newDiagnosis(Options{Root: n.root, Source: n.source(), Units: n.units})
			x.pool = newDiagnosis(x.o).pool
			found, resets := x.namespaceSettings(t.Context(), "x.service")
			if m[2] != "shared" && (len(found) != 1 || len(resets) != 1 || !strings.HasPrefix(resets[0], m[1]+"=") || found[0] != m[1]+"="+m[2]+" in /x.service") {
				t.Errorf("%s=%s: %q, %q", m[1], m[2], found, resets)
			}
		}
	}
	slices.Sort(keys)
	if keys = slices.Compact(keys); len(keys) < 20 {
		t.Errorf("only %q", keys)
	}
}
