package cli

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
)

const plantedSecret = "S3cr3t-Pa55w0rd"

// bugreportNode creates a node with a secret wherever one can be: in the errors of a driver, in the
// configuration, and in the output of systemctl and journalctl.
func bugreportNode(t *testing.T) (root string) {
	t.Helper()
	root = fake.ShortDir(t)
	d := because(driverIn("a.csi.example", "refused", time.Minute), "rpc error: mount //10.9.8.7/x -o password="+plantedSecret)
	d.KubeletError = `volume_context:{key:"server" value:"` + plantedSecret + `"}`
	d.Server = status.Server{PID: 7, Unit: "csi-a.service"}
	newFake(d).serve(t, root)
	write := func(name, text string, mode os.FileMode) {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	write("etc/csi-registrar/conf.d/60-a.toml", "[driver.\"a.csi.example\"]\nsocket = \"/run/a/csi.sock\"\n", 0o644)
	write("etc/csi-registrar/config.toml", fmt.Sprintf("[kubelet]\nroot_dir = %q\n", filepath.Join(root, "kubelet")), 0o644)
	write("usr/lib/systemd/system/csi-a.service", "[Service]\nExecStart=/usr/bin/a --endpoint=/run/a/csi.sock\n", 0o644)
	write("kubelet/plugins_registry/other-reg.sock", "", 0o644)
	write("bin/systemctl", `#!/bin/sh
echo "$@"
case "$1" in
cat) printf '[Service]\nEnvironment="A=`+plantedSecret+`" \\\n B=`+plantedSecret+`\nExecStart=/usr/bin/csi-registrar run\n' ;;
show) echo 'Environment=A=`+plantedSecret+` B=c' ; echo 'NRestarts=0' ;;
esac
`, 0o755)
	write("bin/journalctl", `#!/bin/sh
echo "$@"
echo "2026-11-21T11:00:00+0000 $(uname -n) kubelet[1]: FLAG: --bootstrap-token=\"`+plantedSecret+`\" plugin"
echo "2026-11-21T11:00:00+0000 $(uname -n) kubelet[1]: csi NodePublishVolume volume_context:<key:\"x\" value:\"`+plantedSecret+`\" > from 10.9.8.7"
echo "Authorization: Bearer `+plantedSecret+`"
`, 0o755)
	t.Setenv("PATH", filepath.Join(root, "bin")+":"+os.Getenv("PATH"))
	return root
}

// unpack returns the entries of an archive by name, without their directory.
func unpack(t *testing.T, path string) map[string]string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			return got
		}
		text, readErr := io.ReadAll(r)
		if err != nil || readErr != nil {
			t.Fatal(err, readErr)
		}
		_, name, _ := strings.Cut(h.Name, "/")
		got[name] = string(text)
	}
}

func TestBugreport(t *testing.T) {
	root := bugreportNode(t)
	path := filepath.Join(root, "report")
	s := newSession()
	args := []string{"bugreport", "--config-root", root, "--output", path}
	if code := s.run(t.Context(), args...); code != 0 || s.stdout.String() != path+"\n" || s.stderr.String() != "" {
		t.Fatalf("exit code %d, %q, %q", code, s.stdout, s.stderr)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode() != 0o600 {
		t.Errorf("%v %v", fi.Mode(), err)
	}
	got := unpack(t, path)
	for name, want := range map[string]string{
		"version.json":   `"go_version"`,
		"status.json":    `"name": "a.csi.example"`,
		"doctor.json":    `"step": "configuration"`,
		"config.txt":     `"/run/a/csi.sock"  # from`,
		"metrics.txt":    `csi_registrar_driver_state`,
		"units.txt":      "ExecStart=/usr/bin/csi-registrar run",
		"properties.txt": "NRestarts=0",
		"journal.txt":    "--since=-24h --lines=20000 --unit=csi-registrar*\n",
		"kubelet.txt":    "--grep=" + aboutCSI + " --unit=kubelet.service --unit=k3s.service",
		"files.txt":      "other-reg.sock",
		"drivers.txt":    "--lines=200 --unit=csi-a.service",
		"system.txt":     "$ df -i ",
	} {
		if !strings.Contains(got[name], want) {
			t.Errorf("%s has no %q:\n%s\n%s", name, want, got[name], got[name+".error"])
		}
	}
	for name, text := range got {
		if strings.HasSuffix(name, ".json") && !json.Valid([]byte(text)) {
			t.Errorf("%s is not JSON any more:\n%s", name, text)
		}
		if strings.Contains(text, plantedSecret) {
			t.Errorf("%s has the secret:\n%s", name, text)
		}
	}
}

// The directories of drivers are listed, and the mounts of volumes.
func TestFilesOfDriversAndVolumes(t *testing.T) {
	root := fake.ShortDir(t)
	kubelet := kubeletFiles(t, root)
	table := fmt.Sprintf("[driver.\"a.csi.example\"]\nsocket = %q\n[driver.\"b.csi.example\"]\nsocket = \"/nowhere/csi.sock\"\n", filepath.Join(root, "a/csi.sock"))
	for file, text := range map[string]string{"etc/csi-registrar/conf.d/a.toml": table, "a/csi.sock": ""} {
		file = filepath.Join(root, file)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o604)); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	err := writeFiles(t.Context(), &out, root)
	for _, want := range []string{"\n\"" + kubelet + "/pods/p1/volumes/kubernetes.io~csi/pv/mount\": mounted false, written 20", "\n" + filepath.Join(root, "a") + ":\n", "\n-rw----r-- 1 ", "/nowhere"} {
		if err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("no %q (%v):\n%s", want, err, out.String())
		}
	}
}

// Of the kubelet's journal the lines about CSI are kept.
func TestKubeletLinesAboutCSI(t *testing.T) {
	for line, want := range map[string]bool{
		`I0102 15:04:05.000000     812 plugins.go:616] "Loaded volume plugin" pluginName="kubernetes.io/csi"`:                                                                                   false,
		`I0102 15:04:05.000000     812 reconciler_common.go:251] "operationExecutor.VerifyControllerAttachedVolume started for volume \"pv\" (UniqueName: \"kubernetes.io/csi/x^v\")"`:          false,
		`I0102 15:04:05.000000     812 operation_generator.go:781] UnmountVolume.TearDown succeeded for volume "kubernetes.io/configmap/0123" PluginName "kubernetes.io/configmap"`:             false,
		`I0102 15:04:05.000000     812 operation_generator.go:550] "MountVolume.MountDevice succeeded for volume \"pv\" (UniqueName: \"kubernetes.io/csi/x^v\") pod \"csi-a\""`:                 true,
		`I0102 15:04:05.000000     812 csi_plugin.go:106] kubernetes.io/csi: Trying to validate a new CSI Driver with name: x`:                                                                  true,
		`E0102 15:04:05.000000     812 nestedpendingoperations.go:348] MountVolume.SetUp failed for volume "a" (UniqueName: "kubernetes.io/secret/a") pod "csi-a": failed to sync secret cache`: true,
		`E0102 15:04:05.000000     812 goroutinemap.go:150] RegisterPlugin error -- dial failed at socket /x`:                                                                                   true,
		`I0102 15:04:05.000000     812 kubelet.go:2405] "SyncLoop ADD" source="api" pods=["default/web"]`:                                                                                       false,
	} {
		// as journalctl matches it
		cmd := exec.CommandContext(t.Context(), "grep", "-Pi", "--", aboutCSI)
		cmd.Stdin = strings.NewReader(line)
		err := cmd.Run()
		if x, ok := errors.AsType[*exec.ExitError](err); err != nil && (!ok || x.ExitCode() != 1) {
			t.Skip("grep cannot match like journalctl: ", err)
		}
		if (err == nil) != want {
			t.Errorf("%t: %s", !want, line)
		}
	}
}

// Without a daemon and systemd, each part has an entry with the error.
func TestBugreportOnAnEmptyNode(t *testing.T) {
	root := fake.ShortDir(t)
	t.Setenv("PATH", root)
	t.Chdir(root)
	s := newSession()
	if code := s.run(t.Context(), "bugreport", "--config-root", root); code != 0 || s.stderr.String() != "" {
		t.Fatalf("exit code %d, %q", code, s.stderr)
	}
	if s.stdout.String() != "csi-registrar-bugreport-20261121T120000Z.tar.gz\n" {
		t.Errorf("it printed %q", s.stdout)
	}
	got := unpack(t, strings.TrimSpace(s.stdout.String()))
	for _, name := range []string{"status.json", "metrics.txt", "units.txt", "properties.txt", "journal.txt", "kubelet.txt", "files.txt"} {
		if got[name] != "" || got[name+".error"] == "" {
			t.Errorf("%s is %q, its error %q", name, got[name], got[name+".error"])
		}
	}
	if got["doctor.json"] == "" || got["config.txt"] == "" || got["doctor.json.error"] != "" {
		t.Errorf("%q", got)
	}
}

// It writes only a new file, and removes an incomplete one.
func TestBugreportWritesNewFilesOnly(t *testing.T) {
	root := fake.ShortDir(t)
	t.Setenv("PATH", root)
	for _, make := range []func(path string) error{
		func(path string) error { return os.WriteFile(path, nil, 0o644) },
		func(path string) error { return os.Symlink("elsewhere", path) },
	} {
		path := filepath.Join(root, "x")
		if err := make(path); err != nil {
			t.Fatal(err)
		}
		s := newSession()
		if code := s.run(t.Context(), "bugreport", "--config-root", root, "--output", path); code != exitFailed || !strings.Contains(s.stderr.String(), "file exists") {
			t.Errorf("exit code %d, %q", code, s.stderr)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(root, "interrupted")
	s := newSession()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if code := s.run(ctx, "bugreport", "--config-root", root, "--output", path); code != exitFailed {
		t.Errorf("exit code %d", code)
	}
	if _, err := os.Lstat(path); err == nil {
		t.Error("an incomplete archive was left")
	}
	entries, err := os.ReadDir(root)
	if err != nil || slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() == "elsewhere" }) {
		t.Errorf("a link was followed (%v)", err)
	}
}
