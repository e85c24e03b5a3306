package doctor

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf16"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
)

func TestHealthyNode(t *testing.T) {
	n := newNode(t)
	for _, drivers := range [][]string{nil, {name}} {
		r := n.examine(drivers...)
		if !r.Healthy || len(r.Findings) != 0 {
			t.Errorf("findings on a healthy node: %+v", r.Findings)
		}
		for _, c := range r.Checks {
			if c.Result != OK {
				t.Errorf("%s %s: %s %s", c.Driver, c.Step, c.Result, c.Says)
			}
		}
		if len(r.Checks) < 16 {
			t.Errorf("only %d checks", len(r.Checks))
		}
	}
}

// quoted is a word in single quotes.
var quoted = regexp.MustCompile(`\$?'[^']*'`)

// Each case breaks a healthy node in one way. The first finding must name the cause, and its fix
// must make the node healthy again.
func TestBrokenNodes(t *testing.T) {
	for _, test := range []struct {
		what   string
		breaks func(*testing.T, *node)
		named  bool   // the driver is named on the command line
		step   Step   // of the first finding
		id     ID     // of the first finding
		found  string // part of the text
		fix    string // part of the fix
		// manual does what the fix only describes; nil: the commands are sufficient.
		manual func(*testing.T, *node)
		root   bool // needs root
		both   ID   // of a second finding
	}{
		{what: "wrong root_dir", step: "kubelet", id: "root-dir-mismatch", found: "csi-registrar publishes below", fix: "99-doctor-root-dir.toml",
			breaks: func(t *testing.T, n *node) {
				n.rootDir = n.path("data")
				n.startKubelet()
			},
			manual: func(t *testing.T, n *node) {
				n.write("etc/csi-registrar/config.toml", fmt.Sprintf("[kubelet]\nroot_dir = %q\n", n.rootDir))
				n.units[serviceUnit]["ReadWritePaths"] += " " + n.rootDir
			}},
		{what: "kubelet watches a deleted directory", step: "watching", id: "kubelet-watches-deleted", found: "a directory that was there before and is deleted", fix: "systemctl restart kubelet.service",
			breaks: func(t *testing.T, n *node) {
				n.stopDaemon()
				// Create it before the old one is removed, so that it gets another inode.
				n.mkdir(n.rootDir+"/new", 0o750)
				n.remove(n.registry())
				if err := os.Rename(n.rootDir+"/new", n.registry()); err != nil {
					t.Fatal(err)
				}
				n.restartDaemon()
			}},
		{what: "pod's volume that is not mounted", step: "volumes", id: "volume-not-mounted", found: "nothing is mounted there: ", fix: "systemctl restart kubelet.service",
			breaks: func(_ *testing.T, n *node) { n.volume(volumeOfPod, volData, time.Hour) },
			manual: func(_ *testing.T, n *node) { n.mounted(volumeOfPod + "/mount") }},
		{what: "no kubelet", step: "kubelet", id: "no-kubelet", found: "no kubelet runs", fix: "systemctl start kubelet.service",
			breaks: func(t *testing.T, n *node) { n.remove(n.path("proc/812")) }, manual: func(t *testing.T, n *node) { n.startKubelet() }},
		{what: "no plugins_registry", step: "plugins_registry", id: "plugins-registry-missing", found: "does not exist", fix: "systemctl restart kubelet.service",
			breaks: func(t *testing.T, n *node) { n.stopDaemon(); n.remove(n.registry()); n.serveStatus() }},
		{what: "dead socket", step: "socket", id: "driver-socket-stale", found: "nobody listens on", fix: "restart the driver",
			breaks: func(t *testing.T, n *node) { n.driver.ln.SetUnlinkOnClose(false); n.driver.stop(); n.restartDaemon() },
			manual: func(t *testing.T, n *node) { n.driver.restart(t) }},
		{what: "no socket", step: "socket", id: "driver-socket-missing", found: "there is no ", fix: "/csi/plugin.sock",
			breaks: func(t *testing.T, n *node) {
				if err := os.Rename(n.socket(), n.path("csi/plugin.sock")); err != nil {
					t.Fatal(err)
				}
				n.restartDaemon()
			},
			manual: func(t *testing.T, n *node) {
				n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", strings.ReplaceAll(n.table(""), "csi.sock", "plugin.sock"))
			}},
		{what: "no directory", step: "socket", id: "driver-socket-missing", found: "/csi does not exist", fix: "restart the driver",
			breaks: func(t *testing.T, n *node) { n.driver.stop(); n.remove(n.path("csi")); n.restartDaemon() },
			manual: func(t *testing.T, n *node) { n.mkdir(n.path("csi"), 0o755); n.driver.restart(t) }},
		{what: "a file in its place", step: "socket", id: "driver-socket-not-socket", found: "is a regular file, not a socket", fix: "rm ",
			breaks: func(t *testing.T, n *node) { n.driver.stop(); n.write("csi/csi.sock", ""); n.restartDaemon() },
			manual: func(t *testing.T, n *node) { n.driver.restart(t) }},
		{what: "wrong owner", step: "trust", id: "driver-not-trusted", found: "belongs to", fix: "chown -h root", root: true,
			breaks: func(t *testing.T, n *node) { chown(t, n.socket(), 65123); n.restartDaemon() }},
		{what: "directory of another user", step: "trust", id: "driver-not-trusted", found: "belongs to", fix: "chown -h root", root: true,
			breaks: func(t *testing.T, n *node) { chown(t, n.path("csi"), 65123); n.restartDaemon() }},
		{what: "directory that others may write", step: "trust", id: "driver-not-trusted", found: "may be written by its group or others", fix: "chmod go-w",
			breaks: func(t *testing.T, n *node) { chmod(t, n.path("csi"), 0o777); n.restartDaemon() }},
		{what: "name mismatch", step: "GetPluginInfo", id: "driver-name-mismatch", found: `reports name "smb.csi.example.com"`, fix: `[driver."smb.csi.example.com"]`,
			breaks: fault(func(f *fakeDriver) { f.name = "smb.csi.example.com" })},
		{what: "no name", step: "GetPluginInfo", id: "driver-name-empty", found: "empty name", fix: "log",
			breaks: fault(func(f *fakeDriver) { f.name = "" }),
			manual: fault(func(f *fakeDriver) { f.name = name })},
		{what: "hangs in GetPluginInfo", step: "GetPluginInfo", id: "driver-not-answering", found: "does not answer GetPluginInfo within 300ms", fix: "log",
			breaks: func(t *testing.T, n *node) {
				n.slow()
				n.driver.set(func(f *fakeDriver) { f.hang = "GetPluginInfo" })
				n.restartDaemon()
			}, manual: fault(func(f *fakeDriver) { f.hang = "" })},
		{what: "not ready", step: "Probe", id: "driver-not-ready", found: "not ready", fix: "log",
			breaks: fault(func(f *fakeDriver) { f.notReady = true }),
			manual: fault(func(f *fakeDriver) { f.notReady = false })},
		{what: "hangs in NodeGetInfo", step: "NodeGetInfo", id: "driver-not-answering", found: "does not answer NodeGetInfo within 300ms", fix: "log",
			breaks: fault(func(f *fakeDriver) { f.hang = "NodeGetInfo" }),
			manual: fault(func(f *fakeDriver) { f.hang = "" })},
		{what: "fails in NodeGetInfo", step: "NodeGetInfo", id: "driver-call-failed", found: `NodeGetInfo fails: Internal: "no \x1b[31mkernel module\nloaded"`, fix: "log",
			breaks: fault(func(f *fakeDriver) { f.fail = "NodeGetInfo" }),
			manual: fault(func(f *fakeDriver) { f.fail = "" })},
		{what: "a controller's socket", step: "NodeGetInfo", id: "driver-method-missing", found: "does not implement NodeGetInfo", fix: "log",
			breaks: func(t *testing.T, n *node) {
				n.driver.set(func(f *fakeDriver) { f.noNode = true })
				n.driver.restart(t)
				n.restartDaemon()
			},
			manual: func(t *testing.T, n *node) {
				n.driver.set(func(f *fakeDriver) { f.noNode = false })
				n.driver.restart(t)
			}},
		{what: "node id too long", step: "NodeGetInfo", id: "node-id-invalid", found: "node ID has 257", fix: "flags or the configuration of the driver",
			breaks: fault(func(f *fakeDriver) { f.nodeID = strings.Repeat("x", 257) }),
			manual: fault(func(f *fakeDriver) { f.nodeID = "x" })},
		{what: "node id empty", step: "NodeGetInfo", id: "node-id-invalid", found: "node ID is empty", fix: "flags or the configuration of the driver",
			breaks: fault(func(f *fakeDriver) { f.nodeID = "" }),
			manual: fault(func(f *fakeDriver) { f.nodeID = "x" })},
		{what: "topology key invalid", step: "NodeGetInfo", id: "topology-invalid", found: `topology key "Zone A" is not a label key`, fix: "flags or the configuration of the driver",
			breaks: fault(func(f *fakeDriver) { f.topology = map[string]string{"Zone A": "a"} }),
			manual: fault(func(f *fakeDriver) { f.topology = nil })},
		{what: "path too long", step: "configuration", id: "configuration-error", found: "10-nfs.toml:2: driver", fix: "edit ",
			breaks: func(t *testing.T, n *node) {
				n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", strings.ReplaceAll(n.table(""), "csi.sock", strings.Repeat("x", 100)))
				n.restartDaemon()
			},
			manual: func(t *testing.T, n *node) { n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", n.table("")) }},
		{what: "error in the configuration", step: "configuration", id: "configuration-error", found: "timeout", fix: "csi-registrar config check",
			breaks: func(t *testing.T, n *node) {
				n.write("etc/csi-registrar/conf.d/60-nfs.toml", fmt.Sprintf("[driver.%q]\ntimeout = \"soon\"\n", name))
				n.restartDaemon()
			},
		},
		{what: "a name without quotes", step: "configuration", id: "configuration-error", found: "60-nfs.toml:2", fix: "sed -i '2s/.*/[driver.\"" + name + "\"]/' ",
			breaks: func(t *testing.T, n *node) {
				n.write("etc/csi-registrar/conf.d/60-nfs.toml", "# x\n[driver."+name+"]\ntimeout = \"9s\"\n")
				n.restartDaemon()
			}},
		{what: "a line that is no TOML", step: "configuration", id: "configuration-error", found: "60-nfs.toml:2", fix: "sed -i '2s/^/# /' ",
			breaks: func(t *testing.T, n *node) {
				n.write("etc/csi-registrar/conf.d/60-nfs.toml", fmt.Sprintf("[driver.%q]\ntimeout = 9s\n", name))
				n.restartDaemon()
			}},
		{what: "drivers in place of driver", step: "configuration", id: "configuration-error", found: "drivers", fix: "sed -i '1s/\\[drivers\\./[driver./' ",
			breaks: func(t *testing.T, n *node) {
				n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", strings.Replace(n.table(""), "[driver.", "[drivers.", 1))
				n.restartDaemon()
			}, both: "driver-not-configured"},
		{what: "a table twice", step: "configuration", id: "configuration-error", found: "already been defined", fix: "# the same table begins in line 1\nsed -i 4,5d ",
			breaks: func(t *testing.T, n *node) {
				n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", strings.TrimSpace(n.table(""))+"\n\n"+n.table(""))
				n.restartDaemon()
			}},
		{what: "a socket that is no TOML", step: "configuration", id: "configuration-error", found: "10-nfs.toml:2", fix: "10-nfs.toml.off\ncsi-registrar config check",
			breaks: func(t *testing.T, n *node) {
				n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", fmt.Sprintf("[driver.%q]\nsocket = %s\n", name, n.socket()))
				n.restartDaemon()
			},
			manual: func(t *testing.T, n *node) { n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", n.table("")) }},
		{what: "two tables with one socket", step: "configuration", id: "configuration-error", found: "60-x.toml:2", fix: "# if other.example is another driver, give it its own path in line 2 of ",
			breaks: func(t *testing.T, n *node) {
				n.write("etc/csi-registrar/conf.d/60-x.toml", fmt.Sprintf("[driver.\"other.example\"]\nsocket = %q\n", n.socket()))
				n.restartDaemon()
			}},
		{what: "a table in UTF-16", step: "configuration", id: "configuration-error", found: "probably using UTF-16", fix: "iconv -f UTF-16 -t UTF-8 ",
			breaks: func(t *testing.T, n *node) {
				var text []byte
				for _, u := range utf16.Encode([]rune("\ufeff" + n.table(""))) {
					text = binary.LittleEndian.AppendUint16(text, u)
				}
				n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", string(text))
				n.restartDaemon()
			}},
		{what: "a file in place of conf.d", step: "configuration", id: "configuration-error", found: "conf.d: cannot be read: not a directory", fix: "conf.d.old\nmkdir ",
			breaks: func(t *testing.T, n *node) {
				n.write("etc/csi-registrar/conf.d", "x\n")
				n.restartDaemon()
			}},
		{what: "a directory in place of a file", step: "configuration", id: "configuration-error", found: "20-nfs.toml: is not a regular file", fix: "rmdir ",
			breaks: func(t *testing.T, n *node) {
				n.mkdir(n.path("etc/csi-registrar/conf.d/20-nfs.toml"), 0o755)
				n.restartDaemon()
			}},
		{what: "a merge conflict", step: "configuration", id: "configuration-error", found: "10-nfs.toml:2", fix: "# to keep the first version:\n# sed -i '2d;4,6d' ",
			breaks: func(t *testing.T, n *node) {
				table := strings.Split(n.table(""), "\n")
				n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", table[0]+"\n<<<<<<< HEAD\n"+table[1]+"\n=======\nsocket = \"/run/x.sock\"\n>>>>>>> rack7\n")
				n.restartDaemon()
			},
			manual: func(t *testing.T, n *node) { n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", n.table("")) }},
		{what: "plugins_registry without its owner's right to write", step: "file system", id: "file-system-read-only", found: "has mode 0550", fix: "chmod u+rwX ",
			breaks: func(t *testing.T, n *node) {
				if err := os.Chmod(n.registry(), 0o550); err != nil {
					t.Fatal(err)
				}
			}},
		{what: "typographic quotes", step: "configuration", id: "configuration-error", found: "60-nfs.toml:2", fix: "sed -i '/^ *#/!s/",
			breaks: func(t *testing.T, n *node) {
				n.write("etc/csi-registrar/conf.d/60-nfs.toml", "# “x”\n[driver.“"+name+"”]\ntimeout = “9s”\n")
				n.restartDaemon()
			}},
		{what: "credentials of the kubelet", step: "registration", id: "kubelet-refused", found: "Unauthorized", fix: "# that is /etc/kubernetes/kubelet.conf\n# " + retries + "\nsystemctl restart kubelet.service",
			breaks: func(t *testing.T, n *node) {
				n.write("proc/812/cmdline", "kubelet\x00--kubeconfig=/etc/kubernetes/kubelet.conf\x00")
				n.rooted(812, n.root)
				n.write("etc/kubernetes/kubelet.conf", "# server: https://other\nclusters: [{name: c, cluster: {server: \"https://127.0.0.1:16744\", x: y}}]\n")
				n.refuse = "error updating CSINode object: Unauthorized"
				n.restartDaemon()
				n.refuse = ""
			}},
		{what: "a second kubelet", step: "kubelet", id: "second-kubelet", found: "another kubelet is ignored: kubelet (pid 900, old.service), root directory ", fix: "# systemctl disable --now old.service",
			breaks: func(t *testing.T, n *node) {
				n.process(900, "kubelet", "0::/system.slice/old.service")
				n.listens(900, n.path("data"))
			},
			manual: func(t *testing.T, n *node) { n.remove(n.path("proc/900")) }},
		{what: "API server of another address", step: "registration", id: "kubelet-refused", found: "connection refused", fix: "# if that address is wrong: correct server: in /etc/kubernetes/kubelet.conf:3, then run the next line\n# if the API server is away, nothing has to be done here: ",
			breaks: func(t *testing.T, n *node) {
				n.write("proc/812/cmdline", "kubelet\x00--kubeconfig=/etc/kubernetes/kubelet.conf\x00")
				n.rooted(812, n.root)
				n.write("etc/kubernetes/kubelet.conf", "clusters:\n- cluster:\n    server: https://127.0.0.1:16744\n")
				n.refuse = "error updating CSINode object: Get \"https://127.0.0.1:16744/apis\": dial tcp 127.0.0.1:16744: connect: connection refused"
				n.restartDaemon()
				n.refuse = ""
			}},
		{what: "configuration of another user", step: "configuration", id: "configuration-error", found: "belongs to", fix: "chown -h root", root: true,
			breaks: func(t *testing.T, n *node) {
				chown(t, n.path("usr/lib/csi-registrar/conf.d/10-nfs.toml"), 65123)
				n.restartDaemon()
			},
			manual: func(t *testing.T, n *node) { chown(t, n.path("usr/lib/csi-registrar/conf.d/10-nfs.toml"), 0) }},
		{what: "hidden drop-in", named: true, step: "configuration", id: "configuration-hidden", found: "is hidden by", fix: "mv -n ",
			breaks: func(t *testing.T, n *node) {
				n.write("etc/csi-registrar/conf.d/10-nfs.toml", "")
				n.driver.stop()
				n.restartDaemon()
			},
			manual: func(t *testing.T, n *node) {
				n.remove(n.path("etc/csi-registrar/conf.d/10-nfs.toml"))
				n.driver.restart(t)
			}},
		{what: "disabled", named: true, step: "configuration", id: "driver-disabled", found: "it is disabled: enabled = false in ", fix: "sed -i -E '2s@\\benabled *= *",
			breaks: func(t *testing.T, n *node) {
				n.write("etc/csi-registrar/conf.d/60-nfs.toml", fmt.Sprintf("[driver.%q]\nenabled = false\n", name))
				n.restartDaemon()
			},
			manual: func(t *testing.T, n *node) { n.remove(n.path("etc/csi-registrar/conf.d/60-nfs.toml")) }},
		{what: "not configured", named: true, step: "configuration", id: "driver-not-configured", found: "no file configures it", fix: "write a table",
			breaks: func(t *testing.T, n *node) {
				n.remove(n.path("usr/lib/csi-registrar/conf.d/10-nfs.toml"))
				n.restartDaemon()
			},
			manual: func(t *testing.T, n *node) { n.write("etc/csi-registrar/conf.d/60-nfs.toml", n.table("")) }},
		{what: "a directory that the daemon may not read", step: "daemon", id: "configuration-not-loaded", found: "permission denied", fix: "chmod 0755 ",
			breaks: func(t *testing.T, n *node) {
				chmod(t, n.path("usr/lib/csi-registrar/conf.d"), 0o600)
				n.status.ConfigError = "permission denied"
			}},
		{what: "files not loaded", step: "daemon", id: "configuration-not-loaded", found: "it publishes in /elsewhere", fix: "csi-registrar reload",
			breaks: func(t *testing.T, n *node) { n.status.PluginsRegistry = "/elsewhere" }},
		{what: "a withdrawal that fails", step: "registration", id: "withdrawal-failing", found: "cannot withdraw the registration socket /old/a-reg.sock: \"read-only file system\"", fix: "journalctl",
			breaks: func(t *testing.T, n *node) {
				n.status.Withdrawals = []status.Withdrawal{{Driver: name, RegistrationSocket: "/old/a-reg.sock", Error: "read-only file system"}}
			},
			manual: func(t *testing.T, n *node) { n.status.Withdrawals = nil }},
		{what: "second registrar", step: "registrars", id: "another-registrar", found: "served by csi-node-driver (pid", fix: "from the DaemonSet",
			breaks: func(t *testing.T, n *node) {
				n.write(fmt.Sprintf("proc/%d/comm", os.Getpid()), "csi-node-driver\n")
				n.write(fmt.Sprintf("proc/%d/cgroup", os.Getpid()), "0::/kubepods.slice/cri-containerd-0123.scope\n")
				s := serveRegistration(t, filepath.Join(n.registry(), "other.sock"), name, "/x/csi.sock")
				n.regs["other"] = s
			},
			manual: func(t *testing.T, n *node) { n.regs["other"](); delete(n.regs, "other") }},
		{what: "our socket, kept while the daemon cannot use it", step: "registration", id: "registration-not-published", found: "the daemon reports waiting", fix: "csi-registrar reregister",
			breaks: func(t *testing.T, n *node) {
				n.status.Drivers[0].Registration, n.status.Drivers[0].State = status.None, "waiting"
			},
			manual: func(t *testing.T, n *node) { n.restartDaemon() }},
		{what: "another registrar at our path", step: "registrars", id: "another-registrar", found: "another registrar serves this driver", fix: "ss -xlp src",
			breaks: func(t *testing.T, n *node) {
				n.stopDaemon()
				s := serveRegistration(t, n.regSocket(), name, "/x/csi.sock")
				n.restartDaemon()
				n.regs["other"] = s
			},
			manual: func(t *testing.T, n *node) { n.regs["other"](); delete(n.regs, "other") }},
		{what: "a file at our path", step: "registration", id: "registration-conflict", found: "is a regular file, so the daemon leaves it alone", fix: "rm ",
			breaks: func(t *testing.T, n *node) {
				n.stopDaemon()
				if err := os.WriteFile(n.regSocket(), nil, 0o600); err != nil {
					t.Fatal(err)
				}
				n.restartDaemon()
			}},
		{what: "registration socket does not answer", step: "registration", id: "registration-socket-faulty", found: "does not answer GetInfo", fix: "csi-registrar reregister",
			breaks: func(t *testing.T, n *node) {
				n.regs[name]()
				delete(n.regs, name)
				ln, err := net.Listen("unix", n.regSocket())
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { ln.Close() })
			},
			manual: func(t *testing.T, n *node) { n.remove(n.regSocket()) }},
		{what: "registration socket reports another name", step: "registration", id: "registration-socket-faulty", found: "reports other.example.com", fix: "csi-registrar reregister",
			breaks: func(t *testing.T, n *node) {
				n.regs[name]()
				n.regs[name] = serveRegistration(t, n.regSocket(), "other.example.com", n.socket())
			}},
		{what: "registration socket reports another endpoint", step: "registration", id: "registration-socket-faulty", found: "at /elsewhere", fix: "csi-registrar reregister",
			breaks: func(t *testing.T, n *node) {
				n.regs[name]()
				n.regs[name] = serveRegistration(t, n.regSocket(), name, "/elsewhere")
			}},
		{what: "daemon does not publish", step: "registration", id: "registration-not-published", found: "the driver answers correctly, but the daemon reports", fix: "csi-registrar reregister",
			breaks: func(t *testing.T, n *node) { n.holdReg = true; n.restartDaemon(); n.holdReg = false }},
		{what: "kubelet refuses", step: "registration", id: "kubelet-refused", found: "topology value collision", fix: "kubectl label node",
			breaks: func(t *testing.T, n *node) {
				n.refuse = `detected topology value collision: driver reported "zone":"b" but existing label is "zone":"a"`
				n.restartDaemon()
			},
			manual: func(t *testing.T, n *node) { n.refuse = "" }},
		{what: "kubelet never asks", step: "registration", id: "kubelet-not-asking", found: "the kubelet has not asked", fix: "systemctl restart kubelet.service",
			breaks: func(t *testing.T, n *node) {
				d := &n.status.Drivers[0]
				d.State, d.Registration, d.RegisteredAt, d.LastGetInfoAt = "published", "published", time.Time{}, time.Time{}
			}},
		{what: "kubelet that refused asks later", step: "registration", id: "kubelet-refused", found: "could not register the driver before the registration socket was made anew", fix: "# " + retries + "\nsystemctl restart kubelet.service",
			breaks: func(t *testing.T, n *node) {
				d := &n.status.Drivers[0]
				d.State, d.Registration, d.RegisteredAt, d.LastGetInfoAt = "published", "published", time.Time{}, time.Time{}
				n.units["kubelet.service"] = map[string]string{"journal": "Operation for \"/other-reg.sock\" failed. No retries\nOperation for \"" + n.regSocket() + "\" failed. No retries permitted until 12:04:54"}
			}},
		{what: "endpoint is nowhere", step: "endpoint", id: "endpoint-unusable", found: "which does not exist", fix: "endpoint = ",
			breaks: func(t *testing.T, n *node) {
				n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", n.table(`endpoint = "/nowhere/csi.sock"`))
				n.restartDaemon()
			},
			manual: func(t *testing.T, n *node) { n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", n.table("")) }},
		{what: "endpoint of another driver", step: "registration", id: "registration-not-published", found: `belongs to the driver \"other.example.com\"`, fix: "csi-registrar reregister",
			breaks: func(t *testing.T, n *node) {
				other := &fakeDriver{name: "other.example.com"}
				other.start(t, n.path("csi/other.sock"))
				t.Cleanup(other.stop)
				n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", n.table(fmt.Sprintf("endpoint = %q", n.path("csi/other.sock"))))
				n.restartDaemon()
			},
			manual: func(t *testing.T, n *node) { n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", n.table("")) }},
		{what: "unit masked", step: "unit", id: "unit-masked", found: "is masked", fix: "systemctl unmask",
			breaks: func(t *testing.T, n *node) { n.down(); n.units[serviceUnit]["LoadState"] = "masked" }},
		{what: "unit failed", step: "unit", id: "unit-failed", found: "has failed (exit-code)", fix: "systemctl reset-failed",
			breaks: func(t *testing.T, n *node) {
				n.down()
				n.units[serviceUnit]["ActiveState"], n.units[serviceUnit]["Result"] = "failed", "exit-code"
			}},
		{what: "kubelet frozen", step: "kubelet", id: "kubelet-frozen", found: "is stopped by a signal", fix: "kill -CONT 812",
			breaks: func(t *testing.T, n *node) {
				n.write("proc/812/status", "Name:\tx\nState:\tT (stopped)\nUid:\t0\t0\t0\t0\n")
			}},
		{what: "kubelet's unit frozen", step: "kubelet", id: "kubelet-frozen", found: "is frozen, by systemctl freeze", fix: "systemctl thaw kubelet.service",
			breaks: func(t *testing.T, n *node) {
				n.units["kubelet.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "FreezerState": "frozen"}
			}},
		{what: "no container runtime", step: "kubelet", id: "no-runtime", found: "no container runtime works; containerd.service is inactive (dead)", fix: "systemctl start containerd.service",
			breaks: func(t *testing.T, n *node) {
				n.units["containerd.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "inactive", "SubState": "dead", "UnitFileState": "enabled"}
			},
			manual: func(t *testing.T, n *node) {
				n.units["containerd.service"]["ActiveState"], n.units["containerd.service"]["SubState"] = "active", "running"
			}},
		{what: "Node deleted", step: "kubelet", id: "node-missing", found: "the API server has no Node of this kubelet: \"E1128", fix: "systemctl restart kubelet.service",
			breaks: func(t *testing.T, n *node) {
				n.units["kubelet.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running",
					"journal": strings.Repeat(`E1128 03:00:25.1 812 kubelet_node_status.go:548] "Error updating node status, will retry" err="error getting node \"w-7\": nodes \"w-7\" not found"`+"\n", 2)}
			}},
		{what: "rootless kubelet", step: "kubelet", id: "kubelet-rootless", found: "runs as another user than root", fix: "node-driver-registrar", both: "no-kubelet",
			breaks: func(t *testing.T, n *node) {
				n.write("proc/812/status", "Name:\tx\nUid:\t1000\t1000\t1000\t1000\n")
				if err := os.Symlink("/", n.path("proc/812/root")); err != nil {
					t.Fatal(err)
				}
			},
			manual: func(t *testing.T, n *node) { n.startKubelet() }},
		{what: "plugins_registry is a link", step: "plugins_registry", id: "plugins-registry-link", found: "is a symbolic link to ", fix: "mount --bind ",
			breaks: func(t *testing.T, n *node) {
				if err := errors.Join(os.Rename(n.registry(), n.path("moved")), os.Symlink(n.path("moved"), n.registry())); err != nil {
					t.Fatal(err)
				}
			},
			manual: func(t *testing.T, n *node) {
				if err := errors.Join(os.Remove(n.registry()), os.Rename(n.path("moved"), n.registry())); err != nil {
					t.Fatal(err)
				}
			}},
		{what: "a started kubelet does not ask", step: "registration", id: "kubelet-not-asking", found: "since the start of kubelet (pid 812, kubelet.service), 40s ago", fix: "csi-registrar reregister",
			breaks: func(t *testing.T, n *node) { n.ended(40*time.Second, 60) }},
		{what: "a started kubelet does not confirm", step: "registration", id: "kubelet-not-confirming", found: "neither confirmed nor refused", fix: "csi-registrar reregister",
			breaks: func(t *testing.T, n *node) {
				n.ended(40*time.Second, 60)
				n.status.Drivers[0].LastGetInfoAt = time.Now()
			}},
		{what: "unit with an unknown user", step: "unit", id: "unit-restarting", found: "ends at each start (exit-code, status 217): \"Failed to determine user credentials: No such process\"; /etc/systemd/system/csi-registrar.service.d/x.conf:2 sets \"User=nobody-there\"",
			fix: "mv -n /etc/systemd/system/csi-registrar.service.d/x.conf /etc/systemd/system/csi-registrar.service.d/x.conf.off\nsystemctl daemon-reload\nsystemctl restart csi-registrar.service",
			breaks: func(t *testing.T, n *node) {
				n.down()
				const file = "/etc/systemd/system/csi-registrar.service.d/x.conf"
				n.write(file, "[Service]\nUser=nobody-there\n")
				n.write(rootdir.DropInFile, "[Service]\nReadWritePaths=/srv\n")
				n.write("/lib/systemd/system/csi-registrar.service.d/before-kubelet.conf", "[Unit]\nBefore=kubelet.service\n")
				maps.Copy(n.units[serviceUnit], map[string]string{"ActiveState": "inactive", "NRestarts": "1", "Result": "exit-code", "ExecMainStatus": "217",
					"DropInPaths": "/usr/none.conf /lib/systemd/system/csi-registrar.service.d/before-kubelet.conf " + rootdir.DropInFile + " " + file, "journal": "Failed to determine user credentials: No such process"})
			}},
		{what: "unit with two commands", step: "unit", id: "unit-not-loaded", found: "more than one ExecStart= setting", fix: "mv -n /run/systemd/system/csi-registrar.service.d/x.conf ",
			breaks: func(t *testing.T, n *node) { // the daemon still runs
				const file = "/run/systemd/system/csi-registrar.service.d/x.conf"
				n.write(file, "[Service]\nExecStart=/bin/true\n")
				maps.Copy(n.units[serviceUnit], map[string]string{"LoadState": "bad-setting", "InvocationID": "5f", "DropInPaths": file,
					"journal": "Service has more than one ExecStart= setting, which is only allowed for Type=oneshot services. Refusing."})
			}},
		{what: "unit replaced", step: "unit", id: "unit-failed", found: "csi-registrar.service has failed (exit-code): \"Failed at step EXEC\"; /etc/systemd/system/csi-registrar.service is in place of the unit of the package",
			fix: "mv -n /etc/systemd/system/csi-registrar.service /etc/systemd/system/csi-registrar.service.off\nsystemctl daemon-reload\nsystemctl restart csi-registrar.service",
			breaks: func(t *testing.T, n *node) {
				n.down()
				const file = "/etc/systemd/system/csi-registrar.service"
				n.write(file, "[Service]\nExecStart=/none\n")
				n.write("/usr/lib/systemd/system/csi-registrar.service", "")
				maps.Copy(n.units[serviceUnit], map[string]string{"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "203", "FragmentPath": file, "journal": "Failed at step EXEC"})
			}},
		{what: "unit that ends again and again", step: "unit", id: "unit-restarting", found: "ends at each start (exit-code, status 1): \"no memory\"", fix: "journalctl",
			breaks: func(t *testing.T, n *node) {
				n.down()
				maps.Copy(n.units[serviceUnit], map[string]string{"ActiveState": "activating", "SubState": "start", "NRestarts": "7", "Result": "exit-code", "ExecMainStatus": "1", "journal": "no memory"})
			},
			manual: func(t *testing.T, n *node) {
				n.daemon = true
				maps.Copy(n.units[serviceUnit], map[string]string{"ActiveState": "active", "Result": "success"})
			}},
		{what: "socket of the unit masked", step: "unit", id: "unit-stopped", found: "is inactive", fix: "systemctl unmask csi-registrar.socket\nsystemctl enable --now",
			breaks: func(t *testing.T, n *node) {
				n.down()
				n.units[serviceUnit]["ActiveState"], n.units[serviceUnit]["Requires"] = "inactive", "csi-registrar.socket"
				n.units["csi-registrar.socket"] = map[string]string{"LoadState": "masked"}
			}},
		{what: "socket of the unit gone", step: "unit", id: "unit-not-enabled", found: "csi-registrar.service runs, which requires csi-registrar.socket: there is no such unit, and it will not be started again", fix: "sh -c 'apt-get install --reinstall csi-registrar || dnf reinstall csi-registrar'\nsystemctl daemon-reload",
			breaks: func(t *testing.T, n *node) {
				n.units[serviceUnit]["Requires"] = "csi-registrar.socket"
				n.units["csi-registrar.socket"] = map[string]string{"LoadState": "not-found"}
			},
			manual: func(t *testing.T, n *node) {
				delete(n.units, "csi-registrar.socket")
				n.units[serviceUnit]["Requires"] = ""
			}},
		{what: "kubelet without a container runtime", step: "kubelet", id: "no-kubelet", found: "kubelet.service is activating (auto-restart); containerd.service is inactive (dead)", fix: "systemctl unmask containerd.service\nsystemctl enable containerd.service\nsystemctl start containerd.service\nsystemctl start kubelet.service",
			breaks: func(t *testing.T, n *node) {
				n.remove(n.path("proc/812"))
				n.units["kubelet.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "activating", "SubState": "auto-restart", "Result": "success", "UnitFileState": "enabled"}
				n.units["containerd.service"] = map[string]string{"LoadState": "masked", "ActiveState": "inactive", "SubState": "dead", "Result": "success"}
			},
			manual: func(t *testing.T, n *node) {
				delete(n.units, "kubelet.service")
				delete(n.units, "containerd.service")
				n.startKubelet()
			}},
		{what: "kubelet that ends again and again", step: "kubelet", id: "no-kubelet", found: `kubelet (pid 812, kubelet.service) runs for 3s, and was restarted 17 times: "unknown flag: --network-plugin"; /etc/systemd/system/kubelet.service.d/f.conf:2 sets "Environment=X"`,
			fix: "# if that is the cause, correct it, or set it aside:\n# mv -n /etc/systemd/system/kubelet.service.d/f.conf /etc/systemd/system/kubelet.service.d/f.conf.off\nsystemctl daemon-reload\nsystemctl restart kubelet.service",
			breaks: func(t *testing.T, n *node) {
				const file = "/etc/systemd/system/kubelet.service.d/f.conf"
				n.write(file, "[Service]\nEnvironment=X\n")
				n.write("proc/uptime", "1000.00 1.00\n")
				n.write("proc/812/stat", fmt.Sprintf("812 (kubelet) S%s 99700 0\n", strings.Repeat(" 0", 18)))
				n.units["kubelet.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "NRestarts": "17", "DropInPaths": file, "journal": "unknown flag: --network-plugin"}
			},
			manual: func(t *testing.T, n *node) { delete(n.units, "kubelet.service") }},
		{what: "drop-in that hides the socket", step: "sandbox", id: "driver-socket-hidden", found: "which InaccessiblePaths= hides from the daemon; /etc/systemd/system/csi-registrar.service.d/hide.conf:2 sets", fix: "systemctl daemon-reload\nsystemctl restart csi-registrar.service",
			breaks: func(t *testing.T, n *node) {
				const file = "/etc/systemd/system/csi-registrar.service.d/hide.conf"
				n.write(file, "[Service]\nInaccessiblePaths=-"+n.path("csi")+"\n")
				n.units[serviceUnit]["InaccessiblePaths"], n.units[serviceUnit]["DropInPaths"] = "-"+n.path("csi"), file
			},
			manual: func(t *testing.T, n *node) { n.units[serviceUnit]["InaccessiblePaths"] = "" }},
		{what: "link to a file that is not there", step: "configuration", id: "configuration-error", found: "60-nfs.toml: cannot be read", fix: "# create /opt/none.toml, or remove the link to it: rm ",
			breaks: func(t *testing.T, n *node) {
				n.mkdir(n.path("etc/csi-registrar/conf.d"), 0o755)
				if err := os.Symlink("/opt/none.toml", n.path("etc/csi-registrar/conf.d/60-nfs.toml")); err != nil {
					t.Fatal(err)
				}
				n.restartDaemon()
			},
			manual: func(t *testing.T, n *node) { n.remove(n.path("etc/csi-registrar/conf.d/60-nfs.toml")) }},
		{what: "link to a file system that is not mounted", step: "configuration", id: "configuration-error", found: "60-nfs.toml: cannot be read", fix: "mount /srv/config\n",
			breaks: func(t *testing.T, n *node) {
				n.mkdir(n.path("etc/csi-registrar/conf.d"), 0o755)
				n.write("etc/fstab", "# disks\n/dev/sda1 / ext4 defaults 0 1\nLABEL=config /srv/config ext4 ro,noauto 0 0\n")
				if err := os.Symlink("/srv/config/60-nfs.toml", n.path("etc/csi-registrar/conf.d/60-nfs.toml")); err != nil {
					t.Fatal(err)
				}
				n.restartDaemon()
			},
			manual: func(t *testing.T, n *node) { n.remove(n.path("etc/csi-registrar/conf.d/60-nfs.toml")) }},
		{what: "unit stopped", step: "unit", id: "unit-stopped", found: "is inactive", fix: "systemctl enable --now",
			breaks: func(t *testing.T, n *node) { n.down(); n.units[serviceUnit]["ActiveState"] = "inactive" }},
		{what: "daemon does not answer", step: "daemon", id: "daemon-not-running", found: "csi-registrar.service runs, but somebody removed ", fix: "systemctl restart",
			breaks: func(t *testing.T, n *node) { n.down() }},
		{what: "sandbox for another root_dir", step: "sandbox", id: "root-dir-not-writable", found: "read-only", fix: "ReadWritePaths=",
			breaks: func(t *testing.T, n *node) {
				n.units[serviceUnit]["ReadWritePaths"] = "-/run/csi-registrar -/var/lib/kubelet"
			}},
		{what: "root_dir in /tmp", step: "sandbox", id: "root-dir-not-writable", found: "PrivateTmp=yes", fix: "PrivateTmp=no",
			breaks: func(t *testing.T, n *node) { n.units[serviceUnit]["PrivateTmp"] = "yes" },
			manual: func(t *testing.T, n *node) { n.units[serviceUnit]["PrivateTmp"] = "no" }},
		{what: "root_dir below keys", step: "sandbox", id: "root-dir-not-writable", found: "is hidden from it (InaccessiblePaths=)", fix: "root directory elsewhere",
			breaks: func(_ *testing.T, n *node) {
				n.units[serviceUnit]["InaccessiblePaths"] = "-" + filepath.Dir(n.rootDir) + " -/etc/shadow"
			},
			manual: func(_ *testing.T, n *node) { n.units[serviceUnit]["InaccessiblePaths"] = "-/etc/shadow" }},
		{what: "store disabled", step: "descriptor store", id: "store-too-small", found: "FileDescriptorStoreMax= is 0", fix: "FileDescriptorStoreMax=4096",
			breaks: func(t *testing.T, n *node) { n.units[serviceUnit]["FileDescriptorStoreMax"] = "0" }},
		{what: "without --keep-sockets", step: "descriptor store", id: "sockets-not-kept", found: "without --keep-sockets", fix: "--keep-sockets",
			breaks: func(t *testing.T, n *node) { n.units[serviceUnit]["ExecStart"] = "/usr/bin/csi-registrar run" }},
		{what: "watchdog off", step: "watchdog", id: "watchdog-off", found: "does not watch the daemon", fix: "WatchdogSec=20s",
			breaks: func(t *testing.T, n *node) { n.units[serviceUnit]["WatchdogUSec"] = "infinity" }},
		{what: "others may register", step: "plugins_registry", id: "plugins-registry-writable", found: "register any driver", fix: "chmod go-w",
			breaks: func(t *testing.T, n *node) { chmod(t, n.registry(), 0o777) }},
	} {
		t.Run(test.what, func(t *testing.T) {
			if test.root && os.Geteuid() != 0 {
				t.Skip("needs root: files of another user")
			}
			n := newNode(t)
			test.breaks(t, n)
			var drivers []string
			if test.named {
				drivers = []string{name}
			}
			r := n.examine(drivers...)
			if len(r.Findings) == 0 {
				t.Fatal("nothing is found")
			}
			first := r.Findings[0]
			if first.Step != test.step || first.ID != test.id || !strings.Contains(first.Found, test.found) || !strings.Contains(lines(first.Fix), test.fix) {
				t.Errorf("the first finding is %+v\nof %d", first, len(r.Findings))
			}
			if len(r.Findings) > 1 && r.Findings[1].ID != test.both {
				t.Errorf("one cause, %d findings: %+v", len(r.Findings), r.Findings)
			}
			changed := func(f Fix) bool {
				return !f.IsComment() && f.Command.Name != "journalctl" && !strings.HasPrefix(f.String(), "csi-registrar ")
			}
			if i := slices.IndexFunc(first.Fix, func(f Fix) bool { return f.String() == reload.String() }); i > 0 && !slices.ContainsFunc(first.Fix[:i], changed) {
				t.Errorf("a reload below a comment that asks for an edit: %s", lines(first.Fix))
			}
			for _, f := range first.Fix {
				if rest := quoted.ReplaceAllString(f.Comment, ""); strings.ContainsAny(rest, ";|&<>$`()\"'*?!\\") {
					t.Errorf("zsh would not take it for a comment: %s", f)
				}
			}
			if r.Healthy != (first.Severity == Warning) {
				t.Errorf("healthy is %v with %+v", r.Healthy, first)
			}
			followed := n.follow(first.Fix)
			switch {
			case test.manual != nil:
				test.manual(t, n)
				n.restartDaemon()
			case !followed:
				t.Errorf("the commands are not sufficient: %s", lines(first.Fix))
			}
			if r := n.examine(); len(r.Findings) != 0 {
				t.Errorf("it is not fixed: %+v", r.Findings)
			}
		})
	}
}

// Of the sockets of others only one on which nobody listens is a finding.
func TestPluginsOfOthers(t *testing.T) {
	n := newNode(t)
	n.process(os.Getpid(), "gpu-plugin", "0::/kubepods.slice/cri-containerd-0123.scope")
	n.mkdir(filepath.Join(n.registry(), "dra"), 0o750)
	for file, r := range map[string]registration{
		"dra/gpu.sock": {kind: registerapi.DRAPlugin, name: "gpu.example.com"},
		"nic.sock":     {kind: registerapi.DevicePlugin, name: "example.com/a nic"},
		"any.sock":     {kind: "other"},
	} {
		t.Cleanup(servePlugin(t, filepath.Join(n.registry(), file), r))
	}
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: filepath.Join(n.registry(), "old-reg.sock")})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	stale.Close()
	made := time.Now().Add(-75 * time.Hour).Truncate(time.Second)
	if err := os.Chtimes(filepath.Join(n.registry(), "old-reg.sock"), made, made); err != nil {
		t.Fatal(err)
	}
	hangs, err := net.Listen("unix", filepath.Join(n.registry(), "hangs.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer hangs.Close()

	dead := filepath.Join(n.registry(), "old-reg.sock")
	n.write("proc/uptime", "1000000.00 1.00\n")
	// A kubelet that was there before may have registered the driver, and forgets it with the file.
	for i, fix := range []string{"# start the program that made it", "rm " + dead} {
		age := []int{100 * 3600, 3600}[i] // in seconds
		n.write("proc/812/stat", fmt.Sprintf("812 (kubelet) S%s %d 0\n", strings.Repeat(" 0", 18), (1000000-age)*100))
		r := n.examine()
		if len(r.Findings) != 1 || r.Findings[0].ID != "plugin-socket-stale" || !strings.HasPrefix(lines(r.Findings[0].Fix), fix) || n.follow(r.Findings[0].Fix) != (fix[0] == 'r') {
			t.Errorf("%d s: %+v", age, r.Findings)
		}
	}
}

// The kubelet's directories of a volume, and what it writes there.
const (
	volumeOfPod  = "pods/0123/volumes/kubernetes.io~csi/pv"
	stagedVolume = "plugins/kubernetes.io/csi/" + name + "/0123"
	volData      = `{"driverName":"` + name + `","volumeHandle":"v"}`
)

// Volumes that the kubelet may be about to change are not reported, nor those of other drivers if
// one is named.
func TestVolumesThatAreNoProblem(t *testing.T) {
	n := newNode(t)
	n.volume(volumeOfPod, volData, 0)
	n.volume(stagedVolume+"4", strings.Replace(volData, `"v"`, `"w"`, 1), 0)
	n.volume("pods/0123/volumes/kubernetes.io~csi/other", `{"driverName":"other.example","volumeHandle":"v"}`, time.Hour)
	if r := n.examine(name); len(r.Findings) > 0 {
		t.Errorf("%+v", r.Findings)
	}
	if r := n.examine(); len(r.Findings) != 2 || r.Findings[0].ID != "volumes-unregistered" || r.Findings[1].Driver != "other.example" {
		t.Errorf("%+v", r.Findings)
	}
}

// A pod that waits is named, by the kubelet's journal or by its files.
func TestPodsThatWait(t *testing.T) {
	const unique = `(UniqueName: \"kubernetes.io/csi/` + name + `^v\") pod \"db\" (UID: \"0123\")`
	const failed = `E1126 01:02:03.000004     812 nestedpendingoperations.go:348] "Operation for \"{volumeName:kubernetes.io/csi/` + name + `^v podName:0123 nodeName:}\" failed. No retries permitted until 2026-11-26 (durationBeforeRetry 2m2s). Error: MountVolume.SetUp failed for volume \"pv\" ` + unique + ` : rpc error: code = DeadlineExceeded desc = context deadline exceeded"`
	for what, c := range map[string]struct {
		journal string
		files   bool
		age     time.Duration
		mounted bool
		want    string
	}{
		"by the journal":   {failed, false, 0, false, `pods wait for a volume: db (0123), "NodePublishVolume: rpc error: code = DeadlineExceeded desc = context deadline exceeded"`},
		"by both":          {failed, true, 0, false, `pods wait for a volume: db (0123), "NodePublishVolume: rpc error: code = DeadlineExceeded desc = context deadline exceeded"`},
		"new":              {"", true, 30 * time.Second, false, ""},
		"by the files":     {"", true, 2 * time.Minute, false, "pods wait for a volume: 0123, for 2m0s, NodePublishVolume without an answer"},
		"mounted since":    {failed, true, 0, true, ""},
		"no error":         {"MountVolume started for volume \"pv\" " + unique, false, 0, false, ""},
		"inline":           {strings.ReplaceAll(failed, "csi/"+name+"^v", "csi/0123-pv"), true, 0, false, `db (0123), "NodePublishVolume of an inline volume: rpc error: code = DeadlineExceeded desc = context deadline exceeded"`},
		"another's pod":    {strings.ReplaceAll(failed, "0123", "0124"), false, 0, false, ""},
		"inline, no files": {strings.ReplaceAll(failed, "csi/"+name+"^v", "csi/0123-pv"), false, 0, false, `db (0123), "NodePublishVolume of an inline volume: rpc error: code = DeadlineExceeded desc = context deadline exceeded"`},
		"no attachment":    {strings.ReplaceAll(failed, "DeadlineExceeded", "volumeattachments x not found"), false, 0, false, `db (0123), "NodePublishVolume: rpc error: code = volumeattachments x not found desc = context deadline exceeded"`},
		"a pod that waits": {`E1126 01:02:03.000004     812 pod_workers.go:1324] "Error syncing pod, skipping" err="unmounted volumes=[v], unattached volumes=[], failed to process volumes=[]: context deadline exceeded" pod="default/db" podUID="0123"`, false, 0, false, `default/db (0123), "unmounted volumes=[v], unattached volumes=[], failed to process volumes=[]: context deadline exceeded"`},
		"a path": {strings.ReplaceAll(failed, "code = DeadlineExceeded desc = context deadline exceeded", "mkdir /etc/passwd/x: not a directory"), false, 0, false,
			`db (0123), "NodePublishVolume: rpc error: mkdir /etc/passwd/x: not a directory"; /etc/passwd is a regular file, not a directory`},
		"a path in the id": {strings.ReplaceAll(failed, "0123", "../0123"), false, 0, false, ""},
	} {
		n := newNode(t)
		n.process(os.Getpid(), "nfs", "0::/system.slice/csi-nfs.service")
		n.mkdir(n.path("kubelet/pods/0123"), 0o755)
		n.units["kubelet.service"] = map[string]string{"journal": "noise\n" + c.journal}
		if c.files {
			n.volume(volumeOfPod, volData, c.age)
		}
		if c.mounted {
			n.mounted(volumeOfPod + "/mount")
		}
		r := n.examine()
		f, ok := finding(r, "pods-waiting")
		if ok != (c.want != "") || !strings.HasSuffix(f.Found, c.want) || r.Healthy == ok || len(r.Findings) > 1 {
			t.Errorf("%s: %+v, want %q", what, r.Findings, c.want)
		}
		log := strings.Replace(lines(f.Fix), "\nmv -n /etc/passwd /etc/passwd.old\nmkdir /etc/passwd", "", 1)
		if ok && (log == lines(f.Fix)) == (what == "a path") {
			t.Errorf("%s: %+v", what, f)
		}
		if what == "a pod that waits" { // for whom is not known
			if f.Driver != "" || !strings.Contains(log, "driver:.spec.csi.driver\njournalctl") {
				t.Errorf("%+v", f)
			}
			continue
		}
		if ok && (strings.HasPrefix(log, "journalctl --no-pager -b -u kubelet.service ") == (what == "no attachment") || !strings.Contains(log, "\njournalctl --no-pager -b -u csi-nfs.service ") ||
			!strings.HasSuffix(log, " see trace.md:\n# csi-registrar trace --listen "+n.path("csi/trace.sock")+" --connect "+n.socket()+
				"\n# if the driver hangs, and volumes that are mounted survive its restart:\n# systemctl restart --no-block csi-nfs.service")) {
			t.Errorf("%s: %s", what, log)
		}
	}
	n := newNode(t)
	n.process(os.Getpid(), "nfs", "0::/system.slice/csi-nfs.service")
	const file = "/etc/systemd/system/csi-nfs.service.d/server.conf"
	n.write(file, "[Service]\nEnvironment=SERVER=nowhere\n")
	n.units["csi-nfs.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "DropInPaths": file, "journal": "error: nowhere does not answer"}
	n.volume(volumeOfPod, volData, 2*time.Minute)
	if f, _ := finding(n.examine(), "pods-waiting"); !strings.HasSuffix(f.Found, `; the driver logged "error: nowhere does not answer"; `+file+`:2 sets "Environment=SERVER=nowhere"`) ||
		!strings.Contains(lines(f.Fix), "\n# if that is the cause, correct it, or set it aside:\n# mv -n "+file) {
		t.Errorf("%+v", f)
	}
}

// An error about a driver that no table has, or whose name is none, is one of the node.
func TestPodsThatWaitForAnother(t *testing.T) {
	for _, driver := range []string{"other.example", "$(reboot)"} {
		n := newNode(t)
		n.mkdir(n.path("kubelet/pods/0123"), 0o755)
		n.units["kubelet.service"] = map[string]string{"journal": `E1126 01:02:03.000004     812 nestedpendingoperations.go:348] "Operation failed. Error: MountVolume.SetUp failed for volume \"pv\" ` +
			`(UniqueName: \"kubernetes.io/csi/` + driver + `^v\") pod \"db\" (UID: \"0123\") : kubernetes.io/csi: driver not found"`}
		f := n.examine().Findings[0]
		if f.ID != "pods-waiting" || (f.Driver == driver) != (driver == "other.example") || !strings.Contains(f.Found, `db (0123), "MountVolume.SetUp failed: kubernetes.io/csi: driver not found"`) {
			t.Errorf("%+v", f)
		}
	}
}

// The directory of a pod cannot be made, so that there is none.
func TestPodWhoseDirectoryCannotBeMade(t *testing.T) {
	n := newNode(t)
	n.mkdir(n.path("kubelet/pods"), 0o755)
	dir := n.path("kubelet/pods/0123")
	n.units["kubelet.service"] = map[string]string{"journal": `E1126 01:02:03.000004     812 x.go:1] Error: MountVolume.SetUp failed for volume "v" (UniqueName: "kubernetes.io/csi/0123-v") pod "db" (UID: "0123") : ` +
		`kubernetes.io/csi: mounter.SetUpAt failed to create dir "` + dir + `/volumes/kubernetes.io~csi/v": mkdir ` + dir + `: operation not permitted`}
	if f, _ := finding(n.examine(), "pods-waiting"); !strings.Contains(f.Found, "mkdir "+dir+": operation not permitted") {
		t.Errorf("%+v", f)
	}
}

// An error about an object of Kubernetes has the command that shows it, and not the driver's log.
func TestPodsThatWaitForAnObject(t *testing.T) {
	const volume, inline, other = name + "^v", "0123-pv", "configmap/0123-pv"
	const refused = `rpc error: code = InvalidArgument desc = `
	for _, c := range []struct{ operation, volume, err, want string }{
		{"MountVolume.SetUp", volume, `fetching NodePublishSecretRef shop/creds failed: kubernetes.io/csi: failed to find the secret creds in the namespace shop with error: secrets \"creds\" not found`, "get -n shop secret/creds pv/pv"},
		{"MountVolume.SetUp", inline, `fetching NodePublishSecretRef shop/creds failed: kubernetes.io/csi: failed to find the secret creds in the namespace shop with error: x`, "get -n shop secret/creds pv/pv"},
		{"MountVolume.NodeAffinity check", volume, "no matching NodeSelectorTerms", "describe pv/pv node/"},
		{"MountVolume.WaitForAttach", volume, `volume v has GET error for volume attachment csi-01: volumeattachments.storage.k8s.io \"csi-01\" not found`, "get csidriver/" + name + " volumeattachments -o yaml"},
		{"MountVolume.SetUp", inline, `kubernetes.io/csi: mounter.SetupAt failed to check volume lifecycle mode: volume mode \"Ephemeral\" not supported by driver x (no CSIDriver object)`, "get csidriver/" + name + " -o yaml"},
		{"MountVolume.SetUp", volume, `kubernetes.io/csi: mounter.SetUpAt failed to get service accoount token attributes: serviceaccounts \"app\" not found`, "get csidriver/" + name + " -o yaml"},
		{"MountVolume.SetUp", other, `configmap \"settings\" not found`, "get configmap -A --field-selector metadata.name=settings"},
		{"MountVolume.SetUp", inline, refused + "no pod name", "get csidriver/" + name + " -o yaml\n"},
		{"MountVolume.MountDevice", volume, refused + "no volume", "get pv/pv csidriver/" + name + " -o yaml\n"},
		{"", "", "error processing PVC shop/data: PVC is not bound", "describe -n shop pvc/data"},
		{"", "", "error processing PVC shop/data: found PV object pv-1 but its pv.Spec.ClaimRef.UID a does not point to claim.UID b", "get -n shop pvc/data pv/pv-1 -o yaml"},
		{"MountVolume.MountDevice", volume, "kubernetes.io/csi: attacher.MountDevice failed to create newCsiDriverClient: driver name old.example.com not found in the list of registered CSI drivers", "get pv/pv -o yaml"},
		{"", "", "volume uses the ReadWriteOncePod access mode and is already in use by another pod", "get pods -A --field-selector spec.nodeName="},
	} {
		n := newNode(t)
		n.mkdir(n.path("kubelet/pods/0123"), 0o755)
		line := `Error: ` + c.operation + ` failed for volume \"pv\" (UniqueName: \"kubernetes.io/csi/` + c.volume + `\") pod \"db\" (UID: \"0123\") : ` + c.err + `"`
		if c.operation == "" {
			line = `"Error syncing pod, skipping" err="unmounted volumes=[v], unattached volumes=[], failed to process volumes=[]: ` + c.err + `" pod="default/db" podUID="0123"`
		}
		n.units["kubelet.service"] = map[string]string{"journal": "E1126 01:02:03.000004     812 x.go:1] " + strings.Replace(line, "csi/configmap/", "configmap/", 1)}
		f, _ := finding(n.examine(), "pods-waiting")
		fix := lines(f.Fix)
		if !strings.Contains(fix+"\n", "\n# kubectl "+c.want) || strings.Contains(fix, "trace") != strings.HasSuffix(c.want, "\n") || (f.Driver == "") != (c.volume == other) {
			t.Errorf("%s: %s: %+v\n%s", c.operation, c.err, f, fix)
		}
	}
}

// A pod that waits for a volume of a driver that is not registered: the kubelet says nothing of it
// for 2 minutes.
func TestPodsThatHaveNotStarted(t *testing.T) {
	for what, c := range map[string]struct {
		age     time.Duration
		started bool
		want    bool
	}{
		"waits":       {time.Minute, false, true},
		"runs":        {time.Minute, true, false},
		"has come":    {10 * time.Second, false, false},
		"is left":     {time.Hour, false, false},
		"is reported": {time.Minute, false, false},
	} {
		n := newNode(t)
		pod := n.path("kubelet/pods/0123")
		n.mkdir(pod, 0o755)
		if c.started {
			n.mkdir(filepath.Join(pod, "containers"), 0o755)
		}
		if err := os.Chtimes(pod, time.Time{}, time.Now().Add(-c.age)); err != nil {
			t.Fatal(err)
		}
		if what == "is reported" {
			n.units["kubelet.service"] = map[string]string{"journal": `E1126 "Error syncing pod, skipping" err="unmounted volumes=[v], unattached volumes=[], failed" pod="default/db" podUID="0123"`}
		}
		f, found := finding(n.examine(), "pods-not-started")
		if found != c.want || found && (f.Severity != Warning || !strings.HasSuffix(f.Found, ": 0123") || !strings.Contains(lines(f.Fix), "# kubectl get pv -o custom-columns=name:.metadata.name,")) {
			t.Errorf("%s: %+v", what, f)
		}
	}
}

// A volume that cannot be unstaged belongs to no pod.
func TestUnstageFails(t *testing.T) {
	n := newNode(t)
	n.mkdir(n.path("kubelet/pods"), 0o755)
	n.units["kubelet.service"] = map[string]string{"journal": `E1126 01:02:03.000004     812 x.go:1] Operation failed. Error: UnmountDevice failed for volume "pv" (UniqueName: "kubernetes.io/csi/` + name + `^v") on node "node" : kubernetes.io/csi: attacher.UnmountDevice failed: rpc error: code = Internal desc = busy`}
	if r := n.examine(); len(r.Findings) > 0 {
		t.Errorf("unstaged meanwhile: %+v", r.Findings)
	}
	n.volume(stagedVolume, volData, 0)
	if f, _ := finding(n.examine(), "pods-waiting"); f.Driver != name || !strings.Contains(f.Found, `: volume (v), "NodeUnstageVolume: kubernetes.io/csi: attacher.UnmountDevice failed: rpc error: code = Internal desc = busy"`) {
		t.Errorf("%+v", f)
	}
}

// Somebody unmounted the volume of a pod that runs.
func TestVolumeUnmountedUnderAPod(t *testing.T) {
	n := newNode(t)
	n.volume(volumeOfPod, volData, 30*time.Second)
	if r := n.examine(); len(r.Findings) > 0 {
		t.Errorf("the pod does not run yet: %+v", r.Findings)
	}
	n.process(999, "db", "0::/kubepods.slice/cri-containerd-0123.scope")
	n.mounts(999, "40 21 8:1 "+n.path("kubelet")+"/pods/0123/containers/db/1 /dev/termination-log rw - ext4 /dev/sda1 rw")
	if f := n.examine().Findings[0]; f.ID != "volume-not-mounted" {
		t.Errorf("%+v", f)
	}
}

// A setting in a file of the administrator is corrected there.
func TestFileThatOverridesAnother(t *testing.T) {
	n := newNode(t)
	file := n.path("etc/csi-registrar/conf.d/90-old.toml")
	n.write("etc/csi-registrar/conf.d/90-old.toml", fmt.Sprintf("# moved\n[driver.%q]\nsocket = \"/none/csi.sock\"\n", name))
	n.mkdir(n.path("kubelet/plugins/nfs"), 0o755)
	n.driver.stop()
	n.driver.start(t, n.path("kubelet/plugins/nfs/csi.sock"))
	n.restartDaemon()
	socket := n.path("kubelet/plugins/nfs/csi.sock")
	f := n.examine().Findings[0]
	if f.ID != "driver-socket-missing" || !strings.HasSuffix(f.Found, "the driver listens on "+socket+", and socket is set in "+file+":3") ||
		!strings.HasPrefix(lines(f.Fix), "sed -i -E '3s@") || !n.follow(f.Fix) || len(n.examine().Findings) > 0 {
		t.Errorf("%+v", f)
	}
}

// Files that changed shortly before a unit failed are named: those of the unit, and those that they
// name.
func TestFilesThatChanged(t *testing.T) {
	n := newNode(t)
	n.remove(n.path("proc/812"))
	n.write("etc/default/kubelet", "ARGS=--config=/etc/kubernetes/kubelet.yaml --log-file=/etc/none\n")
	n.write("etc/kubernetes/kubelet.yaml", "tlsCertFile: /etc/pki/kubelet.crt\n")
	n.write("etc/pki/kubelet.crt", "")
	n.units["kubelet.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "activating", "Result": "exit-code", "UnitFileState": "enabled",
		"FragmentPath": "/usr/lib/systemd/system/kubelet.service", "EnvironmentFiles": "/etc/default/kubelet (ignore_errors=yes)", "journal": "error: x"}
	if f := n.examine().Findings[0]; strings.Contains(f.Found, "changed last") {
		t.Errorf("%+v", f)
	}
	n.recent = time.Hour
	if f := n.examine().Findings[0]; f.ID != "no-kubelet" || !regexp.MustCompile(`; the files that changed last are /etc/\S+ \(0s ago\), /etc/\S+ \(0s ago\), /etc/\S+ \(0s ago\)$`).MatchString(f.Found) || !strings.Contains(f.Found, " /etc/pki/kubelet.crt (") {
		t.Errorf("%+v", f)
	}
}

// A drop-in of the socket unit moved the control socket: commands do not look for it elsewhere.
func TestControlSocketElsewhere(t *testing.T) {
	n := newNode(t)
	n.stopDaemon()
	const file = "/etc/systemd/system/csi-registrar.socket.d/site.conf"
	n.write(file, "[Socket]\nListenStream=\nListenStream=/run/site.sock\n")
	n.units[controlUnit] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "Listen": "/run/site.sock (Stream)", "DropInPaths": file}
	f, _ := finding(n.examine(), "daemon-not-running")
	if !strings.HasPrefix(f.Found, "csi-registrar.socket listens on \"/run/site.sock (Stream)\", because of ListenStream= in "+file+":3") ||
		!strings.Contains(lines(f.Fix), "'[Socket]' ListenStream= ListenStream=/run/csi-registrar/control.sock > /etc/systemd/system/csi-registrar.socket.d/zz-doctor-listenstream.conf\n") {
		t.Errorf("%+v", f)
	}
}

// A condition of a drop-in keeps the daemon from starting, which is no failure.
func TestDaemonWithAnUnmetCondition(t *testing.T) {
	n := newNode(t)
	n.stopDaemon()
	const file = "/etc/systemd/system/csi-registrar.service.d/fleet.conf"
	n.write(file, "[Unit]\nConditionPathExists=/etc/csi-registrar/enabled\n")
	p := n.units[serviceUnit]
	p["ActiveState"], p["SubState"], p["Result"], p["DropInPaths"] = "inactive", "dead", "success", file
	p["journal"] = "csi-registrar.service was skipped because of an unmet condition check (ConditionPathExists=/etc/csi-registrar/enabled)."
	f, _ := finding(n.examine(), "unit-stopped")
	if !strings.Contains(f.Found, "(ConditionPathExists=/etc/csi-registrar/enabled)") || !strings.Contains(f.Found, file+":2 sets ") || !strings.Contains(lines(f.Fix), "mv -n "+file+" "+file+".off\n") {
		t.Errorf("%+v", f)
	}
}

// The table has the directory of the driver's socket.
func TestSocketIsTheDirectory(t *testing.T) {
	n := newNode(t)
	n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", fmt.Sprintf("[driver.%q]\nsocket = %q\n", name, filepath.Dir(n.socket())))
	f := n.examine().Findings[0]
	if f.ID != "driver-socket-missing" || !strings.HasSuffix(f.Found, " is a directory, not a socket; the driver listens on "+n.socket()+", and socket is set in "+n.path("usr/lib/csi-registrar/conf.d/10-nfs.toml:2")) || !strings.Contains(lines(f.Fix), "socket = \""+n.socket()) {
		t.Errorf("%+v", f)
	}
}

// The line of a program's configuration that its error is about, and a required unit that failed.
func TestWhereAnErrorComesFrom(t *testing.T) {
	for why, place := range map[string]string{
		"panic: unrecognized feature gate: OldGateOfLastYear":                                                                                          "/etc/kubernetes/kubelet.yaml:3, which has OldGateOfLastYear",
		`"command failed" err="cannot unmarshal string into Go struct field KubeletConfiguration.evictionHard of type map[string]string"`:              "/etc/kubernetes/kubelet.yaml:4, which has evictionHard",
		`"command failed" err="invalid kubeconfig: error loading config file \"/etc/kubernetes/kubeconfig\": yaml: line 3: did not find expected ','"`: "/etc/kubernetes/kubeconfig:3",
	} {
		n := newNode(t)
		n.remove(n.path("proc/812"))
		n.write("etc/kubernetes/kubelet.yaml", "kind: KubeletConfiguration\nfeatureGates:\n  OldGateOfLastYear: true\nevictionHard: 10%\n")
		n.units["kubelet.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "activating", "SubState": "auto-restart", "Result": "exit-code", "ExecMainStatus": "1", "NRestarts": "9",
			"ExecStart": "{ path=/usr/bin/kubelet ; argv[]=/usr/bin/kubelet --config=/etc/kubernetes/kubelet.yaml --v=2 ; }", "journal": why}
		if f, _ := finding(n.examine(), "no-kubelet"); !strings.Contains(f.Found, "; see "+place) || !strings.Contains(lines(f.Fix), "# correct "+place+"\n") {
			t.Errorf("%+v", f)
		}
	}

	n := newNode(t)
	n.driver.stop()
	n.write("etc/systemd/system/csi-nfs.service", "[Service]\nExecStart=/usr/bin/nfs unix://"+n.socket()+"\n")
	n.units["csi-nfs.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "inactive", "SubState": "dead", "Result": "success", "Requires": "san.service", "journal": "Dependency failed for csi-nfs.service"}
	n.units["san.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "5", "journal": "error: no target answers"}
	f, _ := finding(n.examine(), "driver-socket-missing")
	if !strings.Contains(f.Found, `, which requires san.service, and that has failed: "error: no target answers"`) || !strings.Contains(lines(f.Fix), "\nsystemctl restart san.service\n") {
		t.Errorf("%+v", f)
	}
}

// The directory of the driver's socket is a link to what is not mounted.
func TestDirectoryThatIsABrokenLink(t *testing.T) {
	n := newNode(t)
	n.driver.stop()
	n.remove(filepath.Dir(n.socket()))
	if err := os.Symlink("/data/csi", filepath.Dir(n.socket())); err != nil {
		t.Fatal(err)
	}
	if f := n.examine().Findings[0]; !strings.Contains(f.Found, "/csi is a link to /data/csi, which does not exist") {
		t.Errorf("%+v", f)
	}
}

// A warning never stands before a problem.
func TestProblemsComeFirst(t *testing.T) {
	n := newNode(t)
	n.units[serviceUnit]["UnitFileState"] = "disabled"
	n.driver.stop()
	n.restartDaemon()
	r := n.examine()
	if len(r.Findings) != 2 || r.Findings[0].Step != "socket" || r.Findings[1].Step != "unit" || r.Healthy {
		t.Errorf("%+v", r.Findings)
	}
}

// Connecting to the control socket of a service that has failed would start it.
func TestStartsNoFailedService(t *testing.T) {
	n := newNode(t)
	n.down()
	n.units[serviceUnit]["ActiveState"] = "failed"
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: control.Path(n.root)})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if r := n.examine(); len(r.Findings) != 1 || r.Findings[0].Step != "unit" {
		t.Errorf("%+v", r.Findings)
	}
	if err := ln.SetDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if c, err := ln.Accept(); err == nil { // it would be in the queue
		c.Close()
		t.Error("doctor connected to it")
	}
}

// lines is a fix as text.
func lines(fix []Fix) string {
	var all []string
	for _, f := range fix {
		all = append(all, f.String())
	}
	return strings.Join(all, "\n")
}

// fault returns a step of a test that changes the driver's faults.
func fault(change func(*fakeDriver)) func(*testing.T, *node) {
	return func(_ *testing.T, n *node) {
		n.driver.set(change)
		n.restartDaemon()
	}
}

// slow gives the driver a short time limit.
func (n *node) slow() {
	n.write("etc/csi-registrar/conf.d/60-nfs.toml", fmt.Sprintf("[driver.%q]\ntimeout = \"200ms\"\n", name))
}

// ended ends the kubelet that confirmed; the one that runs has run for some seconds.
func (n *node) ended(ago time.Duration, seconds int) {
	n.status.Kubelet = status.Kubelet{PID: 811, EndedAt: time.Now().Add(-ago)}
	n.status.Drivers[0].LastGetInfoAt = time.Now().Add(-2 * ago)
	n.write("proc/uptime", "1000.00 1.00\n")
	n.write("proc/812/stat", fmt.Sprintf("812 (a ) b) S%s %d 0\n", strings.Repeat(" 0", 18), (1000-seconds)*100))
}

// A kubelet that has just started, or whose predecessor has just ended, is not reported.
func TestKubeletThatStarts(t *testing.T) {
	for _, c := range []struct {
		ago     time.Duration
		seconds int
		found   bool
	}{{10 * time.Second, 60, false}, {time.Minute, 10, false}, {time.Minute, 20, true}} {
		n := newNode(t)
		n.ended(c.ago, c.seconds)
		if r := n.examine(); (len(r.Findings) > 0) != c.found {
			t.Errorf("%+v: %+v", c, r.Findings)
		}
	}
}

// A kubelet that has just started creates its Node.
func TestNodeOfAYoungKubelet(t *testing.T) {
	for seconds, want := range map[int]bool{30: false, 90: true} {
		n := newNode(t)
		n.write("proc/uptime", "1000.00 1.00\n")
		n.write("proc/812/stat", fmt.Sprintf("812 (kubelet) S%s %d 0\n", strings.Repeat(" 0", 18), (1000-seconds)*100))
		n.units["kubelet.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running",
			"journal": strings.Repeat(`E1128 "Error updating node status, will retry" err="nodes \"w-7\" not found"`+"\n", 2)}
		if _, found := finding(n.examine(), "node-missing"); found != want {
			t.Errorf("after %d s: %v", seconds, found)
		}
	}
}

// A kubelet that does not reach the API server learns of no pod.
func TestKubeletWithoutAnAPIServer(t *testing.T) {
	const auth = `"Unable to register node with API server" err="Post \"https://192.0.2.1:6443/api/v1/nodes\": getting credentials: exec: executable aws-iam-authenticator not found"`
	for last, fix := range map[string]string{
		auth: "# install the program that the error names, or correct exec: in the kubeconfig of the kubelet first\n# that is /etc/kubernetes/kubelet.conf\n",
		`"Error updating node status, will retry" err="error getting node \"w-7\": Get \"https://192.0.2.1:6443/api/v1/nodes/w-7\": dial tcp 192.0.2.1:6443: i/o timeout"`: "# if that address is wrong: correct server: in /etc/kubernetes/kubelet.conf:1, then run the next line\n",
	} {
		n := newNode(t)
		n.write("proc/812/cmdline", "kubelet\x00--kubeconfig=/etc/kubernetes/kubelet.conf\x00")
		n.rooted(812, n.root)
		n.write("etc/kubernetes/kubelet.conf", "clusters: [{name: c, cluster: {server: https://192.0.2.1:6443}}]\n")
		n.units["kubelet.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "journal": "E1128 " + last + "\nE1128 " + last}
		f, _ := finding(n.examine(), "node-not-updated")
		if !strings.HasPrefix(f.Found, "the kubelet cannot update its Node, nor learn of new pods: ") || !strings.Contains(lines(f.Fix), fix) {
			t.Errorf("%+v", f)
		}
	}
	// After kubeadm join it tries again, and closes its connections when it has a certificate of
	// its own. The second error is that of Kubernetes 1.37.2.
	const failed, registered = "E1128 " + auth, `I1128 "Successfully registered node" node="w-7"`
	const closed = `E1128 "Error updating node status, will retry with syncNodeStatus" err="failed to patch status \"{}\" for node \"w-7\": ` +
		`Patch \"https://127.0.0.1:6443/api/v1/nodes/w-7/status?timeout=10s\": read tcp 127.0.0.1:57218->127.0.0.1:6443: use of closed network connection"`
	const once = `E1128 "Error updating node status, will retry" err="error getting node \"w-7\": Get \"https://192.0.2.1:6443/api/v1/nodes/w-7\": EOF"`
	for journal, want := range map[string]bool{failed + "\n" + registered: false, registered + "\n" + failed: true, closed + "\n" + closed: false, once: false, once + "\n" + once: true} {
		n := newNode(t)
		n.units["kubelet.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "journal": journal}
		if f, found := finding(n.examine(), "node-not-updated"); found != want {
			t.Errorf("after %q: %+v", journal, f)
		}
	}
}

// A kubelet that calls its Node by another name than its credentials is refused.
func TestNodeOfAnotherName(t *testing.T) {
	const file = "/etc/systemd/system/kubelet.service.d/name.conf"
	n := newNode(t)
	n.write(file, "[Service]\nEnvironment=EXTRA=--hostname-override=w-8\n")
	n.write("proc/812/cmdline", "kubelet\x00--hostname-override=w-8\x00")
	n.units["kubelet.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "DropInPaths": file,
		"journal": `E1128 "Unable to register node with API server, reason is forbidden" err="nodes \"w-8\" is forbidden: node \"w-7\" is not allowed to modify node \"w-8\""`}
	if f, _ := finding(n.examine(), "node-missing"); !strings.Contains(f.Found, "calls its Node w-8, because of Environment= in "+file+":2, which it may not write: ") || !strings.HasSuffix(lines(f.Fix), "mv -n "+file+" "+file+".off\nsystemctl daemon-reload\nsystemctl restart kubelet.service") {
		t.Errorf("%+v", f)
	}
	const registered = `I1128 "Successfully registered node" node="`
	n.units["kubelet.service"]["journal"] = registered + "w-7\"\n" + registered + "w-8\""
	if f, _ := finding(n.examine(), "node-missing"); !strings.HasSuffix(f.Found, ":2, and in the last hour it called it w-7, whose pods have ended") {
		t.Errorf("%+v", f)
	}
	n.units["kubelet.service"]["journal"] += "\n" + registered + "w-7\""
	if r := n.examine(); len(r.Findings) > 0 {
		t.Errorf("it has its name again: %+v", r.Findings)
	}
}

// A driver that has just started is asked by the daemon within seconds.
func TestDriverThatHasJustStarted(t *testing.T) {
	n := newNode(t)
	n.holdReg = true
	n.restartDaemon()
	n.process(os.Getpid(), "nfs", "0::/system.slice/csi-nfs.service")
	n.write("proc/uptime", "1000.00 1.00\n")
	for seconds, want := range map[int]int{3: 0, 7: 1} {
		n.write(fmt.Sprintf("proc/%d/stat", os.Getpid()), fmt.Sprintf("1 (nfs) S%s %d 0\n", strings.Repeat(" 0", 18), (1000-seconds)*100))
		if r := n.examine(); len(r.Findings) != want {
			t.Errorf("after %d s: %+v", seconds, r.Findings)
		}
	}
}

// restarting is a systemd that starts the daemon again after some questions.
type restarting struct {
	units
	questions int
}

func (r *restarting) Show(ctx context.Context, unit string, properties ...string) (map[string]string, error) {
	p, err := r.units.Show(ctx, unit, properties...)
	if r.questions--; unit == serviceUnit && r.questions > 0 {
		p["ActiveState"] = "deactivating"
	}
	return p, err
}

// A daemon that ends to be started again, as after a mount over root_dir, is no problem.
func TestDaemonThatIsRestarted(t *testing.T) {
	n := newNode(t)
	o := Options{Source: n.source(), Root: n.root, Units: &restarting{n.units, 3}}
	if r := Run(t.Context(), o); !r.Healthy || slices.ContainsFunc(r.Checks, func(c Check) bool { return c.Step == "unit" && c.Result != OK }) {
		t.Errorf("%+v", r)
	}
	n.down()
	o.Units = &restarting{n.units, 100}
	if _, found := finding(Run(t.Context(), o), "unit-stopped"); !found {
		t.Error("a unit that goes on ending is no problem")
	}
}

// A driver that answers in the seconds between two of its ends is a problem.
func TestDriverThatEndsAgainAndAgain(t *testing.T) {
	const file = "/etc/systemd/system/csi-nfs.service.d/x.conf"
	const supervise = "ExecStartPost=/usr/bin/csi-registrar supervise --socket "
	for _, c := range []struct {
		seconds, restarts int
		state             string
		want              bool
	}{
		{3, 3, "active", true}, {14, 9, "active", true}, {16, 9, "active", false}, {3, 2, "active", false},
		{8, 22, "active", false}, {60, 1, "activating", true}, {3, 0, "activating", false}, {7, 0, "activating", true},
	} {
		n := newNode(t)
		n.process(os.Getpid(), "nfs", "0::/system.slice/csi-nfs.service")
		n.write("proc/uptime", "1000.00 1.00\n")
		n.write(fmt.Sprintf("proc/%d/stat", os.Getpid()), fmt.Sprintf("1 (nfs) S%s %d 0\n", strings.Repeat(" 0", 18), (1000-c.seconds)*100))
		n.write(file, "[Service]\nRuntimeMaxSec=5\n")
		n.units["csi-nfs.service"] = map[string]string{"LoadState": "loaded", "ActiveState": c.state, "NRestarts": strconv.Itoa(c.restarts), "DropInPaths": file, "journal": strings.Repeat("csi-nfs.service: Scheduled restart job, restart counter is at 1.\n", c.restarts/3) + "fatal error: x"}
		f, found := finding(n.examine(), "driver-unit-restarting")
		if found != c.want {
			t.Errorf("%+v: %+v", c, f)
		}
		n.write(file, "[Service]\n"+supervise+"/run/other.sock --watchdog 60s\n")
		if other, _ := finding(n.examine(), "driver-unit-restarting"); found && (!strings.Contains(other.Found, "; its csi-registrar supervise waits at /run/other.sock, not at ") ||
			!strings.Contains(lines(other.Fix), "\nsed -i '2s|/run/other.sock|"+n.socket()+"|' "+file+"\n")) {
			t.Errorf("%+v: %+v", c, other)
		}
		text := fmt.Sprintf("restarted %s: \"fatal error: x\"; %s:2 sets \"RuntimeMaxSec=5\"", safetext.Count(c.restarts, "time"), file)
		if found && (!strings.HasSuffix(f.Found, text) || !strings.HasSuffix(lines(f.Fix), "systemctl daemon-reload\nsystemctl restart --no-block csi-nfs.service")) {
			t.Errorf("%+v: %+v", c, f)
		}
	}
}

// An endpoint that accepts connections and does not answer, as a recorder that was stopped by a
// signal, fails every mount.
func TestEndpointThatDoesNotAnswer(t *testing.T) {
	n := newNode(t)
	recorder := &fakeDriver{name: name}
	recorder.start(t, n.path("csi/trace.sock"))
	t.Cleanup(recorder.stop)
	n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", n.table(fmt.Sprintf("endpoint = %q", n.path("csi/trace.sock"))))
	n.restartDaemon()
	recorder.set(func(f *fakeDriver) { f.hang = "GetPluginInfo" })
	f, _ := finding(n.examine(), "endpoint-unusable")
	recorder.set(func(f *fakeDriver) { f.hang = "" })
	if !strings.Contains(f.Found, "another socket, which does not answer") || !n.follow(f.Fix) {
		t.Fatalf("%+v", f)
	}
	if r := n.examine(); !r.Healthy {
		t.Errorf("%+v", r.Findings)
	}
}

// An endpoint that is the driver's socket, or another one, is no problem, and is shown.
func TestEndpointsAreShown(t *testing.T) {
	n := newNode(t)
	if err := os.Symlink(n.path("csi"), n.path("link")); err != nil {
		t.Fatal(err)
	}
	other := &fakeDriver{name: name}
	other.start(t, n.path("csi/other.sock"))
	t.Cleanup(other.stop)
	for endpoint, want := range map[string]string{"link/csi.sock": "is the same socket", "csi/other.sock": "is another socket"} {
		n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", n.table(fmt.Sprintf("endpoint = %q", n.path(endpoint))))
		n.restartDaemon()
		r := n.examine()
		if !r.Healthy || !slices.ContainsFunc(r.Checks, func(c Check) bool { return c.Step == "endpoint" && strings.HasSuffix(c.Says, want) }) {
			t.Errorf("%s: %+v", endpoint, r)
		}
	}
}

// down ends the daemon.
func (n *node) down() {
	n.daemon = false
	n.stopDaemon()
}

func chown(t *testing.T, path string, uid int) {
	t.Helper()
	if err := os.Chown(path, uid, -1); err != nil {
		t.Fatal(err)
	}
}

func chmod(t *testing.T, path string, mode os.FileMode) {
	t.Helper()
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

func TestWithoutSystemdAndRoot(t *testing.T) {
	n := newNode(t)
	n.units = nil
	n.remove(n.path("proc"))
	if r := n.examine(); len(r.Findings) != 0 {
		t.Errorf("a finding about something that is not visible: %+v", r.Findings)
	}
}

// A system extension's service is disabled and starts at each boot, because multi-user.target
// upholds it.
func TestUpheldIsEnabled(t *testing.T) {
	n := newNode(t)
	n.units[serviceUnit]["UnitFileState"] = "disabled"
	n.units[serviceUnit]["UpheldBy"] = "multi-user.target"
	if r := n.examine(name); len(r.Findings) > 0 {
		t.Errorf("%+v", r.Findings)
	}
}

// Problems and warnings among the checks are findings: nobody is told of a problem that is not
// explained.
func TestEachProblemIsAFinding(t *testing.T) {
	for what, change := range map[string]func(*node){
		"the driver is stopped": func(n *node) { n.driver.stop(); n.restartDaemon() },
		"the daemon is stopped": func(n *node) { n.down() },
		"the unit has failed":   func(n *node) { n.down(); n.units[serviceUnit]["ActiveState"] = "failed" },
		"no plugins_registry":   func(n *node) { n.remove(n.registry()) },
	} {
		t.Run(what, func(t *testing.T) {
			n := newNode(t)
			change(n)
			r := n.examine()
			for _, c := range r.Checks {
				found := func(f Finding) bool { return f.Driver == c.Driver && f.Step == c.Step }
				if (c.Result == Problem || c.Result == Warning) && !slices.ContainsFunc(r.Findings, found) {
					t.Errorf("%s %s: %s, without a finding", c.Result, c.Step, c.Says)
				}
			}
		})
	}
}

// Times are those of the machine's zone, which they name.
func TestTimesHaveAZone(t *testing.T) {
	at := time.Date(2026, 11, 24, 21, 2, 50, 0, time.FixedZone("elsewhere", 3*60*60))
	if got, want := clock(at), at.Local().Format("2006-01-02 15:04:05 MST"); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	r := newNode(t).examine(name)
	i := slices.IndexFunc(r.Checks, func(c Check) bool { return c.Step == "daemon" })
	begun, err := time.ParseInLocation("running since 2006-01-02 15:04:05 MST", r.Checks[i].Says, time.Local)
	if err != nil || time.Since(begun).Abs() > 2*time.Hour {
		t.Errorf("%q: %v", r.Checks[i].Says, err)
	}
}
