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
	n.units["csi-nfs.service"] = map[string]string{"ActiveState": "activating", "SubState": "start-post", "MainPID": "4711"}
	n.write("usr/lib/systemd/system/csi-nfs.service", "[Service]\nExecStart=/usr/bin/nfs unix://"+n.socket()+"\n")
	n.driver.stop()
	n.restartDaemon()
	if f, _ := finding(n.examine(), "driver-socket-missing"); !strings.Contains(f.Found, "its process 4711 listens on TCP port 9809: a driver's flag --endpoint must name a Unix socket") {
		t.Errorf("%+v", f)
	}
}
