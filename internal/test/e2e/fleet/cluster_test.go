// Package fleet tests clusters in which only some nodes have csi-registrar (rollout.md), with the
// API server, the scheduler and the DaemonSet controller of Kubernetes. The nodes are only objects,
// except in TestRolloutWithPods.
package fleet_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/kubernetes/pkg/controller/daemon"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/controlplane"
)

const (
	limit     = 2 * time.Minute
	nodesMap  = "csi-registrar-nodes" // the ConfigMap of policy.yaml
	unlisted  = "unlisted"            // a namespace that its binding does not select
	namespace = metav1.NamespaceSystem
)

// cluster is a control plane with a scheduler and a DaemonSet controller.
type cluster struct {
	*controlplane.ControlPlane
	t *testing.T
}

func start(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{controlplane.New(t), t}
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	c.must(os.WriteFile(kubeconfig, []byte(c.Kubeconfig()), 0o600))
	c.Start("kube-scheduler", c.Command(controlplane.Binary(t), "kube-scheduler", "--kubeconfig", kubeconfig, "--leader-elect=false", "--secure-port=0"))
	config := c.Config(controlplane.Admin)
	config.Timeout, config.QPS = 0, -1 // it watches
	client, err := kubernetes.NewForConfig(config)
	c.must(err)
	ctx, stop := context.WithCancel(context.Background())
	shared := informers.NewSharedInformerFactory(client, 0)
	controller, err := daemon.NewDaemonSetsController(ctx, shared.Apps().V1().DaemonSets(), shared.Apps().V1().ControllerRevisions(),
		shared.Core().V1().Pods(), shared.Core().V1().Nodes(), client, flowcontrol.NewBackOff(time.Second, time.Minute))
	c.must(err)
	shared.Start(ctx.Done())
	var running sync.WaitGroup
	running.Go(func() { controller.Run(ctx, 2) })
	t.Cleanup(func() {
		stop()
		shared.Shutdown()
		running.Wait()
	})
	return c
}

func (c *cluster) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) eventually(what string, check func() error) {
	c.t.Helper()
	controlplane.Eventually(c.t, limit, what, check)
}

// addNode creates a node without a kubelet.
func (c *cluster) addNode(name string) {
	c.t.Helper()
	nodes := c.API.CoreV1().Nodes()
	n, err := nodes.Create(c.t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"kubernetes.io/os": "linux"}}}, metav1.CreateOptions{})
	c.must(err)
	n.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("8"), corev1.ResourceMemory: resource.MustParse("8Gi"), corev1.ResourcePods: resource.MustParse("110")}
	n.Status.Capacity = n.Status.Allocatable
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	_, err = nodes.UpdateStatus(c.t.Context(), n, metav1.UpdateOptions{})
	c.must(err)
}

// create creates objects.
func (c *cluster) create(objects ...runtime.Object) {
	c.t.Helper()
	for _, object := range objects {
		var err error
		switch o := object.(type) {
		case *corev1.Namespace:
			_, err = c.API.CoreV1().Namespaces().Create(c.t.Context(), o, metav1.CreateOptions{})
		case *corev1.ConfigMap:
			_, err = c.API.CoreV1().ConfigMaps(o.Namespace).Create(c.t.Context(), o, metav1.CreateOptions{})
		case *admissionv1.MutatingAdmissionPolicy:
			_, err = c.API.AdmissionregistrationV1().MutatingAdmissionPolicies().Create(c.t.Context(), o, metav1.CreateOptions{})
		case *admissionv1.MutatingAdmissionPolicyBinding:
			_, err = c.API.AdmissionregistrationV1().MutatingAdmissionPolicyBindings().Create(c.t.Context(), o, metav1.CreateOptions{})
		case *appsv1.DaemonSet:
			complete(o)
			_, err = c.API.AppsV1().DaemonSets(o.Namespace).Create(c.t.Context(), o, metav1.CreateOptions{})
		default:
			c.t.Fatalf("%T", object)
		}
		c.must(err)
	}
}

// usePolicy creates policy.yaml, for the namespaces of the drivers, and waits until it is in force.
func (c *cluster) usePolicy(namespaces ...string) {
	c.t.Helper()
	for _, object := range decode(c.t, read(c.t, "packaging/examples/cluster/policy.yaml")) {
		if b, ok := object.(*admissionv1.MutatingAdmissionPolicyBinding); ok {
			in := &b.Spec.MatchResources.NamespaceSelector.MatchExpressions[0]
			in.Values = append(in.Values, namespaces...)
		}
		c.create(object)
	}
	c.list("probe", true)
	c.list("probe", false)
}

// probe waits until the policy takes the sidecar out of new pods of a node, or no longer does.
func (c *cluster) probe(node string, listed bool) {
	c.t.Helper()
	probe := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "probe"},
		Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Name: "driver", Image: "driver"}, {Name: "sidecar", Image: "csi-node-driver-registrar"}},
			Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}}}},
			}}},
		},
	}
	c.eventually("the policy to know the list", func() error {
		made, err := c.API.CoreV1().Pods(namespace).Create(c.t.Context(), probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil && (len(made.Spec.Containers) == 1) != listed {
			err = fmt.Errorf("the pod has %d containers", len(made.Spec.Containers))
		}
		return err
	})
}

// list puts a node into the list of the policy or takes it out, with the patches of rollout.md, and
// waits until the policy knows.
func (c *cluster) list(node string, listed bool) {
	c.t.Helper()
	value := "null"
	if listed {
		value = `""`
	}
	_, err := c.API.CoreV1().ConfigMaps(namespace).Patch(c.t.Context(), nodesMap, types.MergePatchType, fmt.Appendf(nil, `{"data":{%q:%s}}`, node, value), metav1.PatchOptions{})
	c.must(err)
	c.probe(node, listed)
}

// pods returns the pods of a DaemonSet by node. Those that are being deleted are removed, as a
// kubelet does.
func (c *cluster) pods(ds *appsv1.DaemonSet) (byNode map[string]*corev1.Pod, err error) {
	api := c.API.CoreV1().Pods(ds.Namespace)
	list, err := api.List(c.t.Context(), metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(ds.Spec.Selector)})
	if err != nil {
		return nil, err
	}
	byNode = map[string]*corev1.Pod{}
	for _, pod := range list.Items {
		if pod.DeletionTimestamp != nil {
			if err := c.remove(&pod); err != nil {
				return nil, err
			}
			continue
		}
		node := pod.Spec.NodeName
		if node == "" {
			err = fmt.Errorf("pod %s is not scheduled: %+v", pod.Name, pod.Status.Conditions)
		}
		if byNode[node] != nil {
			return nil, fmt.Errorf("node %s has two pods of %s", node, ds.Name)
		}
		byNode[node] = &pod
	}
	return byNode, err
}

// remove removes a pod at once.
func (c *cluster) remove(pod *corev1.Pod) error {
	now := int64(0)
	err := c.API.CoreV1().Pods(pod.Namespace).Delete(c.t.Context(), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: &now})
	if apierrors.IsNotFound(err) {
		err = nil
	}
	return err
}

// recreate deletes a DaemonSet and, when its pods are gone, creates it again, as an operator does.
// The pods are deleted as the garbage collector does.
func (c *cluster) recreate(ds *appsv1.DaemonSet) {
	c.t.Helper()
	c.must(c.API.AppsV1().DaemonSets(ds.Namespace).Delete(c.t.Context(), ds.Name, metav1.DeleteOptions{}))
	c.must(c.API.CoreV1().Pods(ds.Namespace).DeleteCollection(c.t.Context(), metav1.DeleteOptions{},
		metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(ds.Spec.Selector)}))
	c.eventually("the pods of "+ds.Name+" to be gone", func() error {
		pods, err := c.pods(ds)
		if len(pods) > 0 {
			err = fmt.Errorf("%d are there", len(pods))
		}
		return err
	})
	c.create(ds)
}

// isSidecar reports whether a container is a node-driver-registrar.
func isSidecar(c corev1.Container) bool {
	return strings.Contains(c.Image, "node-driver-registrar") ||
		slices.ContainsFunc(c.Args, func(arg string) bool { return strings.Contains(arg, "kubelet-registration-path") })
}

// names lists containers, without sidecars if these are not wanted.
func names(containers []corev1.Container, sidecars bool) (list []string) {
	for _, c := range containers {
		if sidecars || !isSidecar(c) {
			list = append(list, c.Name)
		}
	}
	return list
}

// read returns a file of the source.
func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(built.Root(t), path))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// daemonSets returns the DaemonSets of a manifest in the tests of import.
func daemonSets(t *testing.T, name string) (all []*appsv1.DaemonSet) {
	t.Helper()
	for _, object := range decode(t, read(t, "internal/tool/importer/testdata/good/"+name+".yaml")) {
		if ds, ok := object.(*appsv1.DaemonSet); ok {
			complete(ds)
			all = append(all, ds)
		}
	}
	if len(all) == 0 {
		t.Fatalf("%s.yaml has no DaemonSet", name)
	}
	return all
}

// complete adds what the manifests in the tests of import leave out.
func complete(ds *appsv1.DaemonSet) {
	if ds.Spec.Selector == nil {
		ds.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": ds.Name}}
		ds.Spec.Template.Labels = ds.Spec.Selector.MatchLabels
	}
	if ds.Namespace == "" {
		ds.Namespace = namespace
	}
	yes := true
	for i := range ds.Spec.Template.Spec.Containers {
		// For mounts that others must see.
		ds.Spec.Template.Spec.Containers[i].SecurityContext = &corev1.SecurityContext{Privileged: &yes}
	}
}

// decode returns the objects of a manifest.
func decode(t *testing.T, text string) (objects []runtime.Object) {
	t.Helper()
	documents := yaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return objects
		}
		if err != nil {
			t.Fatal(err)
		}
		object, _, err := scheme.Codecs.UniversalDeserializer().Decode(document, nil, nil)
		if err != nil {
			t.Fatalf("%v\n%s", err, document)
		}
		list, ok := object.(*corev1.List)
		if !ok {
			objects = append(objects, object)
			continue
		}
		for _, item := range list.Items {
			objects = append(objects, decode(t, string(item.Raw))...)
		}
	}
}
