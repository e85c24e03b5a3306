package fleet_test

import (
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"

	"csi-registrar/internal/test/e2e/built"
)

var nodes = []string{"n1", "n2", "n3"}

// TestPolicy lets the DaemonSet controller create the pods of DaemonSets as operators and charts
// make them, under the policy of rollout.md.
func TestPolicy(t *testing.T) {
	c := start(t)
	for _, name := range nodes {
		c.addNode(name)
	}
	// Longhorn's and democratic-csi's DaemonSets, those of charts, one of which has three sidecars,
	// and one that has nothing else.
	var sets []*appsv1.DaemonSet
	for _, name := range []string{"longhorn", "cleanup", "ebs", "nfs", "three", "alone"} {
		sets = append(sets, daemonSets(t, name)...)
	}
	other := daemonSets(t, "nfs")[0].DeepCopy()
	other.Namespace = unlisted
	sets = append(sets, other)
	selected := map[string]bool{}
	for _, ds := range sets {
		if ds.Namespace != namespace && !selected[ds.Namespace] {
			selected[ds.Namespace] = true
			c.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ds.Namespace}})
		}
	}
	delete(selected, unlisted)
	c.usePolicy(slices.Sorted(maps.Keys(selected))...)

	listed := map[string]bool{}
	list := func(node string, yes bool) {
		t.Helper()
		listed[node] = yes
		c.list(node, yes)
	}
	check := func(when string) {
		t.Helper()
		for _, ds := range sets {
			all := ds.Spec.Template.Spec.Containers
			c.eventually(fmt.Sprintf("the pods of %s/%s %s", ds.Namespace, ds.Name, when), func() error {
				pods, err := c.pods(ds)
				if err != nil || len(pods) != len(nodes) {
					return fmt.Errorf("%d pods, %v", len(pods), err)
				}
				for node, pod := range pods {
					keeps := !listed[node] || ds.Namespace == unlisted || len(names(all, false)) == 0
					got, want := names(pod.Spec.Containers, true), names(all, keeps)
					if slices.Equal(got, want) {
						continue
					}
					return fmt.Errorf("on %s it has %q, want %q", node, got, want)
				}
				return nil
			})
		}
	}
	list("n1", true)
	for _, ds := range sets {
		c.create(ds)
	}
	check("with one node listed")
	for range 3 {
		for _, ds := range sets {
			c.recreate(ds)
		}
		check("after the operator has made it again")
	}
	list("n2", true)
	list("n1", false)
	for _, ds := range sets {
		pods, err := c.pods(ds)
		c.must(err)
		for _, pod := range pods {
			c.must(c.remove(pod))
		}
	}
	check("with another node listed")
}

// TestSplit runs the two DaemonSets of `import --split` on nodes with and without the label. At no
// time a node has pods of both.
func TestSplit(t *testing.T) {
	c := start(t)
	dir := filepath.Join(t.TempDir(), "overlay")
	manifest := filepath.Join(built.Root(t), "internal/tool/importer/testdata/good/nfs.yaml")
	out, err := exec.Command(built.Registrar(t), "import", "--split", "csi-registrar.dev/registers", "--output", dir, manifest).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	rendered, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	c.must(err)
	text, err := rendered.AsYaml()
	c.must(err)
	var sets []*appsv1.DaemonSet
	for _, object := range decode(t, string(text)) {
		if ds, ok := object.(*appsv1.DaemonSet); ok {
			sets = append(sets, ds)
			c.create(ds)
		}
	}
	if len(sets) != 2 {
		t.Fatalf("%d DaemonSets in\n%s", len(sets), text)
	}
	for i, ds := range sets {
		selector, err := metav1.LabelSelectorAsSelector(sets[1-i].Spec.Selector)
		c.must(err)
		if selector.Matches(labels.Set(ds.Spec.Template.Labels)) {
			t.Errorf("the selector of %s matches the pods of %s", sets[1-i].Name, ds.Name)
		}
		if has := len(names(ds.Spec.Template.Spec.Containers, true)) != len(names(ds.Spec.Template.Spec.Containers, false)); has != (i == 0) {
			t.Errorf("%s has a sidecar: %t", ds.Name, has)
		}
	}

	want := map[string]int{} // the DaemonSet of each node; -1: none
	check := func(when string) {
		t.Helper()
		c.eventually("the pods "+when, func() error {
			got := map[string]int{}
			for name := range want {
				got[name] = -1
			}
			for i, ds := range sets {
				pods, err := c.pods(ds)
				if err != nil {
					return err
				}
				for name := range pods {
					if got[name] >= 0 {
						t.Errorf("%s: %s has pods of both", when, name)
					}
					got[name] = i
				}
			}
			if !maps.Equal(got, want) {
				return fmt.Errorf("they are on %v, not %v", got, want)
			}
			return nil
		})
	}
	label := func(node, value string) {
		t.Helper()
		if value != "null" {
			value = `"` + value + `"`
		}
		_, err := c.API.CoreV1().Nodes().Patch(t.Context(), node, types.MergePatchType,
			fmt.Appendf(nil, `{"metadata":{"labels":{"csi-registrar.dev/registers":%s}}}`, value), metav1.PatchOptions{})
		c.must(err)
	}
	for _, name := range nodes[:2] {
		c.addNode(name)
		want[name] = 0
	}
	check("without a label")
	label("n1", "soon")
	want["n1"] = -1
	check("with one that is about to change")
	label("n1", "yes")
	want["n1"] = 1
	check("with one that has changed")
	c.addNode("n3") // of an old image
	want["n3"] = 0
	check("with a new node")
	label("n1", "soon")
	want["n1"] = -1
	check("with one on the way back")
	label("n1", "null")
	want["n1"] = 0
	check("after the way back")
}
