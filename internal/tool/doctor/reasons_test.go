package doctor

import (
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/mountinfo"
)

// The label is that of the Node with the name that the kubelet was given.
func TestHostnameOverride(t *testing.T) {
	for cmdline, node := range map[string]string{
		"kubelet\x00--hostname-override=w-7\x00--v=2\x00":          "w-7",
		"kubelet\x00-hostname-override\x00w-7.example\x00--v=2":    "w-7.example",
		"kubelet\x00--hostname-override=$(reboot)\x00--v\x00w-7":   "",
		"kubelet\x00--hostname-overrides=w-7\x00hostname-override": "",
	} {
		n := newNode(t)
		n.write("proc/812/cmdline", cmdline)
		n.status.Drivers[0].RefusedChange = "the driver's topology changed"
		n.status.Drivers[0].Topology = map[string]string{"topology.example.com/zone": "b"}
		r := n.examine()
		if len(r.Findings) != 1 {
			t.Fatalf("%+v", r.Findings)
		}
		named := strings.Contains(lines(r.Findings[0].Fix), "kubectl label node "+node+" ")
		if other := strings.Contains(lines(r.Findings[0].Fix), "w-7"); node != "" && !named || node == "" && other {
			t.Errorf("%q: %s", cmdline, lines(r.Findings[0].Fix))
		}
	}
}

// doctor reports all problems that status shows.
func TestReasonsOfStatus(t *testing.T) {
	for what, c := range map[string]struct {
		shows func(*status.Document)
		id    ID
		found string
		fix   string
	}{
		"topology": {func(d *status.Document) {
			d.Drivers[0].Topology = map[string]string{"topology.example.com/zone": "b"}
			d.Drivers[0].RefusedChange, d.Drivers[0].Reason = "the driver's topology changed", "the driver's topology changed"
		}, "topology-changed", "topology changed", "topology.example.com/zone-\n# when the label is gone, on this node:\n# csi-registrar reregister --force " + name},
		"topology of two drivers": {func(d *status.Document) {
			d.Drivers[0].Topology = map[string]string{"topology.example.com/zone": "b"}
			d.Drivers[0].RefusedChange = "the driver's topology changed"
			d.Drivers = append(d.Drivers, status.Driver{Name: "smb.csi.example.com", Topology: map[string]string{"topology.example.com/zone": "a"}})
		}, "topology-changed", "topology changed", "would refuse smb.csi.example.com instead"},
		"damped": {func(d *status.Document) {
			d.Drivers[0].DampedUntil, d.Drivers[0].Reason = time.Now().Add(time.Minute), "changed 10 times"
		}, "registration-damped", "changed 10 times", "csi-registrar reregister " + name},
		"no room": {func(d *status.Document) {
			d.Drivers[0].NotKept = "cannot keep it: the descriptor store of systemd is full (1 of 1)"
		}, "registration-not-kept", "is full (1 of 1)", "Environment=CSI_REGISTRAR_FDSTORE=4096"},
		"restarts": {func(d *status.Document) {
			d.Drivers[0].DriverRestarts, d.Drivers[0].Reason = 3, "the driver restarted 3 times within 10m0s"
			d.Drivers[0].Server = status.Server{PID: 5, Unit: "csi-nfs.service"}
		}, "driver-restarting", "restarted 3 times", "journalctl --no-pager -b -u csi-nfs.service"},
		"not kept": {func(d *status.Document) { d.Drivers[0].NotKept = "the store is full" }, "registration-not-kept", "the store is full", "systemctl restart csi-registrar.service"},
		"link":     {func(d *status.Document) { d.Drivers[0].Reason = "the link points elsewhere" }, "registration-change-failing", "the link points elsewhere", "journalctl"},
		"not ready": {func(d *status.Document) {
			d.Drivers[0].Driver, d.Drivers[0].Reason = status.Starting, "the driver is not ready, its registration is kept: it is silent"
			d.Drivers[0].Server = status.Server{PID: 5, Unit: "csi-nfs.service"}
		}, "driver-not-ready-for-daemon", "it is silent", "journalctl --no-pager -b -u csi-nfs.service"},
		"polling": {func(d *status.Document) { d.Polling = "raise the sysctl fs.inotify.max_user_instances" },
			"changes-polled", "raise the sysctl", "'fs.inotify.max_user_instances = 40000' > /etc/sysctl.d/90-csi-registrar-max_user_instances.conf"},
		"polling for another reason": {func(d *status.Document) { d.Polling = "no permission" }, "changes-polled", "no permission", "systemctl restart"},
		"stuck": {func(d *status.Document) { d.Stuck = []status.StuckCall{{Path: "/mnt/dead/x", Since: time.Now()}} },
			"file-system-not-answering", "the file system of /mnt/dead/x has not returned", "journalctl"},
	} {
		t.Run(what, func(t *testing.T) {
			n := newNode(t)
			n.write("proc/self/mountinfo", "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 0:40 / /mnt/dead rw - fuse server rw\n")
			n.write("usr/lib/systemd/system/csi-nfs.service", "[Service]\nExecStart=/usr/bin/nfs unix://"+n.socket()+"\n")
			n.write("proc/sys/fs/inotify/max_user_instances", "20000\n")
			c.shows(&n.status)
			r := n.examine()
			if len(r.Findings) != 1 || r.Findings[0].ID != c.id || !strings.Contains(r.Findings[0].Found, c.found) || !strings.Contains(lines(r.Findings[0].Fix), c.fix) {
				t.Errorf("%+v", r.Findings)
			}
		})
	}
}

// A directory that root may not enter by its mode is opened; the daemon gets no capability for it.
func TestDirectoryClosedForTheDaemon(t *testing.T) {
	n := newNode(t)
	n.status.Drivers[0].Driver, n.status.Drivers[0].Reason = status.Absent, "no permission to look at /x as uid 0: see CAP_DAC_OVERRIDE in csi-registrar.service(8)"
	dir := filepath.Dir(n.socket())
	if err := os.Chmod(dir, 0o600); err != nil {
		t.Fatal(err)
	}
	if f := n.examine().Findings[0]; f.ID != "driver-socket-forbidden" || lines(f.Fix) != "chmod u+rwX "+dir {
		t.Errorf("%+v", f)
	}
}

// A daemon gets the capability to override modes only if a mode keeps it out: the reason that it
// gives may quote a driver, or be a lie.
func TestSocketClosedForTheDaemon(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: files of another user")
	}
	n := newNode(t)
	n.write("etc/csi-registrar/conf.d/60-owner.toml", fmt.Sprintf("[driver.%q]\nsocket_owner = \"65123\"\n", name))
	n.restartDaemon()
	n.status.Drivers[0].Driver, n.status.Drivers[0].Reason = status.Absent, "no permission to connect to /x as uid 0: see CAP_DAC_OVERRIDE in csi-registrar.service(8)"
	// Its group is root.
	for mode, want := range map[os.FileMode]bool{0o600: true, 0o755: true, 0o602: true, 0o620: false, 0o666: false} {
		chown(t, n.socket(), 65123)
		chmod(t, n.socket(), mode)
		f := n.examine().Findings[0]
		if closed := f.ID == "driver-socket-forbidden"; closed != want || strings.Contains(lines(f.Fix), "CapabilityBoundingSet=CAP_DAC_OVERRIDE") != want {
			t.Errorf("mode %o: %+v", mode, f)
		}
	}
	chown(t, n.path("csi"), 65123)
	chmod(t, n.path("csi"), 0o700)
	if f := n.examine().Findings[0]; f.ID != "driver-socket-forbidden" {
		t.Errorf("a closed directory: %+v", f)
	}
}

// The unit file of the driver was deleted: the daemon still has the unit's name.
func TestUnitOfADriverThatIsGone(t *testing.T) {
	n := newNode(t)
	n.driver.stop()
	n.status.Drivers[0].Server = status.Server{PID: 4711, Unit: "csi-nfs.service"}
	if f := n.examine().Findings[0]; !strings.Contains(f.Found, "; the daemon saw csi-nfs.service serve it, and no file of that unit names the socket any more") || !strings.HasPrefix(lines(f.Fix), "# put the file of that unit back, ") {
		t.Errorf("%+v", f)
	}
}

// A driver whose unit takes the host name for its node id: where that is written.
func TestTopologyFromTheHostName(t *testing.T) {
	n := newNode(t)
	const file = "/etc/systemd/system/csi-nfs.service"
	n.write(file, "[Service]\nEnvironment=NODE_ID=%H\nExecStart=/usr/bin/nfs unix://"+n.socket()+"\n")
	n.units["csi-nfs.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "FragmentPath": file}
	n.status.Drivers[0].Topology = map[string]string{"topology.example.com/zone": "b"}
	n.status.Drivers[0].RefusedChange = "the driver's topology changed"
	f, _ := finding(n.examine(), "topology-changed")
	if !strings.Contains(lines(f.Fix), "as after a change of the host name: in "+file+":2 write the earlier name in place of %H, run systemctl daemon-reload, then\n") {
		t.Error(lines(f.Fix))
	}
	const dropIn = "/etc/systemd/system/csi-nfs.service.d/site.conf"
	n.write(dropIn, "[Service]\nEnvironment=NODE_ID=\n")
	n.units["csi-nfs.service"]["DropInPaths"] = dropIn
	f, _ = finding(n.examine(), "topology-changed")
	if !strings.Contains(lines(f.Fix), "as after a change of the host name: correct NODE_ID= in "+dropIn+":2, run systemctl daemon-reload, then\n") {
		t.Error(lines(f.Fix))
	}
	n.units["csi-nfs.service"]["DropInPaths"] = ""
	n.write("proc/812/cmdline", "kubelet\x00--hostname-override=w-7\x00")
	f, _ = finding(n.examine(), "topology-changed")
	if !strings.HasPrefix(lines(f.Fix), "# if the new topology is wrong, as after a change of the host name: the kubelet still has the earlier one\nsed -i 2s/%H/w-7/ "+file+"\nsystemctl daemon-reload\n") {
		t.Error(lines(f.Fix))
	}
}

func TestStoppedDaemonWithVolumesInUse(t *testing.T) {
	n := newNode(t)
	n.volume(volumeOfPod, volData, 0)
	n.mounted(volumeOfPod + "/mount")
	n.down()
	n.units[serviceUnit]["ActiveState"] = "inactive"
	if f := n.examine().Findings[0]; f.ID != "unit-stopped" || !strings.Contains(f.Found, "1 volume in use, which the kubelet cannot unmount") {
		t.Errorf("%+v", f)
	}
}

// A directory that a mount covers is not reported as deleted.
func TestDirectoryBelowAMount(t *testing.T) {
	n := newNode(t)
	other := filepath.Join(n.root, "other")
	n.mkdir(other, 0o750)
	n.write("proc/812/fdinfo/9", inotifyLine(t, other))
	n.write("proc/self/mountinfo", "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 8:1 /x "+n.rootDir+" rw - ext4 /dev/sda1 rw\n")
	f := n.examine().Findings[0]
	if f.ID != "plugins-registry-covered" || !strings.Contains(f.Found, "the mount at "+n.rootDir) || strings.Contains(lines(f.Fix), "reregister") {
		t.Errorf("%+v", f)
	}
}

func TestMountOfAPath(t *testing.T) {
	n := newNode(t)
	n.write("proc/self/mountinfo", "21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"+
		"22 21 0:40 / /mnt/a\\040b rw shared:1 master:2 - nfs4 server:/x\\134y rw\n"+
		"23 22 0:41 / /mnt/a\\040b/c rw - fuse.sshfs host:/ rw\nnonsense\n")
	x := newDiagnosis(Options{Root: n.root})
	b := mountinfo.Mount{ID: "22", Parent: "21", Device: "0:40", Root: "/", Point: "/mnt/a b", Shared: "1", Master: "2", Type: "nfs4", Source: `server:/x\y`}
	c := mountinfo.Mount{ID: "23", Parent: "22", Device: "0:41", Root: "/", Point: "/mnt/a b/c", Type: "fuse.sshfs", Source: "host:/"}
	for file, want := range map[string]mountinfo.Mount{"/mnt/a b/c/d": c, "/mnt/a b": b, "/mnt/a bc": {}, "/run": {}} {
		if m := x.mountOf(t.Context(), file); m != want {
			t.Errorf("%s is on %+v", file, m)
		}
	}
}

// The kubelet reduces a limit that is too high.
func TestVolumeLimitTooHigh(t *testing.T) {
	n := newNode(t)
	n.driver.set(func(f *fakeDriver) { f.max = math.MaxInt32 + 1 })
	r := n.examine()
	if len(r.Findings) != 0 || !slices.ContainsFunc(r.Checks, func(c Check) bool { return strings.Contains(c.Says, "at most 2147483648 volumes") }) {
		t.Errorf("%+v", r)
	}
}

// A path with a missing directory or a loop of links does not hang.
func TestHangingFindsNothing(t *testing.T) {
	dir := t.TempDir()
	x := newDiagnosis(Options{Root: "/"})
	if err := os.Symlink("b", filepath.Join(dir, "b")); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{dir, dir + "/none/x", dir + "/b/c"} {
		if name := x.hanging(t.Context(), file); name != "" {
			t.Errorf("%s hangs at %s", file, name)
		}
	}
}

// A file system is full when even root finds no block, or no inode. One without a limit shows
// none.
func TestLacking(t *testing.T) {
	for _, c := range []struct {
		st   unix.Statfs_t
		want string
	}{
		{unix.Statfs_t{Blocks: 9, Bfree: 1, Bavail: 1, Files: 9, Ffree: 1}, ""},
		{unix.Statfs_t{Flags: unix.ST_RDONLY, Blocks: 9}, readOnly},
		{unix.Statfs_t{Blocks: 9, Files: 9, Ffree: 1}, "space"},
		{unix.Statfs_t{Blocks: 9, Bfree: 1, Files: 9, Ffree: 1}, ""}, // reserved for root
		{unix.Statfs_t{Blocks: 9, Bfree: 1, Bavail: 1, Files: 9}, "inodes"},
		{unix.Statfs_t{}, ""},
	} {
		if got := lacking(c.st); got != c.want {
			t.Errorf("%+v: %q, want %q", c.st, got, c.want)
		}
	}
}

func TestUnwritable(t *testing.T) {
	x := newDiagnosis(Options{Units: newNode(t).units, Root: "/"})
	if why, fix := x.obstacle(t.Context(), "", t.TempDir(), "read-only file system, no space left, not permitted, permission denied"); why != "" || fix != nil {
		t.Errorf("%q, %v", why, fix)
	}
}

// What a drop-in sets can be why a driver ends again and again, or answers wrongly, or why the
// daemon does not see what doctor sees.
func TestDropInsOfWhatContradicts(t *testing.T) {
	for what, c := range map[string]struct {
		unit, line, journal string
		status              func(*status.Driver)
		found, fix          string
	}{
		"driver": {"csi-nfs.service", "RuntimeMaxSec=5", "csi-nfs.service: Service reached runtime time limit. Stopping.", func(d *status.Driver) {
			d.DriverRestarts, d.Reason = 3, "the driver restarted 3 times within 10m0s"
			d.Server = status.Server{PID: 5, Unit: "csi-nfs.service"}
		}, `"csi-nfs.service: Service reached runtime time limit. Stopping."; %s:2 sets "RuntimeMaxSec=5"`, "# mv -n %s %[1]s.off\nsystemctl daemon-reload"},
		"answer": {"csi-nfs.service", "Environment=NODE_ID=", "", func(d *status.Driver) {
			d.Server = status.Server{PID: 5, Unit: "csi-nfs.service"}
		}, `the node ID is empty; %s:2 sets "Environment=NODE_ID="`, "# mv -n %s %[1]s.off\nsystemctl daemon-reload\nsystemctl restart --no-block csi-nfs.service"},
		"name": {"csi-nfs.service", "Environment=NAME=x", "", func(d *status.Driver) {
			d.Server = status.Server{PID: 5, Unit: "csi-nfs.service"}
		}, `reports name "x"; %s:2 sets "Environment=NAME=x"`, "%.0s"},
		"daemon": {serviceUnit, "TemporaryFileSystem=/var/lib:ro", "", func(d *status.Driver) {
			*d = status.Driver{Name: d.Name, Driver: status.Absent, State: string(status.Absent), Reason: "the directory /var/lib/kubelet does not exist"}
		}, `%s:2 sets "TemporaryFileSystem=/var/lib:ro"`, "# mv -n %s %[1]s.off\nsystemctl daemon-reload\nsystemctl restart csi-registrar.service"},
	} {
		t.Run(what, func(t *testing.T) {
			n := newNode(t)
			n.write("usr/lib/systemd/system/csi-nfs.service", "[Service]\nExecStart=/usr/bin/nfs unix://"+n.socket()+"\n")
			file := "/etc/systemd/system/" + c.unit + ".d/10-site.conf"
			n.write(file, "[Service]\n"+c.line+"\n")
			if n.units[c.unit] == nil {
				n.units[c.unit] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "Result": "success"}
			}
			n.units[c.unit]["DropInPaths"], n.units[c.unit]["journal"] = file, c.journal
			if what == "answer" {
				n.process(os.Getpid(), "nfs", "0::/system.slice/csi-nfs.service")
				fault(func(f *fakeDriver) { f.nodeID = "" })(t, n)
			}
			if what == "name" {
				n.process(os.Getpid(), "nfs", "0::/system.slice/csi-nfs.service")
				fault(func(f *fakeDriver) { f.name = "x" })(t, n)
			}
			if c.unit == serviceUnit {
				n.holdReg = true
				n.restartDaemon()
			}
			c.status(&n.status.Drivers[0])
			f := n.examine().Findings[0]
			if !strings.Contains(f.Found, fmt.Sprintf(c.found, file)) || !strings.Contains(lines(f.Fix), fmt.Sprintf(c.fix, file)) {
				t.Errorf("%+v", f)
			}
		})
	}
}

// A unit that is required and has failed can have a drop-in of the administrator, too.
func TestDropInOfARequiredUnit(t *testing.T) {
	n := newNode(t)
	n.down()
	const file = "/etc/systemd/system/csi-registrar.socket.d/10-group.conf"
	n.write(file, "[Socket]\nSocketGroup=storage\n")
	n.units[serviceUnit]["ActiveState"], n.units[serviceUnit]["Requires"] = "inactive", controlUnit
	n.units[controlUnit] = map[string]string{"LoadState": "loaded", "ActiveState": "failed", "Result": "resources", "DropInPaths": file}
	f := n.examine().Findings[0]
	if !strings.Contains(f.Found, file+`:2 sets "SocketGroup=storage"`) || !strings.Contains(lines(f.Fix), "\n# mv -n "+file+" "+file+".off\nsystemctl daemon-reload\nsystemctl restart csi-registrar.socket\n") {
		t.Errorf("%+v", f)
	}
}

// A start that waits for another unit is no failure, and systemd logs nothing about it.
func TestStartThatWaits(t *testing.T) {
	n := newNode(t)
	n.driver.stop()
	n.write("etc/systemd/system/csi-nfs.service", "[Service]\nExecStart=/usr/bin/nfs unix://"+n.socket()+"\n")
	n.units["csi-nfs.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "inactive", "SubState": "dead", "Result": "success", "Job": "812", "After": "basic.target san.service"}
	n.units["san.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "activating"}
	f := n.examine().Findings[0]
	if !strings.Contains(f.Found, ", and its start waits for san.service, which has not finished its own") || !strings.Contains(lines(f.Fix), "\n# to start without it:\n# systemctl stop san.service\n") {
		t.Errorf("%+v", f)
	}
}

// A container runtime that is frozen, or listens elsewhere than the kubelet expects it, is why a
// kubelet ends.
func TestRuntimeThatTheKubeletDoesNotReach(t *testing.T) {
	n := newNode(t)
	n.remove(n.path("proc/812"))
	const endpoint = "/run/containerd/containerd.sock"
	n.write("etc/kubernetes/kubelet.yaml", "kind: KubeletConfiguration\ncontainerRuntimeEndpoint: unix://"+endpoint+"\n")
	n.units["kubelet.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "activating", "SubState": "auto-restart", "Result": "exit-code", "ExecMainStatus": "1", "NRestarts": "9",
		"ExecStart": "{ path=/usr/bin/kubelet ; argv[]=/usr/bin/kubelet --config=/etc/kubernetes/kubelet.yaml ; }",
		"journal":   `"command failed" err="validate CRI v1 runtime API for endpoint \"unix://` + endpoint + `\": dial unix ` + endpoint + `: connect: no such file or directory"`}
	n.process(77, "containerd", "0::/system.slice/containerd.service")
	n.units["containerd.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running"}
	n.mkdir(n.path("proc/77/fd"), 0o700)
	if err := os.Symlink("socket:[55]", n.path("proc/77/fd/3")); err != nil {
		t.Fatal(err)
	}
	n.write("run/k8s/containerd.sock", "")
	n.write("proc/77/net/unix", "0: 00000002 00000000 00010000 0001 01 55 "+n.path("run/k8s/containerd.sock")+"\n")
	f, _ := finding(n.examine(), "no-kubelet")
	if !strings.Contains(f.Found, "; containerd (pid 77, containerd.service) listens on "+n.path("run/k8s/containerd.sock")) ||
		!strings.Contains(lines(f.Fix), "or correct /etc/kubernetes/kubelet.yaml:2, which has unix://"+endpoint+"\n") {
		t.Errorf("%+v", f)
	}

	n.write("proc/77/net/unix", "0: 00000002 00000000 00010000 0001 01 55 "+n.path(endpoint)+"\n")
	const removed = "containerd.sock was removed, on which containerd (pid 77, containerd.service) listens"
	if f, _ = finding(n.examine(), "no-kubelet"); !strings.Contains(f.Found, removed) || !strings.HasPrefix(lines(f.Fix), "systemctl restart containerd.service\n") {
		t.Errorf("%+v", f)
	}

	n.units["containerd.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "activating", "SubState": "auto-restart", "Result": "exit-code", "ExecMainStatus": "1", "NRestarts": "3",
		"journal": "containerd: failed to load TOML: /etc/containerd/config.toml: (13, 2): unexpected token unclosed table key"}
	n.remove(n.path("proc/77"))
	maps.Copy(n.units["kubelet.service"], map[string]string{"ActiveState": "inactive", "Job": "5", "After": "containerd.service"})
	f, _ = finding(n.examine(), "no-kubelet")
	if !strings.Contains(f.Found, "; see /etc/containerd/config.toml:13") || !strings.HasPrefix(lines(f.Fix), "# correct /etc/containerd/config.toml:13\n") || strings.Contains(lines(f.Fix), "kubelet.yaml") || strings.Contains(lines(f.Fix), "without it") {
		t.Errorf("%+v", f)
	}
	n.process(77, "containerd", "0::/system.slice/containerd.service")
	n.units["containerd.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running"}

	n.units["containerd.service"]["FreezerState"] = "frozen"
	n.write("run/containerd/containerd.sock", "")
	f, _ = finding(n.examine(), "no-kubelet")
	if !strings.Contains(f.Found, "; containerd.service is frozen") || !strings.HasPrefix(lines(f.Fix), "systemctl thaw containerd.service\n") {
		t.Errorf("%+v", f)
	}
}

// A unit that runs, and that systemd would not start again: those of the driver, of the kubelet and
// of its container runtime.
func TestUnitThatSystemdRefuses(t *testing.T) {
	for _, unit := range []string{"csi-nfs.service", "kubelet.service", "containerd.service"} {
		n := newNode(t)
		n.process(os.Getpid(), "nfs", "0::/system.slice/csi-nfs.service")
		n.process(77, "containerd", "0::/system.slice/containerd.service")
		n.units["containerd.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running"}
		if r := n.examine(); len(r.Findings) > 0 {
			t.Fatalf("%+v", r.Findings)
		}
		file := "/etc/systemd/system/" + unit + ".d/x.conf"
		n.write(file, "[Service]\nType=oneshot\n")
		n.units[unit] = map[string]string{"LoadState": "bad-setting", "InvocationID": "5f", "ActiveState": "active", "SubState": "running", "DropInPaths": file, "journal": "Service has Restart= set to always. Refusing."}
		f, _ := finding(n.examine(), "unit-not-enabled")
		if !strings.HasPrefix(f.Found, unit+` runs, but systemd refuses its files, and will not start it again: "Service has Restart= set to always. Refusing."; `+file+":2 sets ") ||
			!strings.Contains(lines(f.Fix), "mv -n "+file+" "+file+".off\nsystemctl daemon-reload") {
			t.Errorf("%s: %+v", unit, f)
		}
	}
}

// A driver that runs, and requires a unit that does not exist.
func TestDriverThatRequiresNothingThere(t *testing.T) {
	const file = "/etc/systemd/system/csi-nfs.service.d/10-iscsi.conf"
	n := newNode(t)
	n.process(os.Getpid(), "nfs", "0::/system.slice/csi-nfs.service")
	n.write(file, "[Unit]\nRequires=iscsid.service\nAfter=iscsid.service\n")
	n.units["csi-nfs.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "Requires": "iscsid.service", "DropInPaths": file}
	f, _ := finding(n.examine(), "unit-not-enabled")
	if f.Driver != name || f.Found != "csi-nfs.service runs, which requires iscsid.service: there is no such unit, and it will not be started again" ||
		lines(f.Fix) != "# install what has iscsid.service, or take it out of "+file+":2\nsystemctl daemon-reload" {
		t.Errorf("%+v", f)
	}
	// As systemd 257 prints the slice of csi-nfs@a.service.
	n.units[`system-csi\x2dnfs.slice`] = map[string]string{"LoadState": "loaded", "ActiveState": "active"}
	n.units["csi-nfs.service"]["Requires"] = `"system-csi\\x2dnfs.slice" sysinit.target`
	n.units["sysinit.target"] = map[string]string{"LoadState": "loaded", "ActiveState": "active"}
	if f, found := finding(n.examine(), "unit-not-enabled"); found {
		t.Errorf("%+v", f)
	}
}

// A driver whose unit is not enabled is gone after the next boot.
func TestDriverThatIsNotEnabled(t *testing.T) {
	for what, c := range map[string]struct {
		unit map[string]string
		want bool
	}{
		"enabled":           {map[string]string{"UnitFileState": "enabled", "WantedBy": "multi-user.target"}, false},
		"disabled":          {map[string]string{"UnitFileState": "disabled"}, true},
		"until a reboot":    {map[string]string{"UnitFileState": "enabled-runtime", "WantedBy": "multi-user.target"}, true},
		"wanted by a unit":  {map[string]string{"UnitFileState": "disabled", "WantedBy": "storage.target"}, false},
		"started by a path": {map[string]string{"UnitFileState": "disabled", "TriggeredBy": "csi-nfs.path"}, false},
		"generated":         {map[string]string{"UnitFileState": "generated"}, false},
	} {
		n := newNode(t)
		n.process(os.Getpid(), "nfs", "0::/system.slice/csi-nfs.service")
		n.units["csi-nfs.service"] = c.unit
		f, ok := finding(n.examine(), "unit-not-enabled")
		if ok != c.want || ok && (f.Driver != name || f.Severity != Warning || lines(f.Fix) != "systemctl enable csi-nfs.service") {
			t.Errorf("%s: %+v", what, f)
		}
	}
}

// Some errors of the kubelet say what to do: a kernel's setting with protectKernelDefaults, and a
// file of state after a change of cpuManagerPolicy.
func TestErrorsOfTheKubeletThatSayWhatToDo(t *testing.T) {
	for journal, fix := range map[string]string{
		`E1128 kubelet.go:1850] "Failed to start ContainerManager" err="invalid kernel flag: kernel/panic, expected value: 10, actual value: 0"`:                                                                                                                                                                                                           "'kernel.panic = 10' > /etc/sysctl.d/90-kubelet-kernel.panic.conf\nsysctl -w kernel.panic=10\n",
		`E1128 kubelet.go:1850] "Failed to start ContainerManager" err="start cpu manager error: could not restore state from checkpoint: configured policy \"static\" differs from state checkpoint policy \"none\", please drain this node and delete the CPU manager checkpoint file \"/var/lib/kubelet/cpu_manager_state\" before restarting Kubelet"`: "# drain the node, then:\n# rm /var/lib/kubelet/cpu_manager_state\n",
	} {
		n := newNode(t)
		n.remove(n.path("proc/812"))
		n.units["kubelet.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "activating", "SubState": "auto-restart", "Result": "exit-code", "ExecMainStatus": "1", "NRestarts": "9", "journal": journal}
		if f, _ := finding(n.examine(), "no-kubelet"); !strings.Contains(lines(f.Fix), fix) {
			t.Errorf("%+v", f)
		}
		// Between two of its ends a kubelet runs.
		x := newDiagnosis(Options{Source: n.source(), Units: n.units, Root: n.root})
		if _, blamed := x.obstacles(t.Context(), "kubelet.service", journal); !strings.HasSuffix("\n"+lines(blamed)+"\n", fix) {
			t.Errorf("%s", lines(blamed))
		}
		// A driver can log the same.
		if _, forged := x.obstacles(t.Context(), "csi-nfs.service", journal); strings.Contains(lines(forged), "rm ") || strings.Contains(lines(forged), "sysctl") {
			t.Errorf("%s", lines(forged))
		}
	}
}
