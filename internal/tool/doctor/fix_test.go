package doctor

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/systemd"
)

func TestEveryStepHasAName(t *testing.T) {
	for s := range steps {
		if s.String() == "" || slices.Index(stepNames[:], s.String()) != int(s) {
			t.Errorf("step %d is called %q", s, s)
		}
	}
}

func TestFixAsText(t *testing.T) {
	for want, f := range map[string]Fix{
		"# check its contents first": note("check its contents first"),
		"rm '/a b'":                  run("rm", "/a b"),
		"true && echo x":             {Command: safetext.Run("true"), Then: []safetext.Command{safetext.Run("echo", "x")}},
		`printf '%s\n' '[x]' > /y`:   write("/y", "[x]"),
	} {
		if f.String() != want || f.IsComment() != strings.HasPrefix(want, "#") {
			t.Errorf("%q, expected %q", f, want)
		}
	}
}

// The directives that doctor restores are those of the package.
func TestShippedDirectives(t *testing.T) {
	for directive, lines := range shipped {
		file := serviceUnit
		if directive == "ListenStream" {
			file = httpUnit
		}
		data, err := os.ReadFile(filepath.Join("../../systemd", file))
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range lines {
			if !strings.HasSuffix(line, "=") && !strings.Contains(string(data), "\n"+line+"\n") {
				t.Errorf("%s has no line %s", file, line)
			}
		}
	}
}

// The fix for one directive does not change other drop-ins, such as the one for root_dir.
func TestRestoreChangesOneDirective(t *testing.T) {
	n := newNode(t)
	dir := "etc/systemd/system/csi-registrar.service.d"
	rootDir := "[Service]\nReadWritePaths=-/data\n"
	n.write(dir+"/root-dir.conf", rootDir)
	n.write(dir+"/watchdog.conf", "[Service]\nNice=5\n  WatchdogSec = 0\n")
	n.units[serviceUnit]["DropInPaths"] = "/" + dir + "/root-dir.conf /" + dir + "/watchdog.conf"
	n.units[serviceUnit]["WatchdogUSec"] = "infinity"
	r := n.examine()
	if len(r.Findings) != 1 || r.Findings[0].ID != WatchdogOff {
		t.Fatalf("%+v", r.Findings)
	}
	fix := lines(r.Findings[0].Fix)
	if strings.Contains(fix, "revert") || strings.Contains(fix, "root-dir") || !strings.Contains(fix, systemctl("restart", serviceUnit).String()) {
		t.Errorf("%s", fix)
	}
	for _, f := range r.Findings[0].Fix {
		if f.Command.Name != "sed" {
			continue
		}
		line := strings.ReplaceAll(f.String(), " /etc", " "+n.root+"/etc")
		if out, err := exec.CommandContext(t.Context(), "sh", "-c", line).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", line, err, out)
		}
	}
	for file, want := range map[string]string{"root-dir.conf": rootDir, "watchdog.conf": "[Service]\nNice=5\n"} {
		data, err := os.ReadFile(n.path(dir, file))
		if err != nil || string(data) != want {
			t.Errorf("%s has %q, %v", file, data, err)
		}
	}
}

// If no drop-in has the directive, the unit file was replaced, and an override restores it.
func TestRestoreOverridesAReplacedUnit(t *testing.T) {
	n := newNode(t)
	n.units[serviceUnit]["FileDescriptorStoreMax"] = "0"
	r := n.examine()
	want := "printf '%s\\n' '[Service]' FileDescriptorStoreMax=4096 Environment=CSI_REGISTRAR_FDSTORE=4096 > " +
		filepath.Dir(systemd.DropInFile) + "/zz-doctor-filedescriptorstoremax.conf"
	if len(r.Findings) != 1 || !strings.Contains(lines(r.Findings[0].Fix), want) {
		t.Errorf("%+v, expected %s", r.Findings, want)
	}
}

// Another user could replace a directory by a link before root runs the command.
func TestNoCommandForAPathOfAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: files of another user")
	}
	n := newNode(t)
	n.driver.stop()
	n.write("csi/csi.sock", "")
	n.restartDaemon()
	if fix := lines(n.examine().Findings[0].Fix); !strings.Contains(fix, "rm "+n.socket()) {
		t.Fatalf("%s", fix)
	}
	n.write("etc/csi-registrar/conf.d/60-nfs.toml", "[driver."+safetext.Quote(name)+"]\nsocket_owner = \"65123\"\n")
	chown(t, n.path("csi"), 65123)
	r := n.examine()
	for _, f := range r.Findings {
		for _, line := range f.Fix {
			if !line.IsComment() && strings.Contains(line.String(), n.path("csi")+"/") {
				t.Errorf("%s: %s", f.ID, line)
			}
		}
	}
	if len(r.Findings) == 0 || !strings.Contains(lines(r.Findings[0].Fix), "by hand") {
		t.Errorf("%+v", r.Findings)
	}
}

// A driver that is down is restarted by its unit, and its last exit is shown.
func TestFixRestartsTheServer(t *testing.T) {
	n := newNode(t)
	n.units["csi-nfs.service"] = map[string]string{"ActiveState": "failed", "SubState": "failed", "Result": "exit-code", "ExecMainCode": "1",
		"ExecMainStatus": "3", "ExecMainExitTimestamp": "Mon 2026-11-23 09:00:00 UTC", "NRestarts": "5"}
	n.driver.stop()
	n.restartDaemon()
	n.status.Drivers[0].Server.PID, n.status.Drivers[0].Server.Unit = 4711, "csi-nfs.service"
	f := n.examine().Findings[0]
	if want := "csi-nfs.service is failed (failed), its last process ended with exit status 3 at Mon 2026-11-23 09:00:00 UTC, restarted 5 times"; f.ID != DriverSocketMissing || !strings.Contains(f.Found, want) {
		t.Errorf("%+v", f)
	}
	for _, want := range []string{"systemctl --no-pager status csi-nfs.service", "journalctl --no-pager -u csi-nfs.service -n 50", "systemctl restart csi-nfs.service"} {
		if !strings.Contains(lines(f.Fix), want) {
			t.Errorf("%s\nlacks %s", lines(f.Fix), want)
		}
	}
	n.status.Drivers[0].Server.Unit, n.status.Drivers[0].Server.Pod, n.status.Drivers[0].Server.Container = "", "0d8e24c2-3f5c-4b1b-9d3c-2a6f0c8e7b11", "4f5d"
	if fix := lines(n.examine().Findings[0].Fix); !strings.Contains(fix, "crictl logs --tail 50 4f5d") || !strings.Contains(fix, "crictl stop 4f5d") {
		t.Errorf("%s", fix)
	}
}

// A driver that has not served since the daemon started is found by the file of its unit.
func TestFixRestartsTheUnitWithTheSocket(t *testing.T) {
	n := newNode(t)
	n.units["csi-nfs.service"] = map[string]string{"ActiveState": "inactive", "SubState": "dead"}
	n.driver.stop()
	n.restartDaemon()
	n.write("usr/lib/systemd/system/csi-nfs.service", "[Service]\nExecStart=/usr/bin/nfs --endpoint=unix://"+n.socket()+" --x\n")
	n.write("usr/lib/systemd/system/other.service", "[Service]\nExecStart=/usr/bin/nfs --endpoint=unix://"+n.socket()+"2\n[Unit]\nWants=/x"+n.socket()+"\n")
	n.write("usr/lib/systemd/system/csi-registrar.service.d/a.conf", "# "+n.socket()+"\n")
	n.write("usr/lib/systemd/system/csi@.service", "# "+n.socket()+"\n")
	restart := "# the file of csi-nfs.service names this socket\nsystemctl --no-pager status csi-nfs.service\njournalctl --no-pager -u csi-nfs.service -n 50\nsystemctl restart csi-nfs.service\n"
	f := n.examine().Findings[0]
	if f.ID != DriverSocketMissing || !strings.Contains(f.Found, "; csi-nfs.service is inactive (dead)") || !strings.HasPrefix(lines(f.Fix), restart) {
		t.Errorf("%+v", f)
	}
	n.remove(n.path("usr/lib/systemd/system/csi-nfs.service"))
	n.write("etc/systemd/system/csi-nfs.service.d/socket.conf", "[Service]\nEnvironment=\"SOCKET="+n.socket()+"\"\n")
	if f := n.examine().Findings[0]; !strings.HasPrefix(lines(f.Fix), restart) {
		t.Errorf("a drop-in: %+v", f)
	}
	n.write("run/systemd/generator/csi-2.service", "[Service]\nExecStartPost=supervise --socket "+n.socket())
	if f := n.examine().Findings[0]; !strings.Contains(lines(f.Fix), "its unit or pod is not known") {
		t.Errorf("two units: %+v", f)
	}
}

// If the socket belongs to the user of the driver's unit, the fix is socket_owner, not chown.
func TestSocketOfTheUnitsUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: files of another user")
	}
	n := newNode(t)
	chown(t, n.socket(), 65123)
	n.units["csi-nfs.service"] = map[string]string{"ActiveState": "active", "SubState": "running", "User": "65123"}
	n.restartDaemon()
	n.status.Drivers[0].Server.PID, n.status.Drivers[0].Server.Unit = 4711, "csi-nfs.service"
	f := n.examine().Findings[0]
	if f.ID != DriverNotTrusted || strings.Contains(lines(f.Fix), "chown") || !strings.HasPrefix(lines(f.Fix), "# csi-nfs.service runs the driver as 65123\n") || !n.follow(f.Fix) {
		t.Fatalf("%+v", f)
	}
	if d, _ := config.Load(config.Source{Root: n.root}).Config.Driver(name); d.SocketOwner != "65123" {
		t.Errorf("%+v", d)
	}
	n.units["csi-nfs.service"]["User"] = "65124"
	n.remove(n.path("etc/csi-registrar/conf.d"))
	if f := n.examine().Findings[0]; !strings.Contains(lines(f.Fix), "chown -h root") {
		t.Errorf("the unit has another user: %+v", f)
	}
}

func TestDriverListensNearby(t *testing.T) {
	for _, dir := range []string{"csi-nfs", "ipc"} {
		t.Run(dir, func(t *testing.T) { listensNearby(t, dir) })
	}
}

func listensNearby(t *testing.T, dir string) {
	n := newNode(t)
	other := &fakeDriver{name: "other.example.com"}
	other.start(t, n.path("csi/a.sock"))
	t.Cleanup(other.stop)
	n.mkdir(n.path(dir), 0o755)
	if err := os.Rename(n.socket(), n.path(dir, "plugin.sock")); err != nil {
		t.Fatal(err)
	}
	n.restartDaemon()
	f := n.examine().Findings[0]
	if !strings.Contains(f.Found, "the driver listens on "+n.path(dir, "plugin.sock")) || !n.follow(f.Fix) {
		t.Fatalf("%+v", f)
	}
	if d, _ := config.Load(config.Source{Root: n.root}).Config.Driver(name); d.Socket != n.path(dir, "plugin.sock") {
		t.Errorf("%+v", d)
	}
	if r := n.examine(); len(r.Findings) != 0 {
		t.Errorf("%+v", r.Findings)
	}
}

// Renaming a driver whose volumes are in use would leave them mounted forever.
func TestNoRenameWithVolumesInUse(t *testing.T) {
	n := newNode(t)
	n.volume(podVolume, volData, 0)
	n.mounted(podVolume + "/mount")
	n.driver.set(func(f *fakeDriver) { f.name = "smb.csi.example.com" })
	n.restartDaemon()
	f := n.examine().Findings[0]
	if f.ID != DriverNameMismatch || !strings.Contains(f.Found, "1 volume of "+name+" in use") || strings.Contains(lines(f.Fix), dropInPrefix) {
		t.Errorf("%+v", f)
	}
}

// Removing the label would help only one of the two drivers.
func TestTwoDriversWithOneTopologyKey(t *testing.T) {
	n := newNode(t)
	n.refuse = "detected topology value collision: driver reported \"topology.example.com/zone\":\"b\" but existing label is \"topology.example.com/zone\":\"a\""
	n.restartDaemon()
	n.status.Drivers[0].Topology = map[string]string{"topology.example.com/zone": "b"}
	if fix := lines(n.examine().Findings[0].Fix); !strings.Contains(fix, "topology.example.com/zone- && csi-registrar reregister --force "+name) {
		t.Errorf("%s", fix)
	}
	other := n.status.Drivers[0]
	other.Name = "smb.csi.example.com"
	n.status.Drivers = append(n.status.Drivers, other)
	f := n.examine().Findings[0]
	if strings.Contains(lines(f.Fix), "kubectl label") || !strings.Contains(f.Expected+lines(f.Fix), "smb.csi.example.com") {
		t.Errorf("%+v", f)
	}
}

// chmod follows a symbolic link, and another user could put one there.
func TestNoChmodBelowADirectoryOfAnotherUser(t *testing.T) {
	n := newNode(t)
	chmod(t, n.registry(), 0o777)
	if fix := lines(n.examine().Findings[0].Fix); fix != "chmod 0750 "+n.registry() {
		t.Errorf("%s", fix)
	}
	chmod(t, n.rootDir, 0o777)
	if f := n.examine().Findings[0]; f.ID != RegistryWritable || !f.Fix[0].IsComment() {
		t.Errorf("%+v", f)
	}
}

// AKS makes root_dir writable for everybody (bind-mount.sh): then plugins_registry can be renamed,
// whatever its own mode is.
func TestRegistryThatOthersCanReplace(t *testing.T) {
	n := newNode(t)
	chmod(t, n.rootDir, 0o777)
	r := n.examine()
	if len(r.Findings) != 1 {
		t.Fatalf("%+v", r.Findings)
	}
	f := r.Findings[0]
	if f.ID != RegistryWritable || !strings.Contains(f.Found, n.rootDir+" may be written by its group or others (mode 0777)") {
		t.Errorf("%+v", f)
	}
	if fix := lines(f.Fix); fix != "chmod go-w "+n.rootDir {
		t.Errorf("%s", fix)
	}
	chmod(t, n.rootDir, 0o755)
	if r := n.examine(); len(r.Findings) != 0 {
		t.Errorf("%+v", r.Findings)
	}
}

// A plugins_registry that others can replace, as on AKS, prevents no registration, so it must not
// hide the finding that does.
func TestWritableRegistryHidesNoCause(t *testing.T) {
	for _, open := range []string{"kubelet", "kubelet/plugins_registry"} {
		n := newNode(t)
		chmod(t, n.path(open), 0o777)
		n.refuse = "forbidden"
		n.restartDaemon()
		n.write("proc/812/fdinfo/9", "pos:\t0\nflags:\t02004000\ninotify wd:1 ino:1 sdev:1 mask:fc6 ignored_mask:0\n")
		var found []ID
		for _, f := range n.examine().Findings {
			found = append(found, f.ID)
		}
		if !slices.Equal(found, []ID{RegistryWritable, KubeletWatchesDeleted}) {
			t.Errorf("%s: %v", open, found)
		}
		n.write("proc/812/fdinfo/9", "pos:\t0\nflags:\t02004000\n"+inotifyLine(t, n.registry()))
		found = nil
		for _, f := range n.examine().Findings {
			found = append(found, f.ID)
		}
		if !slices.Equal(found, []ID{RegistryWritable, KubeletRefused}) {
			t.Errorf("%s: %v", open, found)
		}
		if !slices.ContainsFunc(n.examine().Checks, func(c Check) bool { return c.Step == StepFileSystem }) {
			t.Errorf("%s: the file system was not examined", open)
		}
	}
}

// The owner of plugins_registry is checked as well as its mode, and if it is a symbolic link, the
// path to its target.
func TestRegistryOfAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	link := func(t *testing.T, n *node, from string) {
		if err := errors.Join(os.Mkdir(n.path("other"), 0o755), os.Rename(from, n.path("other/real")), os.Symlink(n.path("other/real"), from)); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct {
		what   string
		breaks func(*testing.T, *node)
		want   string // in the fix, which may have no other command
	}{
		{"owner", func(t *testing.T, n *node) { chown(t, n.registry(), 65123) }, "chown -h root "},
		{"root_dir is a link of root", func(t *testing.T, n *node) { link(t, n, n.rootDir); chmod(t, n.registry(), 0o777) }, "chmod 0750 "},
		{"link into a directory of another user", func(t *testing.T, n *node) {
			link(t, n, n.registry())
			chown(t, n.path("other"), 65123)
		}, "chown -h root "},
		{"link to a directory that others may write, in one of another user", func(t *testing.T, n *node) {
			link(t, n, n.registry())
			chmod(t, n.path("other/real"), 0o777)
			chown(t, n.path("other"), 65123)
		}, "# make "},
		{"root_dir is a link of another user", func(t *testing.T, n *node) {
			link(t, n, n.rootDir)
			if err := os.Lchown(n.rootDir, 65123, 65123); err != nil {
				t.Fatal(err)
			}
		}, "# make "}, // not rm: the kubelet needs the link
	} {
		t.Run(test.what, func(t *testing.T) {
			n := newNode(t)
			test.breaks(t, n)
			r := n.examine()
			if len(r.Findings) != 1 || r.Findings[0].ID != RegistryWritable {
				t.Fatalf("%+v", r.Findings)
			}
			if fix := lines(r.Findings[0].Fix); !strings.HasPrefix(fix, test.want) || strings.Contains(fix, "\n") {
				t.Errorf("%s", fix)
			}
		})
	}
}
