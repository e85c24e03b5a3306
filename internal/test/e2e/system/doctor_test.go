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

	endpointLink = "/var/lib/kubelet/plugins/csi-registrar/" + sick + ".sock"
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
		{id: "driver-call-failed", breaks: fault(`{"Fail": "NodeGetInfo"}`)},
		{id: "driver-method-missing", breaks: fault(`{"Unimplemented": "NodeGetInfo"}`)},
		{id: "driver-name-empty", breaks: fault(`{"Name": ""}`)},
		{id: "driver-not-ready", breaks: fault(`{"NotReady": true}`)},
		{id: "driver-name-mismatch", breaks: fault(`{"Name": "y.sample.csi"}`),
			after: "rm /etc/csi-registrar/conf.d/99-doctor-*; systemctl restart " + sickUnit + "; csi-registrar reload"},
	},
	"answers": {
		{id: "node-id-invalid", breaks: fault(`{"NodeID": ""}`)},
		{id: "topology-invalid", breaks: fault(`{"Topology": {"a b": "c"}}`)},
		{id: "volume-limit-invalid", breaks: fault(`{"MaxVolumes": -1}`)},
		{id: "endpoint-unusable", breaks: "printf '[driver.\"" + sick + "\"]\\nendpoint = \"/nowhere/csi.sock\"\\n' > /etc/csi-registrar/conf.d/50-x.toml; csi-registrar reload"},
		{id: "another-registrar", breaks: "systemctl start other-registrar.service"},
		{id: "plugin-socket-stale", breaks: "faulty stale " + registry + "/dead-reg.sock; touch -d '1 minute ago' " + registry + "/dead-reg.sock"},
		{id: "registration-conflict", breaks: "systemctl stop " + unit + "; touch " + regSocket(sick) + "; systemctl start " + unit},
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
		{id: "unit-not-enabled", breaks: "systemctl disable " + unit},
		{id: "unit-changed", breaks: "mkdir -p /etc/systemd/system/" + unit + ".d; printf '[Service]\\nNice=1\\n' > /etc/systemd/system/" + unit + ".d/nice.conf"},
		{id: "unit-failed", breaks: dropIn("failed", "Restart=no") + "; systemctl kill --signal=KILL " + unit + "; until systemctl is-failed " + unit + "; do sleep 0.1; done",
			after: "rm /etc/systemd/system/" + unit + ".d/failed.conf; systemctl daemon-reload; systemctl restart " + unit},
		{id: "watchdog-off", breaks: dropIn("watchdog", "WatchdogSec=0")},
		{id: "store-too-small", breaks: dropIn("store", "FileDescriptorStoreMax=0")},
		{id: "sockets-not-kept", breaks: dropIn("start", "ExecStart=", "ExecStart=/usr/bin/csi-registrar run")},
		{id: "root-dir-not-writable", breaks: dropIn("masks", "InaccessiblePaths=-/var/lib/kubelet"), seen: "is hidden from it",
			after: "rm /etc/systemd/system/" + unit + ".d/zz-doctor-inaccessiblepaths.conf /etc/systemd/system/" + unit + ".d/masks.conf; systemctl daemon-reload; systemctl restart " + unit},
		{id: "http-open", breaks: "mkdir -p /etc/systemd/system/csi-registrar-http.socket.d; printf '[Socket]\\nListenStream=\\nListenStream=0.0.0.0:9809\\n' > /etc/systemd/system/csi-registrar-http.socket.d/open.conf; " +
			"systemctl daemon-reload; systemctl enable csi-registrar-http.socket; systemctl restart " + unit},
		{id: "daemon-not-running", breaks: "rm /run/csi-registrar/control.sock"},
		{id: "daemon-not-answering", breaks: "kill -STOP $(systemctl show --value --property=MainPID " + unit + ")"},
	},
	"kubelet": {
		{id: "no-kubelet", breaks: "systemctl stop kubelet.service", seen: "kubelet.service is inactive"},
		{id: "kubelet-not-asking", breaks: "kill -STOP $(systemctl show --value --property=MainPID kubelet.service); csi-registrar reregister " + sick + "; sleep 6"},
		{id: "plugins-registry-writable", breaks: "chmod 0777 " + registry},
		{id: "plugins-registry-writable", breaks: "chmod a+w /var/lib/kubelet", seen: "could replace"},
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
		{id: "store-too-small", breaks: dropIn("store", "FileDescriptorStoreMax=1")},
		{id: "registration-not-kept", breaks: dropIn("store", "Environment=CSI_REGISTRAR_FDSTORE=1") + "; printf '[driver.\"" + sick + "\"]\nenabled = false\n' > /etc/csi-registrar/conf.d/50-x.toml; csi-registrar reload; " +
			"while [ -e " + regSocket(sick) + " ]; do sleep 0.1; done; rm /etc/csi-registrar/conf.d/50-x.toml; csi-registrar reload", seen: "is full"},
	},
	"changes": {
		{id: "topology-changed", breaks: restarted(`{"Topology": {"sample.example/zone": "a"}}`) + "; until grep -q sample.example/zone /var/lib/kubelet-state.json; do sleep 0.1; done; csi-registrar wait; " +
			restarted(`{"Topology": {"sample.example/zone": "b"}}`), seen: "sample.example/zone"},
		{id: "status-reason", breaks: "printf '[driver.\"" + sick + "\"]\nendpoint_link = true\n' > /etc/csi-registrar/conf.d/50-x.toml; csi-registrar reload; until [ -L " + endpointLink + " ]; do sleep 0.1; done; " +
			"csi-registrar wait; touch " + endpointLink + ".file; mv " + endpointLink + ".file " + endpointLink, seen: endpointLink + " is a regular file: move it away", person: "rm " + endpointLink},
		{id: "registration-not-published", breaks: "systemctl stop " + unit + "; mkdir -p " + filepath.Dir(endpointLink) + "; touch " + endpointLink + "; systemctl start " + unit,
			seen: endpointLink + " is a regular file: move it away", person: "rm " + endpointLink,
			after: "rm /etc/csi-registrar/conf.d/50-x.toml; csi-registrar reload"},
		{id: "registration-damped", breaks: "i=0; until csi-registrar status --json | grep -q damped_until; do i=$((i+1)); " + restarted(`{"MaxVolumes": '$i'}`) + "; until csi-registrar status --json | grep -Eq '\"max_volumes_per_node\": '$i','; do sleep 0.1; done; csi-registrar wait --timeout 5s || true; done"},
	},
	"hang": {
		{id: "driver-socket-unreadable", breaks: "faulty-hang /run/csi-x"},
		{id: "plugins-registry-unreadable", breaks: "faulty-hang /var/lib/kubelet"},
	},
}

// dropIn is a script that writes a drop-in of the daemon's unit and restarts it.
func dropIn(name string, lines ...string) string {
	return "mkdir -p /etc/systemd/system/" + unit + ".d; printf '%s\\n' '[Service]' '" + strings.Join(lines, "' '") + "' > /etc/systemd/system/" + unit + ".d/" + name + ".conf; " +
		"systemctl daemon-reload; systemctl restart " + unit
}

// notHealed has the IDs whose fix is not tried here, with the reason.
var notHealed = map[string]string{
	"no-driver-configured":  "only a person knows which driver",
	"driver-not-configured": "only a person knows where the driver listens",
	"not-root":              "the fix is to run doctor as root",
	"unit-missing":          "the fix is to install the package",
	"unit-not-loaded":       "only a person knows what a wrong line of a drop-in should say",
	"unit-restarting":       "why the daemon ends is in its log",
	"systemd-not-answering": "no command reaches a service manager that does not answer",
	"changes-polled":        "the limit is that of the whole machine, and of others on it",

	"configuration-unreadable":  "the fix is that of the file system, tried for driver-socket-unreadable",
	"file-system-not-answering": "the fix is that of driver-socket-unreadable, for a path that no driver's finding names",
	"configuration-not-loaded":  "lasts half a second: the daemon reads changed files by itself",
	"kubelet-not-watching":      "a kubelet that hangs in its start; its restart is tried for no-kubelet",
	"kubelet-not-confirming":    "the kubelet waits for the driver or for the API server",
	"kubelet-refused":           "what to change is in the kubelet's words",
	"driver-restarting":         "the restarts count for ten minutes, whatever was fixed",
	"withdrawal-failing":        "the daemon tries again by itself; why it fails is in its log",

	// The daemon repairs these within a second, so they only last while it does not work.
	"registration-socket-missing": "the daemon restores the socket",
	"registration-socket-stale":   "the daemon restores the socket",
	"registration-not-answering":  "a daemon that does not answer is found first",
	"registration-wrong":          "the daemon registers what changed again",

	"volume-data-broken":  "the kubelet of this suite mounts nothing",
	"volume-data-missing": "the kubelet of this suite mounts nothing",
	"volume-not-mounted":  "the kubelet of this suite mounts nothing",
	"volume-still-staged": "the kubelet of this suite mounts nothing",
}

// TestEveryFindingIsHealedOrListed checks that doctor has no ID that is unknown to this suite.
func TestEveryFindingIsHealedOrListed(t *testing.T) {
	code, err := os.ReadFile(filepath.Join(built.Root(t), "internal", "doctor", "report.go"))
	if err != nil {
		t.Fatal(err)
	}
	healed := map[string]bool{}
	for _, list := range sicknesses {
		for _, s := range list {
			healed[s.id] = true
		}
	}
	known := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^\t\w+ +ID += "(.*?)"`).FindAllStringSubmatch(string(code), -1) {
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
		"ExecStart=\nExecStart=/bin/sh -c 'exec /w/kubelet --root /var/lib/kubelet --node node-1 --state /var/lib/kubelet-state.json <>/run/kubelet.input'\n")
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
