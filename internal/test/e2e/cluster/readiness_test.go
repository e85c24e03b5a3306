package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/controlplane"
	"csi-registrar/internal/test/e2e/harness"
	"csi-registrar/internal/test/fake"
)

// The examples of packaging/examples are for this driver.
const (
	exampleDriver = "nfs.csi.k8s.io"
	exampleTaint  = "readiness.k8s.io/" + exampleDriver
	exampleHTTP   = "127.0.0.1:9809"
	boots         = 3
	// driverLate is how much later than everything else the driver starts.
	driverLate = 3 * time.Second
)

// gatedNode is a node that registers with a taint, which the Node Readiness Controller removes. The
// programs are not part of this project and must be built beforehand:
//
//	NODE_READINESS         a directory with the source of sigs.k8s.io/node-readiness-controller, and
//	                       in its bin the programs manager (./cmd) and reporter (./cmd/readiness-condition-reporter)
//	NODE_PROBLEM_DETECTOR  the program node-problem-detector (k8s.io/node-problem-detector/cmd/nodeproblemdetector)
type gatedNode struct {
	*testing.T
	c       *cluster
	dynamic *dynamic.DynamicClient
	source  string // of the controller
	manager *harness.Manager
	daemon  *harness.Daemon
	driver  *harness.Driver
	probes  probeLog // of the driver
	log     *objectLog
	pods    int
}

func newGatedNode(t *testing.T, example string) *gatedNode {
	t.Helper()
	source := os.Getenv("NODE_READINESS")
	if source == "" {
		t.Skip("NODE_READINESS is not set")
	}
	c := start(t)
	g := &gatedNode{T: t, c: c, source: source}
	var err error
	g.dynamic, err = dynamic.NewForConfig(c.Config(controlplane.Admin))
	c.must(err)
	g.apply(filepath.Join(source, "config/crd/bases/readiness.node.x-k8s.io_nodereadinessrules.yaml"))
	g.off()
	f, err := os.OpenFile(c.dir+"/kubelet.yaml", os.O_APPEND|os.O_WRONLY, 0)
	c.must(err)
	defer f.Close()
	_, err = fmt.Fprintf(f, "registerWithTaints: [{key: %s, effect: NoSchedule}]\n", exampleTaint)
	c.must(err)
	g.driver = c.n.DriverAt(exampleDriver, filepath.Join(c.n.Run, exampleDriver+".sock"), grpc.UnaryInterceptor(g.probes.note))
	c.n.Configure(exampleDriver, g.driver.Socket)
	c.startScheduler()
	harness.StartProcess(t, "the controller", c.Command(filepath.Join(source, "bin/manager"),
		"--kubeconfig", c.kubeconfig(controlplane.Admin), "--health-probe-bind-address", "0"))
	harness.Eventually(t, time.Minute, "the rule is accepted", func() string {
		if err := g.create(example); err != nil && !apierrors.IsAlreadyExists(err) {
			return err.Error() // its CustomResourceDefinition is not established yet
		}
		return ""
	})
	g.log = g.watch()
	return g
}

// exampleFile returns the path of a file of packaging/examples.
func exampleFile(t *testing.T, name string) string {
	t.Helper()
	return filepath.Join(built.Root(t), "packaging/examples", name)
}

// objects decodes the objects of a file.
func objects(path string) ([]*unstructured.Unstructured, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all []*unstructured.Unstructured
	d := yaml.NewYAMLOrJSONDecoder(f, 4096)
	for {
		u := &unstructured.Unstructured{}
		if err := d.Decode(u); err == io.EOF {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		if len(u.Object) > 0 {
			all = append(all, u)
		}
	}
}

// create creates the objects of a file. The API server refuses unknown fields.
func (g *gatedNode) create(path string) error {
	all, err := objects(path)
	if err != nil {
		return err
	}
	for _, u := range all {
		resource, _ := meta.UnsafeGuessKindToResource(u.GroupVersionKind())
		var client dynamic.ResourceInterface = g.dynamic.Resource(resource)
		if ns := u.GetNamespace(); ns != "" {
			client = g.dynamic.Resource(resource).Namespace(ns)
		}
		if _, err := client.Create(g.Context(), u, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}); err != nil {
			return fmt.Errorf("%s %s: %w", u.GetKind(), u.GetName(), err)
		}
	}
	return nil
}

func (g *gatedNode) apply(path string) {
	g.Helper()
	g.c.must(g.create(path))
}

// off cuts the power: all processes on the node are killed, and /run is empty. Files on disk stay.
func (g *gatedNode) off() {
	g.Helper()
	g.c.killKubelet()
	if g.daemon != nil {
		g.daemon.Kill()
		g.c.must(g.manager.Drop())
		g.driver.Kill()
	}
	g.c.must(os.RemoveAll(filepath.Join(g.c.n.Etc, "run")))
}

// deleteNode deletes the Node, and the CSINode as the garbage collector does it afterwards.
func (g *gatedNode) deleteNode() {
	g.Helper()
	if err := g.c.API.CoreV1().Nodes().Delete(g.Context(), nodeName, metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
		g.c.must(err)
	}
	if err := g.c.API.StorageV1().CSINodes().Delete(g.Context(), nodeName, metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
		g.c.must(err)
	}
}

// on starts the node: the kubelet and the daemon, and later the driver.
func (g *gatedNode) on() {
	g.Helper()
	if g.manager == nil {
		g.manager = g.c.n.Manager()
	}
	g.c.startKubelet()
	g.startDaemon()
}

// startDaemon starts the daemon in the network of the node.
func (g *gatedNode) startDaemon() {
	g.Helper()
	g.c.must(g.c.Do(func() { g.daemon = g.manager.StartDaemon("--http-endpoint", exampleHTTP) }))
}

// A change is one version of an object, with what the test reads of it.
type change struct {
	version    uint64 // the resource version
	at         time.Time
	object     string // node, csinode or pod/NAME
	deleted    bool
	tainted    bool
	conditions map[string]corev1.ConditionStatus
	listed     bool // the CSINode has the driver
	scheduled  bool
}

// objectLog has all versions of the Node, the CSINode and the pods, in the order of their arrival.
type objectLog struct {
	mu      sync.Mutex
	changes []change
}

func (g *gatedNode) watch() *objectLog {
	g.Helper()
	l := &objectLog{}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	g.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	api, version := g.c.watcher(), g.c.version()
	for _, watch := range []func(context.Context, metav1.ListOptions) (apiwatch.Interface, error){
		api.CoreV1().Nodes().Watch, api.StorageV1().CSINodes().Watch, api.CoreV1().Pods(metav1.NamespaceDefault).Watch,
	} {
		wg.Go(func() {
			g.c.watch(ctx, version, watch, func(e apiwatch.Event) {
				if err := l.add(e); err != nil {
					g.Error(err)
				}
			})
		})
	}
	return l
}

func (l *objectLog) add(e apiwatch.Event) error {
	o, err := meta.Accessor(e.Object)
	if err != nil {
		return err
	}
	version, err := strconv.ParseUint(o.GetResourceVersion(), 10, 64)
	if err != nil {
		return err
	}
	c := change{version: version, at: time.Now(), deleted: e.Type == apiwatch.Deleted}
	switch o := e.Object.(type) {
	case *corev1.Node:
		c.object = "node"
		c.tainted = slices.ContainsFunc(o.Spec.Taints, func(t corev1.Taint) bool { return t.Key == exampleTaint })
		c.conditions = map[string]corev1.ConditionStatus{}
		for _, condition := range o.Status.Conditions {
			c.conditions[string(condition.Type)] = condition.Status
		}
	case *storagev1.CSINode:
		c.object = "csinode"
		c.listed = slices.ContainsFunc(o.Spec.Drivers, func(d storagev1.CSINodeDriver) bool { return d.Name == exampleDriver })
	case *corev1.Pod:
		c.object = "pod/" + o.Name
		c.scheduled = o.Spec.NodeName != ""
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.changes = append(l.changes, c)
	return nil
}

// since returns the changes after a version, in the order in which they were made.
func (l *objectLog) since(version uint64) []change {
	l.mu.Lock()
	defer l.mu.Unlock()
	var later []change
	for _, c := range l.changes {
		if c.version > version {
			later = append(later, c)
		}
	}
	slices.SortStableFunc(later, func(a, b change) int { return int(int64(a.version) - int64(b.version)) })
	return later
}

// now returns the current resource version.
func (g *gatedNode) now() uint64 {
	g.Helper()
	version, err := strconv.ParseUint(g.c.version(), 10, 64)
	g.c.must(err)
	return version
}

// seen waits for a change after a version.
func (g *gatedNode) seen(version uint64, what string, is func(change) bool) change {
	g.Helper()
	var found change
	harness.Eventually(g, 2*time.Minute, what, func() string {
		all := g.log.since(version)
		i := slices.IndexFunc(all, is)
		if i < 0 {
			if len(all) == 0 {
				return "nothing has changed"
			}
			return fmt.Sprintf("last of %d changes: %+v", len(all), all[len(all)-1])
		}
		found = all[i]
		return ""
	})
	return found
}

// condition matches a Node with a condition.
func condition(name string, status corev1.ConditionStatus) func(change) bool {
	return func(c change) bool { return c.object == "node" && c.conditions[name] == status }
}

// waitingPod creates a pod without tolerations, for the scheduler.
func (g *gatedNode) waitingPod() string {
	g.Helper()
	g.pods++
	name := fmt.Sprintf("waiting-%d", g.pods)
	_, err := g.c.API.CoreV1().Pods(metav1.NamespaceDefault).Create(g.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{HostNetwork: true, Containers: []corev1.Container{{Name: "c", Image: "image:1"}}},
	}, metav1.CreateOptions{})
	g.c.must(err)
	return name
}

// listedWhenReady polls /readyz/DRIVER, and gets the CSINode as soon as the answer is 200.
func (g *gatedNode) listedWhenReady(ctx context.Context) (at time.Time, err error) {
	client := &http.Client{Timeout: time.Minute, Transport: &http.Transport{DialContext: g.c.Dial}}
	defer client.CloseIdleConnections()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		resp, err := client.Get("http://" + exampleHTTP + "/readyz/" + exampleDriver)
		if err != nil {
			return at, err
		}
		_, err = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if err != nil {
			return at, err
		}
		if resp.StatusCode == http.StatusOK {
			break
		}
		select {
		case <-ctx.Done():
			return at, ctx.Err()
		case <-tick.C:
		}
	}
	at = time.Now()
	node, err := g.c.API.StorageV1().CSINodes().Get(ctx, nodeName, metav1.GetOptions{})
	if err == nil && !slices.ContainsFunc(node.Spec.Drivers, func(d storagev1.CSINodeDriver) bool { return d.Name == exampleDriver }) {
		err = fmt.Errorf("/readyz/%s is 200, and the CSINode has %v", exampleDriver, node.Spec.Drivers)
	}
	return at, err
}

// boot switches the node off and on, deletes its Node in between, runs a program that reports the
// condition until everything is ready, and checks the order of events. While the driver is not
// registered, the condition has the status waiting.
func (g *gatedNode) boot(name string, waiting corev1.ConditionStatus, report func() *harness.Process) {
	g.Helper()
	g.off()
	g.deleteNode()
	version, began := g.now(), time.Now()
	pod := g.waitingPod()
	g.on()
	g.seen(version, "the Node is there with its taint", func(c change) bool { return c.object == "node" && !c.deleted && c.tainted })
	reporter := report()
	reported := g.seen(version, "the condition is reported", func(c change) bool { return c.object == "node" && c.conditions[name] != "" })
	if got := reported.conditions[name]; got != waiting {
		g.Errorf("the condition is %s at first, want %s", got, waiting)
	}
	harness.Never(g, driverLate, "without the driver", func() string {
		for _, c := range g.log.since(version) {
			if c.object == "node" && !c.deleted && !c.tainted || c.object == "pod/"+pod && c.scheduled {
				return fmt.Sprintf("the taint is gone, or the pod is scheduled: %+v", c)
			}
		}
		return ""
	})

	ctx, cancel := context.WithTimeout(g.Context(), 2*time.Minute)
	defer cancel()
	ready := make(chan time.Time, 1)
	go func() {
		at, err := g.listedWhenReady(ctx)
		if err != nil {
			g.Error(err)
		}
		ready <- at
	}()
	served := g.driver.Start()
	readyAt := <-ready
	listed := g.seen(version, "the CSINode has the driver", func(c change) bool { return c.listed })
	scheduled := g.seen(version, "the pod is scheduled", func(c change) bool { return c.object == "pod/"+pod && c.scheduled })
	var free change
	for _, c := range g.log.since(version) {
		if c.object == "node" && !c.deleted && !c.tainted {
			free = c
			break
		}
	}
	switch {
	case free.version == 0:
		g.Error("a pod was scheduled, and the taint was never gone")
	case free.version < listed.version:
		g.Errorf("the taint is gone in version %d, the CSINode has the driver in version %d", free.version, listed.version)
	case scheduled.version < free.version:
		g.Errorf("the pod is scheduled in version %d, the taint gone in version %d", scheduled.version, free.version)
	}
	since := func(t time.Time) string { return t.Sub(served).Round(time.Millisecond).String() }
	g.Logf("condition %s %s after the start of the node; the driver serves after %s. From then: in the CSINode %s, /readyz 200 %s, taint gone %s, pod scheduled %s; versions %d < %d < %d",
		waiting, reported.at.Sub(began).Round(10*time.Millisecond), served.Sub(began).Round(10*time.Millisecond),
		since(listed.at), since(readyAt), since(free.at), since(scheduled.at), listed.version, free.version, scheduled.version)
	g.deletePod(metav1.NamespaceDefault, pod)
	reporter.End(syscall.SIGKILL, time.Minute)
}

func (g *gatedNode) deletePod(namespace, name string) {
	g.Helper()
	now := int64(0)
	g.c.must(g.c.API.CoreV1().Pods(namespace).Delete(g.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: &now}))
}

// reporter starts the example's DaemonSet's pod on the node, and its program.
func (g *gatedNode) reporter() *harness.Process {
	g.Helper()
	return g.report(g.reporterPod(), nil)
}

// reporterPod creates the example's DaemonSet's pod and waits until it is scheduled.
func (g *gatedNode) reporterPod() *corev1.Pod {
	g.Helper()
	all, err := objects(exampleFile(g.T, "readiness/reporter.yaml"))
	g.c.must(err)
	i := slices.IndexFunc(all, func(u *unstructured.Unstructured) bool { return u.GetKind() == "DaemonSet" })
	template, _, err := unstructured.NestedMap(all[i].Object, "spec", "template")
	g.c.must(err)
	pod := &corev1.Pod{}
	g.c.must(runtime.DefaultUnstructuredConverter.FromUnstructured(template, pod))
	pod.Name, pod.Namespace = "reporter", all[i].GetNamespace()
	api := g.c.API.CoreV1().Pods(pod.Namespace)
	if _, err := api.Get(g.Context(), pod.Name, metav1.GetOptions{}); err == nil {
		g.deletePod(pod.Namespace, pod.Name) // of the previous boot
	}
	pod, err = api.Create(g.Context(), pod, metav1.CreateOptions{})
	g.c.must(err)
	harness.Eventually(g, time.Minute, "the reporter's pod is scheduled in spite of the taint", func() string {
		pod, err = api.Get(g.Context(), pod.Name, metav1.GetOptions{})
		g.c.must(err)
		if pod.Spec.NodeName == "" {
			return fmt.Sprintf("%v", pod.Status.Conditions)
		}
		return ""
	})
	return pod
}

// report starts the program of the reporter's pod, because the container runtime does nothing, with
// the token that a kubelet would give it. The additional variables replace those of the pod.
func (g *gatedNode) report(pod *corev1.Pod, further []string) *harness.Process {
	g.Helper()
	request, err := g.c.API.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(g.Context(), pod.Spec.ServiceAccountName, &authenticationv1.TokenRequest{
		Spec: authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{
			APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID,
		}},
	}, metav1.CreateOptions{})
	g.c.must(err)
	var env []string
	for _, e := range pod.Spec.Containers[0].Env {
		if e.ValueFrom != nil {
			e.Value = pod.Spec.NodeName
		}
		env = append(env, e.Name+"="+e.Value)
	}
	return g.inPod(request.Status.Token, append(env, further...), filepath.Join(g.source, "bin/reporter"))
}

// inPod starts a program with its pod's token at the usual path.
func (g *gatedNode) inPod(token string, env []string, args ...string) *harness.Process {
	g.Helper()
	secrets := filepath.Join(g.c.dir, "secrets")
	g.c.must(os.MkdirAll(secrets, 0o700))
	g.c.must(os.WriteFile(secrets+"/ca.crt", g.c.CA(), 0o600))
	g.c.must(os.WriteFile(secrets+"/token", []byte(token), 0o600))
	server, err := url.Parse(g.c.Config(controlplane.Admin).Host)
	g.c.must(err)
	cmd := g.c.Command(append([]string{"/bin/sh", "-c", `at=/run/secrets/kubernetes.io/serviceaccount
mount -t tmpfs tmpfs /run && mkdir -p $at && mount --bind "$0" $at && exec "$@"`, secrets}, args...)...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "KUBERNETES_SERVICE_HOST=" + server.Hostname(), "KUBERNETES_SERVICE_PORT=" + server.Port()}, env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	return harness.StartProcess(g, filepath.Base(args[0]), cmd)
}

// With the Node Readiness Controller's reporter, started as in the example, the taint is never
// removed before the CSINode has the driver, and no pod is scheduled before that.
func TestTaintIsGoneOnlyWhenTheCSINodeHasTheDriver(t *testing.T) {
	g := newGatedNode(t, exampleFile(t, "readiness/rule.yaml"))
	g.apply(exampleFile(t, "readiness/reporter.yaml"))
	for range boots {
		g.boot("csi-registrar.dev/"+exampleDriver, corev1.ConditionFalse, g.reporter)
	}
	g.kubeletCannotRemoveItsTaint()
	g.rebootWithTheNode()
	g.deleteTheNodeUnderTheDaemon()
}

// kubeletCannotRemoveItsTaint checks that a kubelet may not remove the taint itself, which is why
// the controller is needed.
func (g *gatedNode) kubeletCannotRemoveItsTaint() {
	g.Helper()
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"taints": []corev1.Taint{{Key: "a/b", Effect: corev1.TaintEffectNoSchedule}}}})
	g.c.must(err)
	kubelet, err := kubernetes.NewForConfig(g.c.Config(controlplane.Kubelet))
	g.c.must(err)
	_, err = kubelet.CoreV1().Nodes().Patch(g.Context(), nodeName, types.MergePatchType, patch, metav1.PatchOptions{})
	if !apierrors.IsForbidden(err) {
		g.Errorf("the kubelet may change its taints: %v", err)
	}
	g.Logf("the kubelet's own change of its taints: %v", err)
}

// rebootWithTheNode checks that a Node that is kept over a reboot has no taint until the reporter's
// first check.
func (g *gatedNode) rebootWithTheNode() {
	g.Helper()
	g.off()
	version, began := g.now(), time.Now()
	g.on()
	answers := time.Now()
	if len(g.log.since(version)) > 0 && slices.ContainsFunc(g.log.since(version), func(c change) bool { return c.tainted }) {
		g.Error("the kubelet gave its taint to a Node that was there already")
	}
	reporter := g.reporter()
	tainted := g.seen(version, "the taint is back", func(c change) bool { return c.tainted })
	served := g.driver.Start()
	free := g.seen(tainted.version, "the taint is gone", func(c change) bool { return c.object == "node" && !c.tainted })
	g.daemon.WaitState(exampleDriver, "registered", time.Minute)
	g.Logf("reboot with the Node: the kubelet answers after %v, without the taint for %v until the controller adds it; gone %v after the driver serves",
		answers.Sub(began).Round(10*time.Millisecond), tainted.at.Sub(answers).Round(10*time.Millisecond), free.at.Sub(served).Round(10*time.Millisecond))
	reporter.End(syscall.SIGKILL, time.Minute)
}

// deleteTheNodeUnderTheDaemon checks that after the Node of a running node was deleted and the
// kubelet restarted, the CSINode lacks the driver until that kubelet registers it, which the daemon
// does not know.
func (g *gatedNode) deleteTheNodeUnderTheDaemon() {
	g.Helper()
	reporter := g.reporter()
	defer reporter.End(syscall.SIGKILL, time.Minute)
	for i := range boots {
		if i == boots-1 {
			// Longer than the reporter's interval.
			g.driver.Set(func(a *fake.Answers) { a.Delay = map[string]time.Duration{fake.NodeGetInfo: 8 * time.Second} })
		}
		g.c.killKubelet()
		g.deleteNode()
		version := g.now()
		g.c.startKubelet()
		made := g.seen(version, "the CSINode is there", func(c change) bool { return c.object == "csinode" && !c.deleted })
		listed := g.seen(version, "the CSINode has the driver", func(c change) bool { return c.listed })
		node := g.seen(version, "the Node is there", func(c change) bool { return c.object == "node" && !c.deleted })
		free := g.seen(version, "the taint is gone", func(c change) bool { return c.object == "node" && !c.deleted && !c.tainted })
		g.Logf("Node deleted under the daemon, /readyz 200 all the time: CSINode without the driver for %v; taint gone %v after the Node came, version %d, the CSINode has the driver in %d",
			listed.at.Sub(made.at).Round(time.Millisecond), free.at.Sub(node.at).Round(time.Millisecond), free.version, listed.version)
	}
}

// The same with node-problem-detector and the example's plugin and rule. If the daemon does not
// run, the condition is unknown and the taint is added again.
func TestNodeProblemDetectorHoldsTheTaint(t *testing.T) {
	npd := os.Getenv("NODE_PROBLEM_DETECTOR")
	if npd == "" {
		t.Skip("NODE_PROBLEM_DETECTOR is not set")
	}
	g := newGatedNode(t, exampleFile(t, "node-problem-detector/rule.yaml"))
	text, err := os.ReadFile(exampleFile(t, "node-problem-detector/csi-driver.json"))
	g.c.must(err)
	config := filepath.Join(g.c.dir, "csi-driver.json")
	g.c.must(os.WriteFile(config, []byte(strings.NewReplacer(
		"/etc/node-problem-detector", filepath.Dir(exampleFile(t, "node-problem-detector/csi-driver.sh")),
		`"`+exampleDriver+`"]`, fmt.Sprintf(`"%s", "--config-root", %q]`, exampleDriver, g.c.n.Etc),
	).Replace(string(text))), 0o600))
	run := func() *harness.Process {
		cmd := g.c.Command(npd, "--config.custom-plugin-monitor", config, "--hostname-override", nodeName, "--port", "0", "--prometheus-port", "0",
			"--apiserver-override", g.c.Config(controlplane.Admin).Host+"?inClusterConfig=false&auth="+
				g.c.kubeconfig(controlplane.NodeProblemDetector))
		cmd.Env = append(os.Environ(), "CSI_REGISTRAR="+built.Registrar(t), "NODE_NAME="+nodeName)
		return harness.StartProcess(t, "node-problem-detector", cmd)
	}
	g.apply(filepath.Join("testdata", "node-problem-detector.yaml"))
	const name = "csi-registrar.dev/NotRegistered-" + exampleDriver
	for range boots {
		g.boot(name, corev1.ConditionTrue, run)
	}
	reporter := run()
	defer reporter.End(syscall.SIGKILL, time.Minute)
	version := g.now()
	g.daemon.Stop()
	unknown := g.seen(version, "the condition is unknown", condition(name, corev1.ConditionUnknown))
	tainted := g.seen(unknown.version, "the taint is back", func(c change) bool { return c.object == "node" && c.tainted })
	g.startDaemon()
	known := g.seen(tainted.version, "the condition is false", condition(name, corev1.ConditionFalse))
	g.seen(known.version, "the taint is gone", func(c change) bool { return c.object == "node" && !c.tainted })
}
