package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/test/fake"
)

func TestSystemctl(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	if _, err := (Systemctl{}).Show(t.Context(), "x.service", "A"); !errors.Is(err, ErrNoSystemd) {
		t.Errorf("without systemctl: %v", err)
	}
	script := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "systemctl"), []byte("#!/bin/sh\n"+text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	script(`[ "$*" = "show --no-pager --property=LoadState,Listen -- x.socket" ] || exit 9
echo LoadState=loaded
echo "Listen=127.0.0.1:1 (Stream)"
echo "Listen=[::1]:1 (Stream)"
`)
	p, err := (Systemctl{}).Show(t.Context(), "x.socket", "LoadState", "Listen")
	if err != nil || p["LoadState"] != "loaded" || p["Listen"] != "127.0.0.1:1 (Stream)\n[::1]:1 (Stream)" {
		t.Errorf("%q, %v", p, err)
	}
	script("echo 'System has not been booted with systemd as init system (PID 1).' >&2; exit 1")
	if _, err := (Systemctl{}).Show(t.Context(), "x.service", "A"); !errors.Is(err, ErrNoSystemd) {
		t.Errorf("not booted with it: %v", err)
	}
	script("echo 'Access denied' >&2; exit 4")
	if _, err := (Systemctl{}).Show(t.Context(), "x.service", "A"); err == nil || err.Error() != "systemctl: Access denied" {
		t.Errorf("denied: %v", err)
	}
}

// The journal's last error that says why is that before systemd's "Failed to start".
func TestLastError(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir)
	for out, want := range map[string]string{
		"": "", "one": "one", "Failed to start x.service - X.": "",
		"Failed to start x.service - X.\nx.service: Failed at step USER spawning /x\nan earlier one\n":                      "x.service: Failed at step USER spawning /x",
		"error: cannot watch process 7: no such process\nx.service: Control process exited, code=exited, status=217/USER\n": "x.service: Control process exited, code=exited, status=217/USER",
	} {
		if err := os.WriteFile(filepath.Join(dir, "journalctl"), []byte("#!/bin/sh\nprintf '"+out+"'\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		x := newDiagnosis(Options{Units: Systemctl{}})
		if got := x.lastError(t.Context(), "x.service", map[string]string{"Result": "exit-code", "ExecMainStatus": "217", "LoadState": "loaded"}); got != want {
			t.Errorf("%q: %s, want %q", out, got, want)
		}
	}
}

// asked counts the questions about each unit.
type asked struct {
	Units
	mu    sync.Mutex
	times map[string]int
}

func (a *asked) Show(ctx context.Context, unit string, properties ...string) (map[string]string, error) {
	a.mu.Lock()
	a.times[unit]++
	a.mu.Unlock()
	return a.Units.Show(ctx, unit, properties...)
}

// systemd is asked once about each unit: on a node with 20 drivers the questions take most of the
// time.
func TestAsksOnceForEachUnit(t *testing.T) {
	n := newNode(t)
	n.process(os.Getpid(), "nfs", "0::/system.slice/csi-nfs.service")
	n.process(77, "containerd", "0::/system.slice/containerd.service")
	n.units["csi-nfs.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running"}
	a := &asked{Units: n.units, times: map[string]int{}}
	Run(t.Context(), Options{Source: n.source(), Units: a, Root: n.root})
	for unit, times := range a.times {
		if times > 1 && unit != serviceUnit { // of which a restart is awaited
			t.Errorf("%s: %d times", unit, times)
		}
	}
	if a.times["csi-nfs.service"]+a.times["containerd.service"] != 2 {
		t.Errorf("%v", a.times)
	}
}

// A drop-in that takes ReadWritePaths= back leaves the daemon without its directory.
func TestSandboxWithoutItsDirectory(t *testing.T) {
	const file = "/etc/systemd/system/csi-registrar.service.d/50-hardening.conf"
	n := newNode(t)
	n.write(file, "[Service]\nReadWritePaths=\n")
	unit := map[string]string{"DropInPaths": file, "ProtectSystem": "strict", "ReadWritePaths": ""}
	n.units[serviceUnit] = unit
	conf := n.path("f.toml")
	n.write("f.toml", "")
	x := newDiagnosis(Options{Source: n.source(), Units: n.units, Root: n.root})
	x.config = config.Load(config.Source{File: conf})
	x.sandbox(t.Context(), unit)
	const fix = "'[Service]' ReadWritePaths=-/var/lib/kubelet/plugins_registry > /etc/systemd/system/csi-registrar.service.d/zz-doctor-readwritepaths.conf\nsystemctl daemon-reload\nsystemctl restart csi-registrar.service"
	if f, _ := finding(x.report, "root-dir-not-writable"); !strings.HasSuffix(f.Found, ", because of ReadWritePaths= in "+file+":2") || !strings.HasSuffix(lines(f.Fix), fix) {
		t.Errorf("%+v", x.report)
	}
}

func TestUnitDropIn(t *testing.T) {
	if got := rootdir.DropIn("/var/lib/kubelet/"); got != "" {
		t.Errorf("the default: %q", got)
	}
	const want = "# /etc/systemd/system/csi-registrar.service.d/root-dir.conf\n" +
		"[Unit]\nRequiresMountsFor=\"/my data/50%%\"\n\n[Service]\n" +
		"Environment=\"KUBELET_ROOT_DIR=/my data/50%%\"\n" +
		"ReadWritePaths=-\"/my data/50%%/plugins_registry\"\n" +
		"InaccessiblePaths=-\"/my data/50%%/pki\" -\"/my data/50%%/device-plugins\" -\"/my data/50%%/pod-resources\" -\"/my data/50%%/kubeconfig\" " +
		"-\"/my data/50%%/bootstrap-kubeconfig\" -\"/my data/50%%/config.json\" -\"/my data/50%%/.dockercfg\"\n"
	if got := rootdir.DropIn("/my data/50%"); got != want {
		t.Errorf("%s", got)
	}
	for root, setting := range map[string]string{"/home/k": "ProtectHome", "/root": "ProtectHome", "/run/user/0/k": "ProtectHome", "/var/tmp/k": "PrivateTmp", "/homes/k": "", "/run/k": ""} {
		hidden := "InaccessiblePaths=" + strings.ReplaceAll("-R/pki -R/device-plugins -R/pod-resources -R/kubeconfig -R/bootstrap-kubeconfig -R/config.json -R/.dockercfg", "R", root)
		lines := "[Unit]\nRequiresMountsFor=" + root + "\n\n[Service]\nEnvironment=KUBELET_ROOT_DIR=" + root + "\nReadWritePaths=-" + root + "/plugins_registry\n" + hidden + "\n"
		commands := "printf '%s\\n' '[Unit]' RequiresMountsFor=" + root + " '[Service]' Environment=KUBELET_ROOT_DIR=" + root +
			" ReadWritePaths=-" + root + "/plugins_registry '" + hidden + "'"
		if setting != "" {
			lines += setting + "=no\n"
			commands += " " + setting + "=no"
		}
		if got := rootdir.DropIn(root); got != "# "+rootdir.DropInFile+"\n"+lines {
			t.Errorf("%s", got)
		}
		if got := installDropIn(root)[1].String(); got != commands+" > "+rootdir.DropInFile {
			t.Errorf("%s", got)
		}
	}
}

// A hidden directory is one finding, with the directive that hides it.
func TestHiddenDirectories(t *testing.T) {
	unit := map[string]string{"ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes", "ReadWritePaths": "-/home/k -/k"}
	readOnly := map[string]string{"ProtectSystem": "strict", "ProtectHome": "read-only", "PrivateTmp": "no", "ReadWritePaths": "-/home/k"}
	for _, c := range []struct {
		what, root, socket string
		unit               map[string]string
		found, fix         string
	}{
		{"root_dir", "/home/k", "/run/csi.sock", unit, "does not see /home/k: it has its own empty /home (ProtectHome=yes)", "Environment=KUBELET_ROOT_DIR=/home/k ReadWritePaths=-/home/k/plugins_registry 'InaccessiblePaths=-/home/k/pki "},
		{"socket", "/k", "/tmp/csi.sock", unit, "the socket /tmp/csi.sock is in /tmp, ", "PrivateTmp=no > "},
		{"both", "/home/k", "/root/csi.sock", unit, "does not see /home/k", "ProtectHome=no"},
		{"neither", "/k", "/run/csi.sock", unit, "", ""},
		{"read-only", "/home/k", "/home/csi.sock", readOnly, "", ""},
		{"no sandbox but that", "/home/k", "/run/csi.sock", map[string]string{"ProtectSystem": "no", "ProtectHome": "tmpfs"}, "(ProtectHome=tmpfs)", "ProtectHome=no"},
	} {
		file := filepath.Join(t.TempDir(), "f")
		if err := os.WriteFile(file, fmt.Appendf(nil, "kubelet.root_dir = %q\ndriver.a.socket = %q\n", c.root, c.socket), 0o600); err != nil {
			t.Fatal(err)
		}
		x := newDiagnosis(Options{Units: units{}})
		x.config = config.Load(config.Source{File: file})
		x.sandbox(t.Context(), c.unit)
		x.hiddenSockets(t.Context(), c.unit)
		switch found := x.report.Findings; {
		case c.found == "":
			if len(found) > 0 {
				t.Errorf("%s: %+v", c.what, found)
			}
		case len(found) != 1 || !strings.Contains(found[0].Found, c.found) || !strings.Contains(lines(found[0].Fix), c.fix):
			t.Errorf("%s: %+v", c.what, found)
		}
	}
}

func TestNoPermissionForTheDaemon(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root has permission")
	}
	n := newNode(t)
	if err := os.Chmod(n.path("run/csi-registrar/control.sock"), 0); err != nil {
		t.Fatal(err)
	}
	if r := n.examine(); !r.Healthy || len(r.Findings) != 1 || r.Findings[0].Step != "daemon" {
		t.Errorf("%+v", r.Findings)
	}
}

// The fake servers in this process close their connections a moment after the clients.
func TestNoLeaks(t *testing.T) {
	n := newNode(t)
	descriptors, goroutines := fake.Descriptors(t), runtime.NumGoroutine()
	for range 3 {
		n.examine()
	}
	settled := func(now func() int, before int, what string) {
		t.Helper()
		after := now()
		for end := time.Now().Add(5 * time.Second); after > before && time.Now().Before(end); after = now() {
			runtime.Gosched()
		}
		if after > before {
			t.Errorf("%d %s before, %d after", before, what, after)
		}
	}
	settled(func() int { return fake.Descriptors(t) }, descriptors, "descriptors")
	settled(runtime.NumGoroutine, goroutines, "goroutines")
}

func TestConfigFile(t *testing.T) {
	n := newNode(t)
	file := n.path("usr/lib/csi-registrar/conf.d/10-nfs.toml")
	r := Run(t.Context(), Options{Source: config.Source{Root: n.root, File: file}, Units: n.units, Root: n.root})
	// Only this file is read, so the kubelet's directory is the default, which this node lacks.
	if r.Healthy || r.Findings[0].Step != "kubelet" {
		t.Errorf("%+v", r.Findings)
	}
}

// k3s with --kubelet-arg=root-dir=/var/lib/rancher/k3s/agent/kubelet: doctor does not open what has
// keys.
func TestRootDirectoryBelowAMask(t *testing.T) {
	n := newNode(t)
	n.units[serviceUnit]["InaccessiblePaths"] = "-/etc/rancher -" + n.rootDir + "2"
	if r := n.examine(); len(r.Findings) != 0 {
		t.Fatalf("beside a mask: %+v", r.Findings)
	}
	n.units[serviceUnit]["InaccessiblePaths"] += " -" + filepath.Dir(n.rootDir)
	r := n.examine()
	if len(r.Findings) != 1 || r.Findings[0].ID != "root-dir-not-writable" || !strings.Contains(r.Findings[0].Found, filepath.Dir(n.rootDir)+" is hidden") {
		t.Fatalf("%+v", r.Findings)
	}
	for _, f := range r.Findings[0].Fix {
		if !f.IsComment() {
			t.Errorf("%s", f)
		}
	}
}
