// Package formats compares the examples in packaging/examples/provision with the types of Ignition
// and of Cluster API. It is a module of its own for these.
package formats

import (
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	ignition "github.com/coreos/ignition/v2/config/v3_4"
	kubeadm "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	"sigs.k8s.io/yaml"
)

const examples = "../../../../../packaging/examples/provision"

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(examples, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// checkDropIn checks a drop-in with csi-registrar.
func checkDropIn(t *testing.T, content string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "60-nfs.toml")
	if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-ec", `scripts/build; bin/csi-registrar config check --config "$0"`, file)
	cmd.Dir = "../../../../.."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s\n%s", err, out, content)
	}
}

// TestKubeadmConfigTemplate checks that the example has only fields of Cluster API, and a valid
// drop-in.
func TestKubeadmConfigTemplate(t *testing.T) {
	var template kubeadm.KubeadmConfigTemplate
	if err := yaml.UnmarshalStrict([]byte(read(t, "kubeadm-config-template.yaml")), &template); err != nil {
		t.Fatal(err)
	}
	if want := kubeadm.GroupVersion.String(); template.APIVersion != want || template.Kind != "KubeadmConfigTemplate" {
		t.Errorf("it is a %s of %s, want %s", template.Kind, template.APIVersion, want)
	}
	found := false
	for _, file := range template.Spec.Template.Spec.Files {
		if strings.HasPrefix(file.Path, "/etc/csi-registrar/conf.d/") {
			found = true
			checkDropIn(t, file.Content)
		}
	}
	if !found {
		t.Error("it has no drop-in")
	}
}

// TestFlatcar translates the example as Butane does, which cannot be had as a module, and parses
// the result with Ignition.
func TestFlatcar(t *testing.T) {
	text := strings.NewReplacer("URL/", "https://example.com/", "VERSION", "0.1.0", "SHA256", strings.Repeat("0", 64)).Replace(read(t, "flatcar.bu"))
	var butane map[string]any
	if err := yaml.Unmarshal([]byte(text), &butane); err != nil {
		t.Fatal(err)
	}
	if butane["variant"] != "flatcar" || butane["version"] != "1.1.0" {
		t.Fatalf("it is %v %v", butane["variant"], butane["version"])
	}
	delete(butane, "variant")
	delete(butane, "version")
	butane["ignition"] = map[string]any{"version": "3.4.0"} // that of flatcar 1.1.0
	found := false
	storage := butane["storage"].(map[string]any)
	for _, file := range storage["files"].([]any) {
		contents := file.(map[string]any)["contents"].(map[string]any)
		inline, ok := contents["inline"].(string)
		if name, isLocal := contents["local"].(string); isLocal {
			inline, ok = read(t, name), true
			delete(contents, "local")
		} else if ok {
			found = true
			checkDropIn(t, inline)
			delete(contents, "inline")
		}
		if ok {
			contents["source"] = "data:," + url.PathEscape(inline)
		}
	}
	if !found {
		t.Error("it has no drop-in")
	}
	translated, err := yaml.Marshal(butane)
	if err != nil {
		t.Fatal(err)
	}
	if translated, err = yaml.YAMLToJSON(translated); err != nil {
		t.Fatal(err)
	}
	// Ignition reports keys that it does not know as warnings.
	if _, report, err := ignition.ParseCompatibleVersion(translated); err != nil || len(report.Entries) > 0 {
		t.Errorf("%v\n%s\n%s", err, fmt.Sprint(report.String()), translated)
	}
}
