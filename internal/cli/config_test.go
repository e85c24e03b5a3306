package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func writeConfig(t *testing.T, root, text string) string {
	t.Helper()
	file := filepath.Join(root, "etc/csi-registrar/config.toml")
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestConfigCheck(t *testing.T) {
	root := newRoot(t)
	if code, stdout, stderr := try(t, "config", "check", "--config-root", root); code != 0 || stdout != "no errors: 0 drivers, 0 files\n" || stderr != "" {
		t.Errorf("no file: %d %q %q", code, stdout, stderr)
	}
	file := writeConfig(t, root, "[driver.\"a.csi.example\"]\nsocket = \"/run/a.sock\"\n")
	if code, stdout, stderr := try(t, "config", "check", "--config-root", root); code != 0 || stdout != "no errors: 1 driver, 1 file\n" || stderr != "" {
		t.Errorf("right: %d %q %q", code, stdout, stderr)
	}
	writeConfig(t, root, "[driver.\"a.csi.example\"]\nsocket = \"/run/a.sock\"\nendpoint_link = true\n")
	if code, stdout, _ := try(t, "config", "check", "--config-root", root); code != 0 ||
		!strings.Contains(stdout, "told /var/lib/kubelet/plugins/csi-registrar/a.csi.example.sock, a link to /run/a.sock; to change endpoint_link registers the driver once more\n") {
		t.Errorf("with a link: %d %q", code, stdout)
	}
	writeConfig(t, root, "[driver.\"a.csi.example\"]\nsocket = \"run/a.sock\"\ncolour = 1\n")
	code, stdout, stderr := try(t, "config", "check", "--config-root", root)
	lines := strings.Split(strings.TrimSpace(stderr), "\n")
	if code != 78 || stdout != "" || len(lines) != 2 || !strings.HasPrefix(lines[0], file+":2: ") || !strings.HasPrefix(lines[1], file+":3: ") {
		t.Errorf("two errors: %d %q %q", code, stdout, stderr)
	}
	if code, _, again := try(t, "config", "check", "--config", file); code != 78 || strings.Count(again, "\n") != 2 {
		t.Errorf("that file alone: %d %q", code, again)
	}
}

func TestConfigCheckTellsWhatTheUnitNeeds(t *testing.T) {
	root := newRoot(t)
	writeConfig(t, root, "[kubelet]\nroot_dir = \"/data/kube let\"\n")
	code, stdout, _ := try(t, "config", "check", "--config-root", root)
	for _, line := range []string{"[Unit]\n", "RequiresMountsFor=\"/data/kube let\"\n", "[Service]\n", "ReadWritePaths=-\"/data/kube let\"\n", "csi-registrar.service.d/"} {
		if code != 0 || !strings.Contains(stdout, line) {
			t.Errorf("no %q in %s", line, stdout)
		}
	}
	writeConfig(t, root, "[kubelet]\nroot_dir = \"/home/kubelet\"\n")
	if code, stdout, _ := try(t, "config", "check", "--config-root", root); code != 0 || !strings.Contains(stdout, "\nReadWritePaths=-/home/kubelet\nProtectHome=no\n") {
		t.Errorf("below /home: %d %s", code, stdout)
	}
}

func TestConfigShow(t *testing.T) {
	root := newRoot(t)
	file := writeConfig(t, root, "[driver.\"a.csi.example\"]\nsocket = \"/run/a.sock\"\n")
	code, stdout, stderr := try(t, "config", "show", "--config-root", root)
	if code != 0 || stderr != "" || !strings.Contains(stdout, `"/run/a.sock"`) || !strings.Contains(stdout, file+":2") {
		t.Errorf("%d %s %s", code, stdout, stderr)
	}
	code, stdout, _ = try(t, "config", "show", "--json", "--config-root", root)
	if code != 0 || !json.Valid([]byte(stdout)) {
		t.Errorf("%d %s", code, stdout)
	}
	writeConfig(t, root, "[driver.\"a.csi.example\"]\nsocket = \"/run/a.sock\"\n[nothing]\n")
	if code, stdout, stderr := try(t, "config", "show", "--config-root", root); code != 1 || !strings.Contains(stdout, "a.csi.example") || !strings.HasPrefix(stderr, file+":3: ") {
		t.Errorf("with an error: %d %s %s", code, stdout, stderr)
	}
}
