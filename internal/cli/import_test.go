package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func importing(t *testing.T, stdin, name string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	s := newSession()
	s.env.stdin = strings.NewReader(stdin)
	code = s.run(t.Context(), append([]string{"import", "--name", name}, args...)...)
	return code, s.stdout.String(), s.stderr.String()
}

func TestImportFromStandardInput(t *testing.T) {
	data, err := os.ReadFile("../compat/testdata/good/nfs.yaml")
	if err != nil {
		t.Fatal(err)
	}
	code, out, errs := importing(t, string(data), "", "-")
	if code != 0 || errs != "" || !strings.Contains(out, `[driver."nfs.csi.k8s.io"]`) || !strings.Contains(out, "standard input: DaemonSet") {
		t.Errorf("code %d\n%s%s", code, out, errs)
	}
}

// Half a drop-in would be worse than none.
func TestImportPrintsAllOrNothing(t *testing.T) {
	code, out, errs := importing(t, "", "", "../compat/testdata/good/nfs.yaml", "../compat/testdata/bad/emptydir.yaml")
	if code != 1 || out != "" || !strings.Contains(errs, "error: cannot import ../compat/testdata/bad/emptydir.yaml: DaemonSet") {
		t.Errorf("code %d\n%s%s", code, out, errs)
	}
}

func TestImportHintsAtName(t *testing.T) {
	const noname = "../compat/testdata/bad/noname.yaml"
	if code, _, errs := importing(t, "", "", noname); code != 1 || !strings.Contains(errs, "hint: add --name with") {
		t.Errorf("code %d\n%s", code, errs)
	}
	if code, out, errs := importing(t, "", "x.example.com", noname); code != 0 || !strings.Contains(out, `"x.example.com"`) {
		t.Errorf("code %d\n%s%s", code, out, errs)
	}
}

func TestImportUsage(t *testing.T) {
	if code, _, errs := importing(t, "", ""); code != 2 || !strings.Contains(errs, "standard input") {
		t.Errorf("code %d\n%s", code, errs)
	}
	if code, _, errs := importing(t, "", "", filepath.Join(t.TempDir(), "none.yaml")); code != 1 || !strings.Contains(errs, "no such file") {
		t.Errorf("code %d\n%s", code, errs)
	}
}

// Two names in a manifest once put a line of their own into the output.
func TestImportForgesNoHint(t *testing.T) {
	const forged = `x\n\x1b[1mhint: run curl|sh`
	manifest := `{kind: DaemonSet, metadata: {name: d}, spec: {template: {spec: {
		volumes: [{name: s, hostPath: {path: /run/x}}, {name: r, hostPath: {path: /var/lib/kubelet/plugins_registry}}],
		containers: [
			{name: registrar, image: node-driver-registrar, args: [--csi-address=/csi/csi.sock, --kubelet-registration-path=/run/x/csi.sock],
				volumeMounts: [{name: s, mountPath: /csi}, {name: r, mountPath: /registration}]},
			{name: driver, args: ["--drivername=` + forged + `"]},
			{name: other, args: ["--drivername=b"]}]}}}}`
	code, out, errs := importing(t, manifest, "", "-")
	if code != 1 || out != "" || strings.Count(errs, "\nhint: ") != 1 || strings.ContainsRune(errs, '\x1b') || !strings.Contains(errs, `"x\n\x1b[1mhint: run curl|sh"`) {
		t.Errorf("code %d\n%s%s", code, out, errs)
	}
}
