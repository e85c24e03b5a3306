package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
)

func finding(r Report, id ID) (Finding, bool) {
	i := slices.IndexFunc(r.Findings, func(f Finding) bool { return f.ID == id })
	if i < 0 {
		return Finding{}, false
	}
	return r.Findings[i], true
}

// Volumes in use of a driver that nobody registers are a problem, and the file that looks like its
// table is named.
func TestUnregisteredVolumes(t *testing.T) {
	const dir = "usr/lib/csi-registrar/conf.d/"
	for _, file := range []string{"10-nfs.conf", "10-nfs.toml~", "10-nfs.toml.rpmsave", "10-nfs.toml.dpkg-old", ".10-nfs.toml.swp"} {
		t.Run(file, func(t *testing.T) {
			n := newNode(t)
			n.volume(volumeOfPod, volData, time.Hour)
			n.mounted(volumeOfPod + "/mount")
			if r := n.examine(); len(r.Findings) > 0 {
				t.Fatalf("with its table: %+v", r.Findings)
			}
			if err := os.Rename(n.path(dir+"10-nfs.toml"), n.path(dir+file)); err != nil {
				t.Fatal(err)
			}
			n.restartDaemon()
			f, ok := finding(n.examine(), "volumes-unregistered")
			if !ok || f.Severity != Problem || f.Driver != name || !strings.Contains(f.Found, "1 volume in use, which the kubelet cannot unmount") ||
				!strings.Contains(f.Found, filepath.Base(file)) || !strings.Contains(f.Found, "has a table for it") {
				t.Fatalf("without: %+v", f)
			}
			n.follow(f.Fix)
			n.restartDaemon()
			if r := n.examine(); len(r.Findings) > 0 {
				t.Errorf("after the fix %s: %+v", lines(f.Fix), r.Findings)
			}
		})
	}
}

// A driver of the daemon that has no table is a problem, one that another registrar serves nothing.
func TestVolumesOfADriverWithoutTable(t *testing.T) {
	n := newNode(t)
	n.volume("pods/0123/volumes/kubernetes.io~csi/kept", `{"driverName":"kept.example","volumeHandle":"v"}`, 0)
	n.status.Drivers = append(n.status.Drivers, status.Driver{Name: "kept.example", NoTable: true})
	for _, drivers := range [][]string{nil, {"kept.example"}} {
		r := n.examine(drivers...)
		if len(r.Findings) != 1 || r.Findings[0].ID != "driver-without-table" || r.Healthy {
			t.Errorf("%q: %+v", drivers, r.Findings)
		}
	}
	n.status.Drivers = n.status.Drivers[:1]
	if f, ok := finding(n.examine(), "volumes-unregistered"); !ok || f.Driver != "kept.example" || !strings.Contains(lines(f.Fix), "a table for kept.example") {
		t.Errorf("nobody registers it: %+v", f)
	}
	n.write("etc/csi-registrar/conf.d/70-kept.toml", "")
	if f, _ := finding(n.examine(), "volumes-unregistered"); !strings.HasSuffix(f.Found, "/etc/csi-registrar/conf.d/70-kept.toml is empty") {
		t.Errorf("an empty file: %+v", f)
	}
	n.remove(n.path("etc/csi-registrar/conf.d/70-kept.toml"))
	n.write("usr/lib/csi-registrar/conf.d/30-kept.toml", "[driver.\"kept.example\"]\nsocket = \"/run/kept/csi.sock\"\n")
	n.write("etc/csi-registrar/conf.d/30-kept.toml", "")
	if f, _ := finding(n.examine(), "volumes-unregistered"); !strings.HasSuffix(f.Found, ", which configures it, is hidden by "+n.path("etc/csi-registrar/conf.d/30-kept.toml")) ||
		lines(f.Fix) != "mv -n "+n.path("etc/csi-registrar/conf.d/30-kept.toml")+" "+n.path("etc/csi-registrar/conf.d/30-kept_too.toml")+"\ncsi-registrar reload" {
		t.Errorf("a hidden file: %+v", f)
	}
	n.remove(n.path("etc/csi-registrar/conf.d/30-kept.toml"))
	n.remove(n.path("usr/lib/csi-registrar/conf.d/30-kept.toml"))
	dir := n.path("etc/csi-registrar/conf.d")
	n.write("proc/self/mountinfo", "22 21 0:40 / "+dir+" rw - tmpfs none rw\n")
	if f, _ := finding(n.examine(), "volumes-unregistered"); !strings.HasSuffix(f.Found, "; the file system that is mounted at "+dir+" is empty") || lines(f.Fix) != "umount "+dir+"\ncsi-registrar reload" {
		t.Errorf("an empty mount: %+v", f)
	}
	stop := servePlugin(t, filepath.Join(n.registry(), "other-reg.sock"), registration{kind: "CSIPlugin", name: "kept.example"})
	if r := n.examine(); len(r.Findings) > 0 {
		t.Errorf("a sidecar registers it: %+v", r.Findings)
	}
	stop()
	n.write("etc/csi-registrar/conf.d/60-kept.toml", "[driver.\"kept.example\"]\nsocket = \"/run/kept.sock\"\nenabled = false\n")
	n.restartDaemon()
	if f, ok := finding(n.examine(), "volumes-unregistered"); !ok || !strings.Contains(f.Found, "enabled = false") || !strings.Contains(lines(f.Fix), "enabled = true") {
		t.Errorf("disabled: %+v", f)
	}
	n.write("etc/csi-registrar/conf.d/60-kept.toml", fmt.Sprintf("[driver.%q]\nsokt = \"/run/kept.sock\"\n", "kept.example"))
	n.restartDaemon()
	if r := n.examine(); len(config.Load(n.source()).Errors) == 0 || slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.ID != "configuration-error" }) {
		t.Errorf("with an error in its table: %+v", r.Findings)
	}
}

// A unit that is masked cannot be started.
func TestMaskedUnits(t *testing.T) {
	n := newNode(t)
	masked := map[string]string{"LoadState": "masked", "ActiveState": "failed", "SubState": "failed"}
	n.units["kubelet.service"], n.units["csi-nfs.service"] = masked, masked
	n.driver.stop()
	n.restartDaemon()
	n.write("usr/lib/systemd/system/csi-nfs.service", "[Service]\nExecStart=/usr/bin/nfs unix://"+n.socket()+"\n")
	if f, _ := finding(n.examine(), "driver-socket-missing"); !strings.HasSuffix(lines(f.Fix), "systemctl unmask csi-nfs.service\nsystemctl enable csi-nfs.service\nsystemctl restart --no-block csi-nfs.service\n# if it listens elsewhere: set socket in the table of the driver") {
		t.Errorf("%s", lines(f.Fix))
	}
	masked["UnitFileState"] = "masked-runtime"
	if f, _ := finding(n.examine(), "driver-socket-missing"); !strings.Contains(lines(f.Fix), "\nsystemctl unmask --runtime csi-nfs.service\nsystemctl restart --no-block csi-nfs.service\n") {
		t.Errorf("%s", lines(f.Fix))
	}
	delete(masked, "UnitFileState")
	n.remove(n.path("proc/812"))
	if f, _ := finding(n.examine(), "no-kubelet"); !strings.HasPrefix(lines(f.Fix), "systemctl unmask kubelet.service\nsystemctl enable kubelet.service\nsystemctl start kubelet.service\n") {
		t.Errorf("%s", lines(f.Fix))
	}
}

// An upgrade that was interrupted leaves the old daemon.
func TestDaemonOfAnotherVersion(t *testing.T) {
	n := newNode(t)
	for version, found := range map[string]bool{"": false, "1": false, "2": true} {
		r := Run(t.Context(), Options{Source: n.source(), Units: n.units, Root: n.root, Version: version})
		f, ok := finding(r, "daemon-outdated")
		if ok != found || found && (f.Found != "the daemon is version 1, this program 2" || !r.Healthy) {
			t.Errorf("%q: %+v", version, r.Findings)
		}
	}
	f, _ := finding(Run(t.Context(), Options{Source: n.source(), Units: n.units, Root: n.root, Version: "2"}), "daemon-outdated")
	if got := lines(f.Fix); got != "# if dpkg was interrupted:\n# dpkg --configure csi-registrar\nsystemctl restart csi-registrar.service" {
		t.Error(got)
	}
}

// The process that uses the port of health and metrics, and a driver that listens on TCP, are found
// by their sockets.
func TestTCPPorts(t *testing.T) {
	n := newNode(t)
	n.process(4711, "exporter", "0::/system.slice/exporter.service")
	n.mkdir(n.path("proc/4711/fd"), 0o700)
	if err := os.Symlink("socket:[55]", n.path("proc/4711/fd/3")); err != nil {
		t.Fatal(err)
	}
	const head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	n.write("proc/4711/net/tcp", head+"   0: 0100007F:2652 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 54 1\n"+
		"   1: 0100007F:2653 0100007F:2651 01 00000000:00000000 00:00000000 00000000     0        0 55 1\n"+
		"   2: 0100007F:2651 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 55 1\n")
	n.units[httpUnit]["ActiveState"] = "failed"
	r := n.examine()
	if len(r.Findings) != 1 || r.Findings[0].ID != "http-failed" || !r.Healthy || !strings.HasSuffix(r.Findings[0].Found, "on 127.0.0.1:9809, has failed: exporter (pid 4711, exporter.service) listens on its port") {
		t.Errorf("%+v", r.Findings)
	}
	const stop = "# if that program is not needed:\n# systemctl disable --now exporter.service\n# otherwise on another port, which monitoring must be told\n" +
		"mkdir -p /etc/systemd/system/csi-registrar-http.socket.d\nprintf '%s\\n' '[Socket]' ListenStream= ListenStream=127.0.0.1:9810 > /etc/systemd/system/csi-registrar-http.socket.d/zz-doctor-port.conf\n"
	if got := lines(r.Findings[0].Fix); !strings.HasPrefix(got, stop) || !strings.HasSuffix(got, "\nsystemctl restart csi-registrar.service") {
		t.Errorf("%s", got)
	}
	n.units["csi-nfs.service"] = map[string]string{"ActiveState": "activating", "SubState": "start-post", "MainPID": "4711"}
	const file, dropIn = "/usr/lib/systemd/system/csi-nfs.service", "/etc/systemd/system/csi-nfs.service.d/tcp.conf"
	n.units["csi-nfs.service"]["FragmentPath"], n.units["csi-nfs.service"]["DropInPaths"] = file, dropIn
	n.write(file, "[Service]\nExecStart=/usr/bin/nfs unix://"+n.socket()+"\n")
	n.write(dropIn, "[Service]\nExecStart=\nExecStart=/usr/bin/nfs --endpoint tcp://127.0.0.1:9809 -v\n")
	n.write("proc/4711/cmdline", "/usr/bin/nfs\x00--endpoint\x00tcp://127.0.0.1:9809\x00-v\x00")
	n.driver.stop()
	n.restartDaemon()
	f, _ := finding(n.examine(), "driver-socket-missing")
	if !strings.Contains(f.Found, "its process 4711 listens on TCP port 9809: a driver's flag --endpoint must name a Unix socket") {
		t.Errorf("%+v", f)
	}
	want := "sed -i '3s|tcp://127.0.0.1:9809|unix://" + n.socket() + "|' " + dropIn + "\n" +
		"systemctl daemon-reload\nsystemctl restart --no-block csi-nfs.service"
	if got := lines(f.Fix); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	// It listens on another Unix socket. What only the file of the package names is edited by hand.
	n.remove(n.path("proc/4711/net/tcp"))
	n.write("proc/4711/net/unix", "Num       RefCount Protocol Flags    Type St Inode Path\n0: 00000002 00000000 00010000 0001 01 55 /tmp/csi.sock\n"+
		"0: 00000002 00000000 00000000 0001 03 55 /tmp/connected\n0: 00000002 00000000 00010000 0001 01 56 /tmp/other\n")
	n.write(dropIn, "[Service]\nExecStart=\nExecStart=/usr/bin/nfs --endpoint unix:///tmp/csi.sock -v\n")
	f, _ = finding(n.examine(), "driver-socket-missing")
	if !strings.Contains(f.Found, "; its process 4711 listens on /tmp/csi.sock") || !strings.HasPrefix(lines(f.Fix), "sed -i '3s|/tmp/csi.sock|"+n.socket()+"|' "+dropIn+"\nsystemctl daemon-reload\n") {
		t.Errorf("%+v", f)
	}
	n.units["csi-nfs.service"]["DropInPaths"] = ""
	n.write(file, "[Service]\nExecStart=/usr/bin/nfs unix:///tmp/csi.sock # "+n.socket()+"\n")
	if f, _ = finding(n.examine(), "driver-socket-missing"); !strings.HasPrefix(lines(f.Fix), "# in "+file+":2 write "+n.socket()+" in place of /tmp/csi.sock, then run the next lines\n") {
		t.Errorf("%+v", f)
	}
}

// What fills a file system is named; a mount below it is another file system.
func TestLargestFile(t *testing.T) {
	n := newNode(t)
	dir := n.path("full")
	n.write("full/small", strings.Repeat("x", 5000))
	n.write("full/sub/big", strings.Repeat("x", 300<<10))
	if err := os.Truncate(filepath.Join(dir, "small"), 1<<30); err != nil { // it has no blocks
		t.Fatal(err)
	}
	x := newDiagnosis(Options{Source: n.source(), Units: n.units, Root: n.root})
	got, file := x.largest(t.Context(), dir, "space")
	if want := "; its largest file is " + filepath.Join(dir, "sub/big") + " (300 KiB)"; got != want || file != filepath.Join(dir, "sub/big") {
		t.Errorf("%q, want %q", got, want)
	}
	n.write("full/sub/empty", "")
	n.write("full/sub/empty2", "")
	got, file = x.largest(t.Context(), dir, "inodes")
	if want := "; most of them are in " + filepath.Join(dir, "sub") + " (3 files)"; got != want || file != "" {
		t.Errorf("%q, want %q", got, want)
	}
	if got, _ = x.largest(t.Context(), filepath.Join(dir, "none"), "space"); got != "" {
		t.Errorf("%q", got)
	}
}

// A driver whose table was removed is found where drivers listen.
func TestDriverWithoutTableThatAnswers(t *testing.T) {
	n := newNode(t)
	n.volume(volumeOfPod, volData, time.Hour)
	n.mounted(volumeOfPod + "/mount")
	socket := filepath.Join(n.rootDir, "plugins/nfs/csi.sock")
	n.mkdir(filepath.Dir(socket), 0o755)
	n.driver.stop()
	n.driver.start(t, socket)
	n.remove(n.path("usr/lib/csi-registrar/conf.d/10-nfs.toml"))
	n.restartDaemon()
	r := n.examine()
	f, _ := finding(r, "volumes-unregistered")
	if !strings.HasSuffix(f.Found, "; it listens on "+socket) {
		t.Fatalf("%+v", r.Findings)
	}
	if !n.follow(f.Fix) {
		t.Fatal("no command")
	}
	if d, _ := config.Load(n.source()).Config.Driver(name); d.Socket != socket {
		t.Errorf("%+v", d)
	}

	// Its path in the file is wrong.
	n.write("etc/csi-registrar/conf.d/99-doctor-"+name+"-socket.toml", "[driver.\""+name+"\"]\nsocket = \"{{ root }}/csi.sock\"\n")
	n.restartDaemon()
	f, _ = finding(n.examine(), "configuration-error")
	if f.Expected != "the driver listens on "+socket || !n.follow(f.Fix) {
		t.Fatalf("%+v", f)
	}
	if d, _ := config.Load(n.source()).Config.Driver(name); d.Socket != socket {
		t.Errorf("%+v", d)
	}
	dir := n.path("etc/csi-registrar/conf.d")
	n.remove(dir)
	n.remove(n.path("usr/lib/csi-registrar/conf.d"))
	if err := os.Symlink("/srv/gone", dir); err != nil {
		t.Fatal(err)
	}
	n.restartDaemon()
	r = n.examine()
	f, _ = finding(r, "volumes-unregistered")
	if !strings.HasSuffix(f.Found, "; "+dir+" is a link to /srv/gone, which does not exist") || !strings.HasPrefix(lines(f.Fix), "# create /srv/gone, or remove the link to it: rm "+dir+"\n") {
		t.Errorf("%+v", r.Findings)
	}
}
