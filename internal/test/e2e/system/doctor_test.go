package system

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/built"
)

// sick is the driver of these nodes, and its unit.
const (
	sick     = "x.sample.csi"
	sickUnit = "csi-x.service"
	sickDir  = "/run/csi-x"
)

// sickness is a fault of a node that doctor must find, with a fix that works.
type sickness struct {
	id     string
	breaks string // a script
	named  bool   // doctor is asked for the driver by name
	person string // a script: what only a person can do, as the fix says
	after  string // a script that removes what the fix leaves behind
	seen   string // part of the text of another finding that doctor must have
}

// fault gives the driver a fault until it is restarted.
func fault(list string) string {
	return "printf '%s' '" + list + "' > " + sickDir + "/faults; csi-registrar reload"
}

// restarted restarts the driver with other answers: a registered driver is asked again after a
// restart.
func restarted(list string) string {
	return "printf '%s' '" + list + "' > " + sickDir + "/next; systemctl reset-failed " + sickUnit + " || true; systemctl restart " + sickUnit
}

// plays stops the driver and makes another program of the driver's unit take its socket, until the
// unit is restarted.
func plays(what string) string {
	return "touch " + sickDir + "/once-" + what + "; systemctl restart " + sickUnit
}

// sicknesses has one list for each machine, on which its faults are tried one after the other.
var sicknesses = map[string][]sickness{
	"driver": {
		{id: "driver-socket-missing", breaks: "systemctl stop " + sickUnit + "; rm -f " + sickDir + "/csi.sock", seen: sickUnit + " is inactive"},
		{id: "driver-socket-missing", breaks: "systemctl stop " + sickUnit + " " + unit + "; rm -f " + sickDir + "/csi.sock; systemctl start " + unit, seen: sickUnit + " is inactive"},
		{id: "driver-socket-stale", breaks: "systemctl stop " + sickUnit + "; rm -f " + sickDir + "/csi.sock; faulty stale " + sickDir + "/csi.sock", seen: sickUnit + " is inactive"},
		{id: "driver-socket-not-socket", breaks: "systemctl stop " + sickUnit + "; rm -f " + sickDir + "/csi.sock; mkdir " + sickDir + "/csi.sock"},
		{id: "driver-connection-failed", breaks: plays("datagram")},
		{id: "driver-not-accepting", breaks: plays("deaf")},
		{id: "driver-not-trusted", breaks: "chown nobody " + sickDir + "/csi.sock"},
		{id: "driver-not-trusted", breaks: "chmod 0777 " + sickDir},
		{id: "driver-socket-forbidden", breaks: "chown nobody " + sickDir + "/csi.sock; chmod 0600 " + sickDir + "/csi.sock; " +
			"printf '[driver.\"" + sick + "\"]\nsocket_owner = \"nobody\"\n' > /etc/csi-registrar/conf.d/50-x.toml; systemctl restart " + unit,
			after: "rm /etc/csi-registrar/conf.d/50-x.toml /etc/systemd/system/" + unit + ".d/zz-doctor-dac-override.conf; systemctl daemon-reload; systemctl restart " + sickUnit + " " + unit},
		{id: "driver-not-answering", breaks: fault(`{"Hang": "GetPluginInfo"}`)},
		{id: "driver-not-answering", breaks: "systemctl freeze " + sickUnit, seen: "by systemctl freeze"},
		{id: "driver-call-failed", breaks: fault(`{"Fail": "NodeGetInfo"}`)},
		{id: "driver-method-missing", breaks: fault(`{"Unimplemented": "NodeGetInfo"}`)},
		{id: "driver-name-empty", breaks: fault(`{"Name": ""}`)},
		{id: "driver-not-ready", breaks: fault(`{"NotReady": true}`)},
		{id: "driver-unit-restarting", breaks: "mkdir -p /etc/systemd/system/" + sickUnit + ".d; printf '[Unit]\\nStartLimitIntervalSec=0\\n[Service]\\nRuntimeMaxSec=5\\nRestart=always\\nRestartSec=100ms\\n' > /etc/systemd/system/" + sickUnit + ".d/x.conf; " +
			"systemctl daemon-reload; systemctl restart " + sickUnit + "; until systemctl show -p NRestarts " + sickUnit + " | grep -q '=[3-9]'; do sleep 0.1; done; until test -S " + sickDir + "/csi.sock; do sleep 0.1; done",
			seen: "RuntimeMaxSec=5", person: "rm /etc/systemd/system/" + sickUnit + ".d/x.conf; systemctl daemon-reload; systemctl restart " + sickUnit},
		{id: "driver-name-mismatch", breaks: fault(`{"Name": "y.sample.csi"}`),
			after: "rm /etc/csi-registrar/conf.d/99-doctor-*; systemctl restart " + sickUnit + "; csi-registrar reload"},
	},
	"answers": {
		{id: "node-id-invalid", breaks: fault(`{"NodeID": ""}`)},
		{id: "topology-invalid", breaks: fault(`{"Topology": {"a b": "c"}}`)},
		{id: "volume-limit-invalid", breaks: fault(`{"MaxVolumes": -1}`)},
		{id: "endpoint-unusable", breaks: "printf '[driver.\"" + sick + "\"]\\nendpoint = \"/nowhere/csi.sock\"\\n' > /etc/csi-registrar/conf.d/50-x.toml; csi-registrar reload"},
		{id: "another-registrar", breaks: "systemctl start other-registrar.service"},
		// Older than the kubelet.
		{id: "plugin-socket-stale", breaks: "faulty stale " + registry + "/dead-reg.sock; touch -d '1 hour ago' " + registry + "/dead-reg.sock"},
		{id: "registration-conflict", breaks: "systemctl stop " + unit + "; touch " + regSocket(sick) + "; systemctl start " + unit},
		{id: "configuration-error", breaks: "printf '[driver.\"" + sick + "\"]\\ntimeout = \"soon\"\\n' > /etc/csi-registrar/conf.d/50-x.toml; csi-registrar reload || true", seen: "50-x.toml:2",
			after: "rm /etc/csi-registrar/conf.d/50-x.toml; csi-registrar reload"},
		{id: "configuration-not-loaded", breaks: "chmod 0600 /etc/csi-registrar/conf.d; csi-registrar reload || true", seen: "permission denied"},
		{id: "driver-not-configured", named: true, breaks: "mv /etc/csi-registrar/conf.d/20-x.toml /etc/csi-registrar/conf.d/20-x.toml.bak; rm -f /etc/csi-registrar/conf.d/99-doctor-* /etc/csi-registrar/conf.d/50-x.toml; csi-registrar reload --force", seen: "20-x.toml.bak has a table for it"},
		{id: "no-driver-configured", breaks: "mv /etc/csi-registrar/conf.d/20-x.toml /root; csi-registrar reload --force", person: "mv /root/20-x.toml /etc/csi-registrar/conf.d; csi-registrar reload"},
		{id: "driver-disabled", named: true, breaks: "printf '[driver.\"" + sick + "\"]\\nenabled = false\\n' > /etc/csi-registrar/conf.d/50-x.toml; csi-registrar reload"},
		{id: "configuration-hidden", named: true, breaks: "mv /etc/csi-registrar/conf.d/20-x.toml /usr/lib/csi-registrar/conf.d/20-x.toml; rm -f /etc/csi-registrar/conf.d/99-doctor-* /etc/csi-registrar/conf.d/50-x.toml; " +
			": > /etc/csi-registrar/conf.d/20-x.toml; csi-registrar reload"},
		{id: "configuration-error", breaks: "chown nobody /usr/lib/csi-registrar/conf.d/20-x.toml; csi-registrar reload || true"},
		{id: "driver-socket-hidden", breaks: "mkdir -p /tmp/csi-x; printf '[driver.\"" + sick + "\"]\\nsocket = \"/tmp/csi-x/csi.sock\"\\n' > /etc/csi-registrar/conf.d/50-x.toml; " +
			"mkdir -p /etc/systemd/system/" + sickUnit + ".d; printf '[Service]\\nExecStart=\\nExecStart=/usr/bin/faulty driver --socket /tmp/csi-x/csi.sock --name " + sick + " --faults " + sickDir + "/faults\\n' > /etc/systemd/system/" + sickUnit + ".d/tmp.conf; " +
			"systemctl daemon-reload; systemctl restart " + sickUnit + "; csi-registrar reload"},
	},
	"unit": {
		{id: "unit-stopped", breaks: "systemctl stop " + unit},
		{id: "unit-masked", breaks: "systemctl stop " + unit + "; systemctl mask " + unit},
		{id: "unit-missing", breaks: "systemctl stop " + unit + "; mv /usr/lib/systemd/system/" + unit + " /root; systemctl daemon-reload",
			person: "mv /root/" + unit + " /usr/lib/systemd/system; systemctl daemon-reload; systemctl enable --now " + unit},
		{id: "unit-not-enabled", breaks: "systemctl disable " + unit},
		{id: "unit-changed", breaks: "mkdir -p /etc/systemd/system/" + unit + ".d; printf '[Service]\\nNice=1\\n' > /etc/systemd/system/" + unit + ".d/nice.conf"},
		{id: "unit-failed", breaks: dropIn("failed", "Restart=no") + "; systemctl kill --signal=KILL " + unit + "; until systemctl is-failed " + unit + "; do sleep 0.1; done",
			after: "rm -f /etc/systemd/system/" + unit + ".d/failed.conf; systemctl daemon-reload; systemctl restart " + unit},
		{id: "unit-restarting", breaks: dropIn("user", "User=nobody-there") + " || true", seen: "sets \"User=nobody-there\""},
		{id: "unit-not-loaded", breaks: dropIn("second", "ExecStart=/usr/bin/csi-registrar run") + " || true", seen: "more than one ExecStart= setting"},
		{id: "unit-failed", breaks: "sed 's,^ExecStart=/usr/bin/,ExecStart=/none/,; /^Restart/d' /usr/lib/systemd/system/" + unit + " > /etc/systemd/system/" + unit + "; systemctl daemon-reload; systemctl restart " + unit + " || true",
			seen: "is in place of the unit of the package"},
		{id: "watchdog-off", breaks: dropIn("watchdog", "WatchdogSec=0")},
		{id: "store-too-small", breaks: dropIn("store", "FileDescriptorStoreMax=0")},
		{id: "sockets-not-kept", breaks: dropIn("start", "ExecStart=", "ExecStart=/usr/bin/csi-registrar run")},
		{id: "root-dir-not-writable", breaks: dropIn("masks", "InaccessiblePaths=-/var/lib/kubelet"), seen: "is hidden from it",
			person: "rm /etc/systemd/system/" + unit + ".d/masks.conf; systemctl daemon-reload; systemctl restart " + unit},
		{id: "http-failed", breaks: "systemctl stop " + unit + "; systemctl enable csi-registrar-http.socket; systemd-run --quiet --unit=port perl -MIO::Socket::INET -e 'IO::Socket::INET->new(LocalAddr => \"127.0.0.1:9809\", Listen => 1)->accept'; " +
			"until grep -q :2651 /proc/net/tcp; do sleep 0.1; done; systemctl start " + unit, seen: "listens on its port",
			after: "systemctl stop port; rm -r /etc/systemd/system/csi-registrar-http.socket.d; systemctl daemon-reload; systemctl restart " + unit},
		{id: "daemon-outdated", breaks: "cp /usr/bin/csi-registrar /root; " +
			"v=$(csi-registrar version | cut -d' ' -f2); sed \"s/$v/$(echo $v | tr 0-9 9)/g\" /root/csi-registrar > /usr/bin/new; chmod 0755 /usr/bin/new; mv /usr/bin/new /usr/bin/csi-registrar; systemctl restart " + unit + "; mv /root/csi-registrar /usr/bin"},
		{id: "changes-polled", breaks: dropIn("inotify", "SystemCallFilter=~inotify_init inotify_init1:EMFILE"), seen: "limit of inotify instances",
			person: "rm /etc/systemd/system/" + unit + ".d/inotify.conf; systemctl daemon-reload; systemctl restart " + unit, after: "rm /etc/sysctl.d/90-csi-registrar-*"},
		{id: "file-system-read-only", breaks: "systemctl stop " + unit + "; chattr +i " + registry + "; systemctl start " + unit, seen: "immutable"},
		{id: "daemon-not-running", breaks: "rm /run/csi-registrar/control.sock"},
		{id: "daemon-not-answering", breaks: "kill -STOP $(systemctl show --value --property=MainPID " + unit + ")"},
	},
	"kubelet": {
		{id: "kubelet-not-watching", breaks: kubeletOnce("idle")},
		{id: "kubelet-not-asking", breaks: kubeletOnce("watch"), seen: "since the start of kubelet (pid "},
		{id: "kubelet-not-confirming", breaks: kubeletOnce("ask")},
		{id: "no-runtime", breaks: "printf '[Service]\\nExecStart=/bin/sleep infinity\\n' > /etc/systemd/system/containerd.service; systemctl daemon-reload", seen: "containerd.service is inactive",
			after: "systemctl stop containerd.service; rm /etc/systemd/system/containerd.service; systemctl daemon-reload"},
		{id: "no-kubelet", breaks: "systemctl stop kubelet.service", seen: "kubelet.service is inactive"},
		{id: "second-kubelet", breaks: "mkdir -p /data/old; printf '[Service]\nExecStart=/w/kubelet --root /data/old --node node-2 --state /data/old.json\n[Install]\nWantedBy=multi-user.target\n' > /etc/systemd/system/old.service; " +
			"systemctl daemon-reload; systemctl enable --now old", seen: "old.service", person: "systemctl disable --now old.service"},
		{id: "kubelet-frozen", breaks: "systemctl freeze kubelet.service", seen: "by systemctl freeze"},
		{id: "kubelet-frozen", breaks: "kill -STOP $(systemctl show --value --property=MainPID kubelet.service)"},
		{id: "plugins-registry-link", breaks: "systemctl stop kubelet.service; mkdir -p /data; mv " + registry + " /data/registry; ln -s /data/registry " + registry + "; systemctl restart " + unit + "; systemctl start kubelet.service",
			after: "systemctl stop kubelet.service; umount " + registry + "; systemctl restart " + unit + "; systemctl start kubelet.service"},
		{id: "plugins-registry-writable", breaks: "chmod 0777 " + registry},
		{id: "plugins-registry-writable", breaks: "chmod a+w /var/lib/kubelet", seen: "or replace it"},
		{id: "kubelet-watches-deleted", breaks: "systemctl stop " + unit + "; mv " + registry + " /var/lib/kubelet/old; mkdir -m 0750 " + registry + "; systemctl start " + unit,
			after: "rm -rf /var/lib/kubelet/old"},
		{id: "plugins-registry-missing", breaks: "systemctl stop " + unit + "; rm -rf " + registry},
		{id: "plugins-registry-not-directory", breaks: "systemctl stop " + unit + "; rm -rf " + registry + "; touch " + registry},
		{id: "root-dir-not-writable", breaks: "mkdir -p /data/kubelet /etc/systemd/system/kubelet.service.d; printf '[Service]\\nExecStart=\\nExecStart=/w/kubelet --root /data/kubelet --node node-1 --state /var/lib/kubelet-state.json\\n' > /etc/systemd/system/kubelet.service.d/root.conf; " +
			"systemctl daemon-reload; systemctl restart kubelet.service; printf '[kubelet]\\nroot_dir = \"/data/kubelet\"\\n' > /etc/csi-registrar/conf.d/60-root.toml; csi-registrar reload || true"},
		{id: "root-dir-mismatch", breaks: "rm /etc/systemd/system/kubelet.service.d/root.conf; systemctl daemon-reload; systemctl restart kubelet.service"},
		{id: "plugins-registry-covered", breaks: "mkdir -p /data/late; mount --bind /data/late /var/lib/kubelet; mkdir -m 0750 -p " + registry},
	},
	// The remains of these would affect later tests.
	"filesystem": {
		{id: "file-system-full", breaks: "systemctl stop kubelet " + unit + "; mount -t tmpfs -o size=1m,nr_inodes=100,mode=0755 tmpfs /var/lib/kubelet; mkdir -m 0750 " + registry + "; " +
			"systemctl start kubelet; cat /dev/zero > /var/lib/kubelet/junk || true; systemctl start " + unit, seen: "no space left", person: "rm /var/lib/kubelet/junk"},
		{id: "file-system-full", breaks: "systemctl stop " + unit + "; i=0; while touch /var/lib/kubelet/junk-$i; do i=$((i+1)); done; systemctl start " + unit,
			seen: "no inodes left", person: "rm /var/lib/kubelet/junk-*"},
	},
	"readonly": {
		{id: "file-system-read-only", breaks: "systemctl stop kubelet " + unit + "; mount -t tmpfs -o mode=0755 tmpfs /var/lib/kubelet; mkdir -m 0750 " + registry + "; systemctl start kubelet " + unit + "; csi-registrar wait; " +
			"mount -o remount,ro /var/lib/kubelet; systemctl restart kubelet || true", seen: "/var/lib/kubelet"},
	},
	"store": {
		{id: "store-too-small", breaks: dropIn("store", "FileDescriptorStoreMax=0")},
		{id: "registration-not-kept", breaks: "rm /etc/systemd/system/" + unit + ".d/zz-doctor-*; " + dropIn("store", "Environment=CSI_REGISTRAR_FDSTORE=1") + "; systemd-run --quiet --unit=second --property=RuntimeDirectory=csi-second faulty driver --socket /run/csi-second/csi.sock --name second.sample.csi --faults /run/csi-second/faults; " +
			"printf '[driver.\"second.sample.csi\"]\nsocket = \"/run/csi-second/csi.sock\"\n' > /etc/csi-registrar/conf.d/50-second.toml; csi-registrar wait --timeout 20s", seen: "is full"},
	},
	"changes": {
		{id: "kubelet-refused", breaks: "echo 'label sample.example/rack=a' > /run/kubelet.input; " + restarted(`{"Topology": {"sample.example/rack": "b"}}`),
			seen: "sample.example/rack", person: "until csi-registrar reregister --force " + sick + "; do sleep 0.1; done"},
		{id: "topology-changed", breaks: restarted(`{"Topology": {"sample.example/zone": "a"}}`) + "; until grep -q sample.example/zone /var/lib/kubelet-state.json; do sleep 0.1; done; csi-registrar wait; " +
			restarted(`{"Topology": {"sample.example/zone": "b"}}`), seen: "sample.example/zone", person: "until csi-registrar reregister --force " + sick + "; do sleep 0.1; done"},
		{id: "registration-damped", breaks: "i=0; until csi-registrar status --json | grep -q damped_until; do i=$((i+1)); " + restarted(`{"MaxVolumes": '$i'}`) + "; until csi-registrar status --json | grep -Eq '\"max_volumes_per_node\": '$i','; do sleep 0.1; done; csi-registrar wait --timeout 5s || true; done"},
	},
	"mounts": {
		{id: "mounts-not-propagated", breaks: driverDropIn("PrivateMounts=yes"), seen: "mounts where the kubelet does not see it: PrivateMounts=yes in /etc/systemd/system/" + sickUnit + ".d/mounts.conf", after: noDropIn},
		{id: "mounts-not-propagated", breaks: driverDropIn("MountFlags=slave", "ReadOnlyPaths=/etc"), seen: "MountFlags=slave in ", after: noDropIn},
		{id: "mounts-not-propagated", breaks: driverDropIn("PrivateTmp=yes", "PrivateMounts=no"), seen: "PrivateTmp=yes in ", after: noDropIn},
		{id: "mounts-not-propagated", breaks: driverDropIn("TemporaryFileSystem=/var/lib/kubelet/pods"), seen: "has another directory than the kubelet at /var/lib/kubelet/pods: TemporaryFileSystem=", after: noDropIn},
		{id: "mounts-not-propagated", breaks: driverDropIn("TemporaryFileSystem=/var/lib/kubelet"), seen: "has no /var/lib/kubelet/pods: TemporaryFileSystem=", after: noDropIn},
		// Before it has started the program, systemd changes the root of the mount namespace.
		{id: "volume-misplaced", breaks: driverDropIn("PrivateMounts=yes") + "; " + volume + "; pid=$(systemctl show --value --property=MainPID " + sickUnit + "); " +
			"until grep -q faulty /proc/$pid/comm; do sleep 0.1; done; nsenter -m -t $pid mount -t tmpfs tmpfs " + volumeDir + "/mount",
			seen: "(pod 0f9e8d7c-1111-2222-3333-444455556666, 0 bytes in 0 files); faulty (pid ", after: noDropIn + "; " + noVolume},
		{id: "volume-not-mounted", breaks: volume + "; touch -d '10 minutes ago' " + volumeDir + "/vol_data.json", person: "mount -t tmpfs tmpfs " + volumeDir + "/mount", after: noVolume},
		{id: "pods-waiting", breaks: volume + "; touch -d '2 minutes ago' " + volumeDir, person: "mount -t tmpfs tmpfs " + volumeDir + "/mount", after: noVolume},
		{id: "driver-without-table", breaks: volume + "; mount -t tmpfs tmpfs " + volumeDir + "/mount; mv /etc/csi-registrar/conf.d/20-x.toml /etc/csi-registrar/conf.d/20-x.conf; csi-registrar reload", seen: "20-x.conf has a table for it"},
		{id: "volumes-unregistered", breaks: "mv /etc/csi-registrar/conf.d/20-x.toml /etc/csi-registrar/conf.d/20-x.toml.old; csi-registrar reload --force", seen: "20-x.toml.old has a table for it", after: noVolume},
		// The same after a pod has written: the driver is repaired, and a restarted kubelet has
		// mounted the volume.
		{id: "volume-misplaced", breaks: volume + "; systemd-run --quiet --unit=pod sh -c 'exec unshare -m sh -c \"mount --bind " + volumeDir + "/mount /mnt; echo written > /mnt/file; exec sleep 10000\"'; " +
			"until [ -e " + volumeDir + "/mount/file ]; do sleep 0.1; done; mount -t tmpfs tmpfs " + volumeDir + "/mount",
			seen: "8 bytes in 1 file", after: "grep -q written /var/lib/csi-saved/0f9e8d7c-1111-2222-3333-444455556666/pv/mount/file; " + noVolume},
	},
	"hang": {
		{id: "configuration-unreadable", breaks: "faulty-hang /etc/csi-registrar"},
		{id: "driver-socket-unreadable", breaks: "faulty-hang /run/csi-x"},
		{id: "volumes-unreadable", breaks: "mkdir -p /var/lib/kubelet/pods; faulty-hang /var/lib/kubelet/pods", seen: "/var/lib/kubelet/pods, type fuse"},
		{id: "plugins-registry-unreadable", breaks: "faulty-hang /var/lib/kubelet"},
	},
}

// driverDropIn is a script that gives the driver's unit a drop-in, and noDropIn one that removes it
// and that of doctor.
func driverDropIn(lines ...string) string {
	return "mkdir -p /var/lib/kubelet/pods /etc/systemd/system/" + sickUnit + ".d; printf '%s\\n' '[Service]' '" + strings.Join(lines, "' '") + "' > /etc/systemd/system/" + sickUnit + ".d/mounts.conf; " +
		"systemctl daemon-reload; systemctl restart " + sickUnit
}

// kubeletOnce is a script that makes kubelet.service run a faulty kubelet until its next start.
func kubeletOnce(what string) string {
	return "echo " + what + " > /run/once-kubelet; systemctl restart kubelet.service"
}

// volumeDir is the kubelet's directory of a volume of the driver. volume is a script that creates
// it as the kubelet does.
const (
	volumeDir = "/var/lib/kubelet/pods/0f9e8d7c-1111-2222-3333-444455556666/volumes/kubernetes.io~csi/pv"
	volume    = "mkdir -p " + volumeDir + "/mount; printf '{\"driverName\":\"" + sick + "\",\"volumeHandle\":\"v\"}' > " + volumeDir + "/vol_data.json"
	noVolume  = "umount " + volumeDir + "/mount || true; rm -rf /var/lib/kubelet/pods /var/lib/csi-saved"
	noDropIn  = "rm -rf /etc/systemd/system/" + sickUnit + ".d; systemctl daemon-reload; systemctl restart " + sickUnit
)

// dropIn is a script that writes a drop-in of the daemon's unit and restarts it.
func dropIn(name string, lines ...string) string {
	return "mkdir -p /etc/systemd/system/" + unit + ".d; printf '%s\\n' '[Service]' '" + strings.Join(lines, "' '") + "' > /etc/systemd/system/" + unit + ".d/" + name + ".conf; " +
		"systemctl daemon-reload; systemctl restart " + unit
}

// notHealed has the IDs whose fix is not tried here, with the reason.
var notHealed = map[string]string{
	"not-root":              "the fix is to run doctor as root",
	"systemd-not-answering": "no command reaches a service manager that does not answer",

	"file-system-not-answering": "the fix is that of driver-socket-unreadable, for a path that no driver's finding names",
	"kubelet-rootless":          "the registration sockets cannot serve it",
	"node-missing":              "the kubelet of this suite has no API server",
	"node-not-updated":          "the kubelet of this suite has no API server",
	"pods-not-started":          "the kubelet of this suite has no API server",
	"driver-restarting":         "the restarts count for ten minutes, whatever was fixed",
	"withdrawal-failing":        "the daemon tries again by itself; why it fails is in its log",

	// The daemon repairs these within a second, so they only last while it does not work.
	"registration-socket-faulty":  "the daemon restores the socket, and registers again what changed",
	"registration-not-published":  "the daemon tries again; why it fails is in its log",
	"registration-change-failing": "the daemon tries again; why it fails is in its log",
	"driver-not-ready-for-daemon": "the daemon asks again within 30 seconds",
}

// TestEveryFindingIsHealedOrListed checks that doctor has no ID that is unknown to this suite.
func TestEveryFindingIsHealedOrListed(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(built.Root(t), "packaging", "doc", "findings.md"))
	if err != nil {
		t.Fatal(err)
	}
	findings, _, _ := strings.Cut(string(page), "## States of a driver")
	healed := map[string]bool{}
	for _, list := range sicknesses {
		for _, s := range list {
			healed[s.id] = true
		}
	}
	known := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^### (.*)$`).FindAllStringSubmatch(findings, -1) {
		id := m[1]
		known[id] = true
		if healed[id] == (notHealed[id] != "") {
			t.Errorf("%s is healed: %v, and not healed because %q", id, healed[id], notHealed[id])
		}
	}
	for _, id := range slices.Concat(slices.Collect(maps.Keys(healed)), slices.Collect(maps.Keys(notHealed))) {
		if !known[id] {
			t.Errorf("doctor has no id %s", id)
		}
	}
}

// TestFixesHeal checks that doctor names the fault first, and that its fix, pasted into a root
// shell, repairs the node.
func TestFixesHeal(t *testing.T) {
	t.Parallel()
	for name, list := range sicknesses {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := sickNode(t)
			for _, s := range list {
				t.Run(s.id, func(t *testing.T) {
					outer := n.t
					n.t = t
					defer func() { n.t = outer }()
					n.During(t, func() { n.heal(s) })
				})
			}
		})
	}
}

// TestMountsThatReachTheKubelet checks that doctor finds nothing on nodes whose drivers, or
// kubelets, have a mount namespace of their own and work. OpenShift's and the snap's are imitated.
func TestMountsThatReachTheKubelet(t *testing.T) {
	t.Parallel()
	n := sickNode(t)
	kubelet := func(lines string) string {
		return "mkdir -p /etc/systemd/system/kubelet.service.d; printf '[Service]\\n" + lines + "\\n' > /etc/systemd/system/kubelet.service.d/zz.conf; systemctl daemon-reload; systemctl restart kubelet"
	}
	const inKubelets = "printf '[Service]\\nExecStart=\\nExecStart=/bin/sh -c \"exec nsenter -m -t $$(systemctl show --value --property=MainPID kubelet) /usr/bin/sick\"\\n'" +
		" > /etc/systemd/system/" + sickUnit + ".d/mounts.conf; systemctl daemon-reload; systemctl restart " + sickUnit
	for name, script := range map[string]string{
		"OpenShift's kubens, driver on the host": kubelet("PrivateMounts=yes"),
		"OpenShift's kubens, driver in it":       kubelet("PrivateMounts=yes") + "; mkdir -p /etc/systemd/system/" + sickUnit + ".d; " + inKubelets,
		"a snap that receives mounts":            kubelet("MountFlags=slave\\nReadOnlyPaths=/usr"),
		// Its volume is younger than the driver also in the clock ticks of /proc, of 10 ms.
		"a driver that mounts with nsenter": driverDropIn("PrivateMounts=yes") + "; " + volume + "; mount -t tmpfs tmpfs " + volumeDir + "/mount; " +
			"touch -d '1 second' " + volumeDir + "/vol_data.json; mkdir " + volumeDir + "/../../../containers",
	} {
		t.Run(name, func(t *testing.T) {
			outer := n.t
			n.t = t
			defer func() { n.t = outer }()
			n.During(t, func() {
				n.Run("sh", "-ec", "mkdir -p /var/lib/kubelet/pods; "+script)
				n.Run("csi-registrar", "wait", "--timeout", "60s")
				if found := n.healthy(sickness{}, 30*time.Second); len(found) > 0 {
					t.Errorf("%+v", found)
				}
				n.Run("sh", "-ec", "rm -rf /etc/systemd/system/kubelet.service.d; "+noDropIn+"; systemctl restart kubelet; "+noVolume)
				n.Run("csi-registrar", "wait", "--timeout", "60s")
			})
		})
	}
}

// sickNode boots a node with one driver. A restart of the driver ends its faults.
func sickNode(t *testing.T) *node {
	t.Helper()
	n := emptyNode(t, "bookworm")
	n.Args = append(n.Args, "--bind=/dev/fuse")
	faulty, err := os.ReadFile(built.Command(t, "faulty"))
	if err != nil {
		t.Fatal(err)
	}
	n.WriteMode("/usr/bin/faulty", string(faulty), 0o755)
	n.WriteMode("/usr/bin/faulty-hang", "#!/bin/sh\nsystemd-run --quiet --collect --unit=hang-$$ /usr/bin/faulty hang \"$1\"\n"+
		"until grep -q \" $1 fuse \" /proc/mounts; do sleep 0.1; done\n", 0o755)
	n.WriteMode("/usr/bin/sick", "#!/bin/sh\ncd "+sickDir+"\nfor what in datagram deaf; do\n"+
		"if [ -e once-$what ]; then rm once-$what csi.sock; exec faulty $what "+sickDir+"/csi.sock; fi\ndone\n"+
		"rm -f faults csi.sock\nif [ -e next ]; then mv next faults; fi\nexec faulty driver --socket "+sickDir+"/csi.sock --name "+sick+" --faults "+sickDir+"/faults\n", 0o755)
	n.Write("/usr/lib/systemd/system/"+sickUnit, "[Unit]\nStartLimitIntervalSec=0\n[Service]\nExecStart=/usr/bin/sick\nEnvironment=SOCKET="+sickDir+"/csi.sock\nRuntimeDirectory=csi-x\nRuntimeDirectoryPreserve=yes\nRestart=on-failure\nTimeoutStopSec=5s\n[Install]\nWantedBy=multi-user.target\n")
	// The kubelet of this suite contains its API server.
	n.Write("/usr/lib/systemd/system/kubelet.service.d/input.conf", "[Service]\nExecStartPre=/bin/sh -c 'rm -f /run/kubelet.input; mkfifo /run/kubelet.input'\n"+
		"ExecStart=\nExecStart=/bin/sh -c 'exec /usr/bin/sick-kubelet <>/run/kubelet.input'\n")
	n.WriteMode("/usr/lib/faulty/kubelet", string(faulty), 0o755)
	n.WriteMode("/usr/bin/sick-kubelet", "#!/bin/sh\nif [ -e /run/once-kubelet ]; then\nwhat=$(cat /run/once-kubelet)\nrm /run/once-kubelet\n"+
		"exec /usr/lib/faulty/kubelet kubelet $what /var/lib/kubelet\nfi\nexec /w/kubelet --root /var/lib/kubelet --node node-1 --state /var/lib/kubelet-state.json\n", 0o755)
	n.WriteMode("/usr/bin/kubectl", "#!/bin/sh\n[ \"$1 $2\" = 'label node' ] && echo \"label ${4%-}=\" > /run/kubelet.input\n", 0o755)
	n.Write("/usr/lib/systemd/system/other-registrar.service", "[Service]\nExecStart=/usr/bin/faulty registrar --socket "+registry+"/other.sock --name "+sick+" --endpoint "+sickDir+"/other.sock\n")
	n.Write("/etc/csi-registrar/conf.d/20-x.toml", fmt.Sprintf("[driver.%q]\nsocket = \"%s/csi.sock\"\n", sick, sickDir))
	n.Write("/usr/lib/csi-registrar/conf.d/10-nothing.toml", "")
	n.Chroot("systemctl", "enable", sickUnit)
	n.drivers = []string{sick}
	n.Boot()
	n.registered(0)
	return n
}

// finding is an element of "findings" in doctor --json.
type finding struct {
	ID, Found string
	Fix       []string
}

// findings runs doctor.
func (n *node) findings(named bool) []finding {
	n.t.Helper()
	args := []string{"csi-registrar", "doctor", "--json"}
	if named {
		args = append(args, sick)
	}
	out, _ := n.Try(args...) // the exit code depends on the findings
	var r struct{ Findings []finding }
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		n.t.Fatalf("%v\n%s", err, out)
	}
	// The earlier fixes have restarted the driver often, which status reports for ten minutes.
	return slices.DeleteFunc(r.Findings, func(f finding) bool {
		return f.ID == "driver-restarting"
	})
}

// maxRounds is how often an operator fixes the first finding and runs doctor again.
const maxRounds = 3

// heal breaks the node, and applies doctor's fixes until doctor finds nothing.
func (n *node) heal(s sickness) {
	n.t.Helper()
	if found := n.healthy(s, 30*time.Second); len(found) > 0 {
		n.t.Fatalf("before it is broken, doctor finds %+v", found)
	}
	n.Run("sh", "-ec", s.breaks)
	var found []finding
	n.Eventually(30*time.Second, "doctor to name "+s.id+" first", func() error {
		if found = n.findings(s.named); len(found) == 0 || found[0].ID != s.id || !strings.Contains(found[0].Found, s.seen) {
			return fmt.Errorf("it found %+v", found)
		}
		return nil
	})
	for round := 1; ; round++ {
		out := n.paste(found[0].Fix)
		if s.person != "" {
			n.Run("sh", "-ec", s.person)
		}
		if found = n.healthy(s, 15*time.Second); len(found) == 0 {
			n.t.Logf("healed in %d rounds", round)
			break
		}
		if round == maxRounds {
			n.t.Fatalf("pasted\n%s\nit is not healed: %+v", out, found)
		}
	}
	if s.after != "" {
		n.Run("sh", "-ec", s.after)
	}
}

// healthy waits for a while until doctor finds nothing, and returns what it finds after that.
func (n *node) healthy(s sickness, limit time.Duration) (found []finding) {
	n.t.Helper()
	for end := time.Now().Add(limit); ; time.Sleep(300 * time.Millisecond) {
		if found = n.findings(s.named); len(found) == 0 || time.Now().After(end) {
			return found
		}
	}
}

// paste passes lines to a shell, as if a user pasted them, and returns the output.
func (n *node) paste(lines []string) string {
	n.t.Helper()
	n.Write("/root/pasted", strings.Join(lines, "\n")+"\n")
	out, _ := n.Try("sh", "-c", "sh -v < /root/pasted 2>&1") // failing lines do not end it
	return out
}
