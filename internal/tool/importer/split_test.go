package importer

import (
	"bytes"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// splitManifest is a DaemonSet whose pods run on two kinds of nodes, as `kubectl get -o yaml`
// prints it.
const splitManifest = `apiVersion: v1
items:
- apiVersion: apps/v1
  kind: DaemonSet
  metadata: {name: d, namespace: n, uid: 1-2, resourceVersion: "7", labels: {a: b}}
  spec:
    selector: {matchLabels: {role: "", app: LABEL}}
    template:
      metadata: {labels: {app: LABEL, role: "", other: o}}
      spec:
        affinity:
          podAffinity: {}
          nodeAffinity:
            requiredDuringSchedulingIgnoredDuringExecution:
              nodeSelectorTerms:
              - matchExpressions: [{key: x, operator: Exists}]
              - matchFields: [{key: metadata.name, operator: In, values: [a]}]
        initContainers:
        - {name: sidecar, image: node-driver-registrar, args: [--csi-address=/csi/csi.sock, --kubelet-registration-path=/d/d.example/csi.sock],
           volumeMounts: [{name: s, mountPath: /csi, subPath: d.example}, {name: r, mountPath: /registration}]}
        containers:
        - {name: driver, args: [--drivername=d.example]}
        - {name: cleanup, volumeMounts: [{name: r, mountPath: /registration}, {name: r, mountPath: /other}]}
        volumes: [{name: s, hostPath: {path: /d}}, {name: r, hostPath: {path: /var/lib/kubelet/plugins_registry}}]
  status: {numberReady: 3}
kind: List
`

func split(t *testing.T, manifest string) (files map[string]string, err error) {
	t.Helper()
	m := []File{{Name: "m.yaml", Data: []byte(manifest)}}
	res := Import(m, nil)
	if len(res.Refused) > 0 {
		t.Fatalf("refused: %+v", res.Refused)
	}
	list, err := Split(m, res.Edits, "example.com/label")
	files = map[string]string{}
	for _, f := range list {
		files[f.Name] = string(f.Data)
	}
	return files, err
}

func TestSplit(t *testing.T) {
	files, err := split(t, strings.ReplaceAll(splitManifest, "LABEL", strings.Repeat("x", 63)))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"manifests.yaml": "---\n" + strings.ReplaceAll(splitManifest, "LABEL", strings.Repeat("x", 63)) + "\n"}
	want["second.yaml"] = strings.ReplaceAll(`---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: d-host, namespace: n, labels: {a: b}}
spec:
    selector: {matchLabels: {role: "", app: LABEL-host}}
    template:
        metadata: {labels: {app: LABEL-host, role: "", other: o}}
        spec:
            affinity:
                podAffinity: {}
                nodeAffinity:
                    requiredDuringSchedulingIgnoredDuringExecution:
                        nodeSelectorTerms:
                        - matchExpressions: [{key: x, operator: Exists}, {key: example.com/label, operator: In, values: ["yes"]}]
                        - {matchFields: [{key: metadata.name, operator: In, values: [a]}], matchExpressions: [{key: example.com/label, operator: In, values: ["yes"]}]}
            initContainers: []
            containers:
            - {name: driver, args: [--drivername=d.example], volumeMounts: [{name: s, mountPath: /csi-socket-dir, subPath: d.example, readOnly: true}]}
            - {name: cleanup, volumeMounts: []}
            volumes: [{name: s, hostPath: {path: /d}}]
`, "LABEL", strings.Repeat("x", 58))
	want["kustomization.yaml"] = `apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [manifests.yaml, second.yaml]
patches:
- patch: |
    apiVersion: apps/v1
    kind: DaemonSet
    metadata:
        name: d
        namespace: "n"
    spec:
        template:
            spec:
                affinity:
                    nodeAffinity:
                        requiredDuringSchedulingIgnoredDuringExecution:
                            nodeSelectorTerms:
                                - matchExpressions:
                                    - key: x
                                      operator: Exists
                                    - key: example.com/label
                                      operator: DoesNotExist
                                - matchExpressions:
                                    - key: example.com/label
                                      operator: DoesNotExist
                                  matchFields:
                                    - key: metadata.name
                                      operator: In
                                      values:
                                        - a
`
	if len(files) != len(want) {
		t.Errorf("the files are %q", slices.Sorted(maps.Keys(files)))
	}
	for name := range want {
		if got := parsed(t, files[name]); !reflect.DeepEqual(got, parsed(t, want[name])) {
			t.Errorf("%s:\n%s", name, files[name])
		}
	}
}

func parsed(t *testing.T, text string) (v any) {
	t.Helper()
	if err := yaml.NewDecoder(bytes.NewReader([]byte(text))).Decode(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

// The pods of the second DaemonSet of each test manifest are what a person makes by the
// instructions in its drop-in, but for the affinity.
func TestSplitAppliesTheEdits(t *testing.T) {
	for _, name := range []string{"nfs", "smb", "ebs", "hcloud", "cleanup", "lvm", "open-local", "three"} {
		m := manifest(t, "testdata/good/"+name+".yaml")
		if !bytes.Contains(m.Data, []byte("matchLabels")) {
			m.Data = bytes.ReplaceAll(m.Data, []byte("\n  template:"), []byte("\n  selector: {matchLabels: {app: x}}\n  template:"))
		}
		res := Import([]File{m}, nil)
		files, err := Split([]File{m}, res.Edits, "l")
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		pod := func(data []byte) map[string]any {
			return field(parsed(t, string(data)).(map[string]any), "spec", "template", "spec")
		}
		got, want := pod(files[1].Data), pod(apply(t, m, res.Edits))
		delete(got, "affinity")
		delete(want, "affinity")
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s:\n%v\nwant\n%v", name, got, want)
		}
	}
}

// A DaemonSet with nothing but its registrar has no second one.
func TestSplitAlone(t *testing.T) {
	m := manifest(t, "testdata/good/alone.yaml")
	files, err := split(t, string(m.Data))
	if err != nil || files["second.yaml"] != "" || !strings.Contains(files["kustomization.yaml"], "DoesNotExist") || strings.Contains(files["kustomization.yaml"], "second") {
		t.Errorf("%v\n%s", err, files)
	}
}

// An all-in-one sidecar stays for its other tasks, and no longer registers.
func TestSplitReducesAnAllInOneSidecar(t *testing.T) {
	m := manifest(t, "testdata/good/all-in-one.yaml")
	files, err := split(t, string(m.Data))
	if err != nil {
		t.Fatal(err)
	}
	again := Import([]File{m, {Name: "second.yaml", Data: []byte(files["second.yaml"])}}, nil)
	if len(again.Registrars) != 2 || len(again.Refused) > 0 || len(again.Edits) != 2 {
		t.Errorf("the second DaemonSets register: %+v\n%s", again, files["second.yaml"])
	}
	if strings.Count(files["second.yaml"], "name: csi-sidecars") != 1 {
		t.Errorf("one container must stay, and one go:\n%s", files["second.yaml"])
	}
}

func TestSplitRefuses(t *testing.T) {
	replaced := func(old, now string) string {
		if !strings.Contains(splitManifest, old) {
			t.Fatalf("the manifest does not have %s", old)
		}
		return strings.ReplaceAll(splitManifest, old, now)
	}
	for _, test := range []struct{ manifest, want string }{
		{replaced("kind: DaemonSet", "kind: StatefulSet"), "StatefulSet n/d is not a DaemonSet"},
		{replaced("labels: {a: b}", "labels: {longhorn.io/managed-by: longhorn-manager}"), "longhorn-manager restores n/d"},
		{replaced(`{matchLabels: {role: "", app: LABEL}}`, `{matchLabels: {role: ""}}`), "no matchLabels"},
	} {
		if files, err := split(t, test.manifest); err == nil || !strings.Contains(err.Error(), test.want) || len(files) > 0 {
			t.Errorf("error %v, want one with %q", err, test.want)
		}
	}
	large := []File{{Name: "a", Data: bytes.Repeat([]byte("\n"), maxWhole-10)}, {Name: "b", Data: bytes.Repeat([]byte("\n"), 10)}}
	if _, err := Split(large, nil, "l"); err == nil || !strings.Contains(err.Error(), "more than 8 MiB") {
		t.Errorf("too much: %v", err)
	}
}
