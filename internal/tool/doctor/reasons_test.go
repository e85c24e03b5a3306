package doctor

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/node/volumes"
	"csi-registrar/internal/sys/worker"
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
		}, TopologyChanged, "topology changed", "topology.example.com/zone- && csi-registrar reregister --force " + name},
		"topology of two drivers": {func(d *status.Document) {
			d.Drivers[0].Topology = map[string]string{"topology.example.com/zone": "b"}
			d.Drivers[0].RefusedChange = "the driver's topology changed"
			d.Drivers = append(d.Drivers, status.Driver{Name: "smb.csi.example.com", Topology: d.Drivers[0].Topology})
		}, TopologyChanged, "topology changed", "would refuse smb.csi.example.com instead"},
		"damped": {func(d *status.Document) {
			d.Drivers[0].DampedUntil, d.Drivers[0].Reason = time.Now().Add(time.Minute), "changed 10 times"
		}, RegistrationDamped, "changed 10 times", "csi-registrar reregister " + name},
		"no room": {func(d *status.Document) {
			d.Drivers[0].NotKept = "cannot keep it: the descriptor store of systemd is full (1 of 1)"
		}, RegistrationNotKept, "is full (1 of 1)", "Environment=CSI_REGISTRAR_FDSTORE=4096"},
		"no permission": {func(d *status.Document) {
			d.Drivers[0].Driver, d.Drivers[0].Reason = status.Absent, "no permission to connect to /x as uid 0: see CAP_DAC_OVERRIDE in csi-registrar.service(8)"
		}, DriverSocketForbidden, "as uid 0", "CapabilityBoundingSet=CAP_DAC_OVERRIDE"},
		"restarts": {func(d *status.Document) {
			d.Drivers[0].DriverRestarts, d.Drivers[0].Reason = 3, "the driver restarted 3 times within 10m0s"
			d.Drivers[0].Server = status.Server{PID: 5, Unit: "csi-nfs.service"}
		}, DriverRestarting, "restarted 3 times", "journalctl --no-pager -u csi-nfs.service"},
		"not kept": {func(d *status.Document) { d.Drivers[0].NotKept = "the store is full" }, RegistrationNotKept, "the store is full", "systemctl restart csi-registrar.service"},
		"link":     {func(d *status.Document) { d.Drivers[0].Reason = "the link points elsewhere" }, StatusReason, "the link points elsewhere", "journalctl"},
		"not ready": {func(d *status.Document) {
			d.Drivers[0].Driver, d.Drivers[0].Reason = status.Starting, "the driver is not ready, its registration is kept: it is silent"
			d.Drivers[0].Server = status.Server{PID: 5, Unit: "csi-nfs.service"}
		}, StatusReason, "it is silent", "journalctl --no-pager -u csi-nfs.service"},
		"polling": {func(d *status.Document) { d.Polling = "too many open files" }, ChangesPolled, "too many open files", "sysctl fs.inotify"},
		"stuck": {func(d *status.Document) { d.Stuck = []status.StuckCall{{Path: "/mnt/dead/x", Since: time.Now()}} },
			FileSystemNotAnswering, "/mnt/dead, type fuse, from server", "umount --force --lazy /mnt/dead"},
	} {
		t.Run(what, func(t *testing.T) {
			n := newNode(t)
			n.write("proc/self/mountinfo", "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 0:40 / /mnt/dead rw - fuse server rw\n")
			c.shows(&n.status)
			r := n.examine()
			if len(r.Findings) != 1 || r.Findings[0].ID != c.id || !strings.Contains(r.Findings[0].Found, c.found) || !strings.Contains(lines(r.Findings[0].Fix), c.fix) {
				t.Errorf("%+v", r.Findings)
			}
		})
	}
}

func TestStoppedDaemonWithVolumesInUse(t *testing.T) {
	n := newNode(t)
	n.volume(podVolume, volData, 0)
	n.mounted(podVolume + "/mount")
	n.down()
	n.units[serviceUnit]["ActiveState"] = "inactive"
	if f := n.examine().Findings[0]; f.ID != UnitStopped || !strings.Contains(f.Found, "1 volume in use, which the kubelet cannot unmount") {
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
	if f.ID != RegistryCovered || !strings.Contains(f.Found, "the mount at "+n.rootDir) || strings.Contains(lines(f.Fix), "reregister") {
		t.Errorf("%+v", f)
	}
}

func TestMountOfAPath(t *testing.T) {
	n := newNode(t)
	n.write("proc/self/mountinfo", "21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"+
		"22 21 0:40 / /mnt/a\\040b rw shared:1 master:2 - nfs4 server:/x\\134y rw\n"+
		"23 22 0:41 / /mnt/a\\040b/c rw - fuse.sshfs host:/ rw\nnonsense\n")
	x := &diagnosis{o: Options{Root: n.root}, pool: worker.NewPool()}
	b := volumes.Mount{ID: "22", Parent: "21", Device: "0:40", Root: "/", Point: "/mnt/a b", Type: "nfs4", Source: `server:/x\y`}
	c := volumes.Mount{ID: "23", Parent: "22", Device: "0:41", Root: "/", Point: "/mnt/a b/c", Type: "fuse.sshfs", Source: "host:/"}
	for file, want := range map[string]volumes.Mount{"/mnt/a b/c/d": c, "/mnt/a b": b, "/mnt/a bc": {}, "/run": {}} {
		if m := x.mountOf(t.Context(), file); m != want {
			t.Errorf("%s is on %+v", file, m)
		}
	}
}

// The kubelet reduces a limit that is too high, so it is only a warning.
func TestVolumeLimitTooHigh(t *testing.T) {
	n := newNode(t)
	n.driver.set(func(f *fakeDriver) { f.max = math.MaxInt32 + 1 })
	r := n.examine()
	if len(r.Findings) != 1 || r.Findings[0].ID != VolumeLimitInvalid || !r.Healthy {
		t.Errorf("%+v", r.Findings)
	}
}

// A path with a missing directory or a loop of links does not hang.
func TestHangingFindsNothing(t *testing.T) {
	dir := t.TempDir()
	x := &diagnosis{o: Options{Root: "/"}, pool: worker.NewPool()}
	if err := os.Symlink("b", filepath.Join(dir, "b")); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{dir, dir + "/none/x", dir + "/b/c"} {
		if name := x.hanging(t.Context(), file); name != "" {
			t.Errorf("%s hangs at %s", file, name)
		}
	}
}

func TestUnwritable(t *testing.T) {
	if lacks, err := unwritable(t.TempDir()); lacks != "" || err != nil {
		t.Errorf("%q, %v", lacks, err)
	}
}
