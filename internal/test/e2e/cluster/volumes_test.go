package cluster

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"csi-registrar/internal/test/e2e/harness"
	"csi-registrar/internal/test/fake"
)

const (
	volumeDriver  = "volumes.example"
	pods          = 40
	volumesPerPod = 25
	podsAtOnce    = 3
	// After several failures the kubelet waits up to 2m2s before it retries a volume (v1.36).
	podLimit = 4 * time.Minute

	publishMethod   = "csi.v1.Node/NodePublishVolume"
	unpublishMethod = "csi.v1.Node/NodeUnpublishVolume"
)

// volumes is the node service of a driver whose volumes are empty directories.
type volumes struct {
	mu          sync.Mutex
	targets     map[string]string // of the published volumes, by volume ID
	published   map[string]bool   // IDs of all volumes ever published
	unpublished map[string]bool
	calls       map[string]int // that succeeded
}

// intercept answers the calls for volumes before the fake driver sees them.
func (v *volumes) intercept(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	switch req := req.(type) {
	case *csi.NodeGetCapabilitiesRequest:
		return &csi.NodeGetCapabilitiesResponse{}, nil
	case *csi.NodePublishVolumeRequest:
		return &csi.NodePublishVolumeResponse{}, v.publish(req)
	case *csi.NodeUnpublishVolumeRequest:
		return &csi.NodeUnpublishVolumeResponse{}, v.unpublish(req)
	}
	return next(ctx, req)
}

func (v *volumes) publish(req *csi.NodePublishVolumeRequest) error {
	id, target, attributes := req.GetVolumeId(), req.GetTargetPath(), req.GetVolumeContext()
	if attributes["csi.storage.k8s.io/ephemeral"] != "true" || attributes["csi.storage.k8s.io/pod.name"] != attributes["pod"] {
		return status.Errorf(codes.InvalidArgument, "volume context %v", attributes)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if at, ok := v.targets[id]; ok && at != target {
		return status.Errorf(codes.AlreadyExists, "published at %s", at)
	}
	if err := os.Mkdir(target, 0o750); err != nil && !errors.Is(err, fs.ErrExist) {
		return status.Error(codes.Internal, err.Error())
	}
	v.targets[id] = target
	v.published[id] = true
	v.calls[publishMethod]++
	return nil
}

func (v *volumes) unpublish(req *csi.NodeUnpublishVolumeRequest) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if err := os.Remove(req.GetTargetPath()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return status.Error(codes.Internal, err.Error())
	}
	delete(v.targets, req.GetVolumeId())
	v.unpublished[req.GetVolumeId()] = true
	v.calls[unpublishMethod]++
	return nil
}

// done counts the volumes that were published, and those that were unpublished.
func (v *volumes) done() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.published) + len(v.unpublished)
}

// tracedNode is a node with a driver whose calls are traced.
type tracedNode struct {
	*testing.T
	c            *cluster
	volumes      *volumes
	socket, link string
	manager      *harness.Manager
	daemon       *harness.Daemon
	records      []string // files with lines of JSON
}

func newTracedNode(t *testing.T) *tracedNode {
	t.Helper()
	c := start(t)
	n := &tracedNode{
		T: t, c: c, manager: c.n.Manager(),
		volumes: &volumes{targets: map[string]string{}, published: map[string]bool{}, unpublished: map[string]bool{}, calls: map[string]int{}},
		socket:  filepath.Join(c.n.Run, "v.sock"),
		link:    filepath.Join(c.n.Root, "plugins/csi-registrar", volumeDriver+".sock"),
	}
	d := fake.NewDriver(n.socket, fake.Healthy(volumeDriver), grpc.UnaryInterceptor(n.volumes.intercept))
	if _, err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Kill)
	c.n.Configure(volumeDriver, n.socket, "endpoint_link = true")
	yes, no := true, false
	_, err := c.API.StorageV1().CSIDrivers().Create(t.Context(), &storagev1.CSIDriver{
		ObjectMeta: metav1.ObjectMeta{Name: volumeDriver},
		Spec: storagev1.CSIDriverSpec{
			AttachRequired: &no, PodInfoOnMount: &yes,
			VolumeLifecycleModes: []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecycleEphemeral},
		},
	}, metav1.CreateOptions{})
	c.must(err)
	n.daemon = n.manager.StartDaemon()
	if got := n.daemon.WaitState(volumeDriver, "registered", time.Minute).Endpoint; got != n.link {
		t.Fatalf("the endpoint is %s, want the link %s", got, n.link)
	}
	return n
}

func podName(i int) string { return fmt.Sprintf("p%02d", i) }

func (n *tracedNode) createPod(i int) {
	n.Helper()
	name := podName(i)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: metav1.NamespaceDefault},
		Spec:       corev1.PodSpec{NodeName: nodeName, HostNetwork: true},
	}
	container := corev1.Container{Name: "c", Image: "image:1"}
	for i := range volumesPerPod {
		v := fmt.Sprintf("v%02d", i)
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: v, VolumeSource: corev1.VolumeSource{
			CSI: &corev1.CSIVolumeSource{Driver: volumeDriver, VolumeAttributes: map[string]string{"pod": name}},
		}})
		container.VolumeMounts = append(container.VolumeMounts, corev1.VolumeMount{Name: v, MountPath: "/" + v})
	}
	pod.Spec.Containers = []corev1.Container{container}
	_, err := n.c.API.CoreV1().Pods(metav1.NamespaceDefault).Create(n.Context(), pod, metav1.CreateOptions{})
	n.c.must(err)
}

// deletePod waits until a pod runs, which means that all its volumes are published, and deletes it.
func (n *tracedNode) deletePod(i int) {
	n.Helper()
	api := n.c.API.CoreV1().Pods(metav1.NamespaceDefault)
	harness.Eventually(n, podLimit, podName(i)+" runs", func() string {
		pod, err := api.Get(n.Context(), podName(i), metav1.GetOptions{})
		n.c.must(err)
		if pod.Status.Phase == corev1.PodRunning {
			return ""
		}
		return fmt.Sprintf("%s %s %v", pod.Status.Phase, pod.Status.Message, pod.Status.Conditions)
	})
	grace := int64(1)
	n.c.must(api.Delete(n.Context(), podName(i), metav1.DeleteOptions{GracePeriodSeconds: &grace}))
}

// gone waits until a pod is deleted, which the kubelet does when its volumes are unpublished.
func (n *tracedNode) gone(i int) {
	n.Helper()
	harness.Eventually(n, podLimit, podName(i)+" is gone", func() string {
		pod, err := n.c.API.CoreV1().Pods(metav1.NamespaceDefault).Get(n.Context(), podName(i), metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return ""
		}
		n.c.must(err)
		return fmt.Sprintf("conditions %v", pod.Status.Conditions)
	})
}

// trace starts a recorder and waits until it receives calls.
func (n *tracedNode) trace() *harness.Process {
	n.Helper()
	f, err := os.Create(filepath.Join(n.c.dir, fmt.Sprintf("record%d", len(n.records)+1)))
	n.c.must(err)
	defer f.Close()
	n.records = append(n.records, f.Name())
	cmd := n.c.n.Command("trace", volumeDriver, "--json", "--config-root", n.c.n.Etc)
	cmd.Stdout = f
	p := harness.StartProcess(n, fmt.Sprintf("recorder %d", len(n.records)), cmd)
	n.arrive(p, 1)
	return p
}

// arrive waits until calls have been redirected to a recorder for the nth time.
func (n *tracedNode) arrive(p *harness.Process, nth int) {
	n.Helper()
	harness.Eventually(n, time.Minute, "calls arrive at the recorder", func() string {
		if strings.Count(p.Log(), "are recorded here") >= nth {
			return ""
		}
		if !p.Running() {
			n.Fatalf("the recorder ended: %s", p.Log())
		}
		return fmt.Sprintf("its log is %q", p.Log())
	})
}

// interrupt ends a recorder with SIGINT, as a user does.
func (n *tracedNode) interrupt(p *harness.Process) {
	n.Helper()
	// It waits for calls, of at most 2 minutes.
	if code := p.End(syscall.SIGINT, 3*time.Minute); code != 0 {
		n.Errorf("a recorder that is interrupted ends with %d: %s", code, p.Log())
	}
	if got := n.target(); got != n.socket {
		n.Errorf("after the recorder the link points to %s", got)
	}
}

// target returns the target of the link.
func (n *tracedNode) target() string {
	n.Helper()
	target, err := os.Readlink(n.link)
	n.c.must(err)
	return target
}

func (n *tracedNode) pointsBack() {
	n.Helper()
	harness.Eventually(n, time.Minute, "the link points at the driver", func() string {
		if got := n.target(); got != n.socket {
			return "it points to " + got
		}
		return ""
	})
}

// endings are the ways to end a recording.
var endings = []struct {
	name string
	do   func(*tracedNode, *harness.Process)
}{
	{"recorder interrupted", func(n *tracedNode, p *harness.Process) { n.interrupt(p) }},
	{"recorder killed", func(_ *tracedNode, p *harness.Process) { p.End(syscall.SIGKILL, time.Minute) }},
	{"recorder frozen", func(n *tracedNode, p *harness.Process) {
		p.Signal(syscall.SIGSTOP)
		n.pointsBack()
		p.Signal(syscall.SIGCONT)
		n.arrive(p, 2)
		n.interrupt(p)
	}},
	{"recorder frozen and killed", func(n *tracedNode, p *harness.Process) {
		p.Signal(syscall.SIGSTOP)
		n.pointsBack()
		p.End(syscall.SIGKILL, time.Minute)
	}},
	{"daemon restarted", func(n *tracedNode, p *harness.Process) {
		n.daemon = n.manager.Restart(n.daemon, syscall.SIGTERM)
		n.arrive(p, 2)
		n.interrupt(p)
	}},
	{"daemon killed", func(n *tracedNode, p *harness.Process) {
		n.daemon = n.manager.Restart(n.daemon, syscall.SIGKILL)
		n.arrive(p, 2)
		n.interrupt(p)
	}},
	{"daemon killed, then the recorder", func(n *tracedNode, p *harness.Process) {
		n.daemon.Kill()
		p.End(syscall.SIGKILL, time.Minute)
		n.daemon = n.manager.StartDaemon()
	}},
}

// A thousand volumes are published and unpublished by the kubelet while recordings begin and end in
// every way and the daemon is restarted and killed. The CSINode is never written.
func TestThousandVolumesTracedAtRandom(t *testing.T) {
	n := newTracedNode(t)
	began := time.Now()
	before := n.c.csiNode()
	if len(before.Spec.Drivers) != 1 || before.Spec.Drivers[0].Name != volumeDriver {
		t.Fatalf("CSINode has %+v", before.Spec.Drivers)
	}
	unchanged := func(after string) {
		t.Helper()
		if now := n.c.csiNode(); now.ResourceVersion != before.ResourceVersion {
			t.Fatalf("%s: CSINode's version is %s, was %s", after, now.ResourceVersion, before.ResourceVersion)
		}
	}
	var order []int
	times := map[string]int{}
	for i := range pods + podsAtOnce {
		if len(order) == 0 {
			order = rand.Perm(len(endings)) // each of them, then each again
		}
		ending := endings[order[0]]
		order = order[1:]
		times[ending.name]++

		recorder := n.trace()
		// A pod begins or ends in each round, so at least volumesPerPod more are done.
		until := n.volumes.done() + rand.N(volumesPerPod)
		if i < pods {
			n.createPod(i)
		}
		if i >= podsAtOnce {
			n.deletePod(i - podsAtOnce)
		}
		harness.Eventually(t, podLimit, "volumes are published or unpublished", func() string {
			if done := n.volumes.done(); done < until {
				return fmt.Sprintf("%d, want %d", done, until)
			}
			return ""
		})
		ending.do(n, recorder)
		n.pointsBack()
		unchanged(ending.name)
		if t.Failed() {
			t.Fatalf("in round %d: %s", i+1, ending.name)
		}
	}
	for i := range pods {
		n.gone(i)
	}
	n.daemon.WaitState(volumeDriver, "registered", time.Minute)
	n.pointsBack()
	unchanged("at the end")

	const want = pods * volumesPerPod
	v := n.volumes
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.published) != want || !maps.Equal(v.published, v.unpublished) || len(v.targets) != 0 {
		t.Errorf("%d volumes published, %d unpublished, want %d; left: %v", len(v.published), len(v.unpublished), want, v.targets)
	}
	ends := n.kubeletCalls()
	for _, method := range []string{publishMethod, unpublishMethod} {
		if ok := ends[method+" OK"]; ok < want {
			t.Errorf("the kubelet counts %d calls of %s that ended OK, want %d or more", ok, method, want)
		}
	}
	for end, count := range ends {
		if !strings.HasSuffix(end, " OK") && !strings.HasSuffix(end, " "+codes.Unavailable.String()) {
			t.Errorf("%d calls: %s", count, end)
		}
	}
	recorded, lines := n.recorded()
	if len(recorded) < pods {
		t.Errorf("%d publications are in the records, want %d or more", len(recorded), pods)
	}
	for id := range recorded {
		if !v.published[id] {
			t.Errorf("the records name volume %q, which was never published", id)
		}
	}
	t.Logf("%v: %d publications, CSINode's version is %s as before", time.Since(began).Round(time.Second), want, before.ResourceVersion)
	t.Logf("recordings ended: %v", times)
	t.Logf("the driver's calls: %v; recorded: %d calls, publications of %d volumes", v.calls, lines, len(recorded))
	t.Logf("the kubelet's calls: %v", ends)
}

// kubeletCalls counts the kubelet's calls to the driver by "method code".
func (n *tracedNode) kubeletCalls() map[string]int {
	n.Helper()
	resp, err := n.c.client().Get("https://" + kubeletAddress + "/metrics")
	n.c.must(err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	n.c.must(err)
	counts := map[string]int{}
	series := regexp.MustCompile(`(?m)^csi_operations_seconds_count\{driver_name="` + volumeDriver +
		`",grpc_status_code="(\w+)",method_name="/([^"]+)",.*\} (\d+)$`)
	for _, m := range series.FindAllSubmatch(text, -1) {
		count, err := strconv.Atoi(string(m[3]))
		n.c.must(err)
		counts[string(m[2])+" "+string(m[1])] += count
	}
	return counts
}

// recorded gives the volumes whose publication is in a record, and counts all calls recorded.
func (n *tracedNode) recorded() (volumes map[string]bool, lines int) {
	n.Helper()
	volumes = map[string]bool{}
	for _, path := range n.records {
		f, err := os.Open(path)
		n.c.must(err)
		defer f.Close()
		s := bufio.NewScanner(f)
		for s.Scan() {
			var call struct{ Method, Volume, Code string }
			if err := json.Unmarshal(s.Bytes(), &call); err != nil {
				n.Errorf("%s: %v in %q", path, err, s.Text())
			}
			lines++
			if call.Method == publishMethod && call.Code == "OK" {
				volumes[call.Volume] = true
			}
		}
		n.c.must(s.Err())
	}
	return volumes, lines
}
