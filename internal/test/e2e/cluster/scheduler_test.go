package cluster

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"

	"csi-registrar/internal/test/e2e/controlplane"
	"csi-registrar/internal/test/e2e/harness"
)

const (
	scheduledDriver = "scheduled.example"
	claimName       = "claim"
	// podInterval is the time from one pod to the next. A driver that is registered again is
	// missing from the CSINode for about a second.
	podInterval = 40 * time.Millisecond
	restarts    = 20
	// podsPerRestart is the minimum number of pods scheduled between two restarts.
	podsPerRestart = 10
)

// startScheduled starts a cluster with a scheduler, with the default feature gates, a driver that
// has preventPodSchedulingIfMissing (on since Kubernetes v1.37), and a claim for one of its
// volumes.
func startScheduled(t *testing.T) (*cluster, *harness.Driver) {
	t.Helper()
	c := start(t)
	d := c.n.AddDriver(scheduledDriver)
	d.Start()
	yes, no := true, false
	_, err := c.API.StorageV1().CSIDrivers().Create(t.Context(), &storagev1.CSIDriver{
		ObjectMeta: metav1.ObjectMeta{Name: scheduledDriver},
		Spec:       storagev1.CSIDriverSpec{AttachRequired: &no, PreventPodSchedulingIfMissing: &yes},
	}, metav1.CreateOptions{})
	c.must(err)
	c.bindClaim()
	c.startScheduler()
	return c, d
}

func (c *cluster) startScheduler() {
	c.t.Helper()
	harness.StartProcess(c.t, "kube-scheduler", c.Command(
		controlplane.Binary(c.t), "kube-scheduler", "--kubeconfig", c.kubeconfig(controlplane.Scheduler), "--leader-elect=false", "--secure-port=0",
	))
}

// bindClaim creates a claim and binds it to a volume of the driver, as the controller manager does.
func (c *cluster) bindClaim() {
	c.t.Helper()
	ctx, core := c.t.Context(), c.API.CoreV1()
	none := ""
	size := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
	modes := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
	claim, err := core.PersistentVolumeClaims(metav1.NamespaceDefault).Create(ctx, &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: claimName, Annotations: map[string]string{"pv.kubernetes.io/bind-completed": "yes"}},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: modes, StorageClassName: &none, VolumeName: "volume",
			Resources: corev1.VolumeResourceRequirements{Requests: size},
		},
	}, metav1.CreateOptions{})
	c.must(err)
	volume, err := core.PersistentVolumes().Create(ctx, &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "volume"},
		Spec: corev1.PersistentVolumeSpec{
			Capacity: size, AccessModes: modes, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			ClaimRef: &corev1.ObjectReference{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				CSI: &corev1.CSIPersistentVolumeSource{Driver: scheduledDriver, VolumeHandle: "1"},
			},
		},
	}, metav1.CreateOptions{})
	c.must(err)
	volume.Status.Phase = corev1.VolumeBound
	_, err = core.PersistentVolumes().UpdateStatus(ctx, volume, metav1.UpdateOptions{})
	c.must(err)
	claim.Status = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, AccessModes: modes, Capacity: size}
	_, err = core.PersistentVolumeClaims(metav1.NamespaceDefault).UpdateStatus(ctx, claim, metav1.UpdateOptions{})
	c.must(err)
}

// podStream creates pods that need a volume of the driver, deletes each as soon as it is scheduled,
// and records those that the scheduler found unschedulable, even for a moment.
type podStream struct {
	c   *cluster
	api typedcorev1.PodInterface

	mu        sync.Mutex
	scheduled map[string]bool // by the pods' names
	refused   map[string]refusal
}

type refusal struct {
	message string
	at      time.Time
	until   time.Time // zero: not scheduled yet
}

// startPods starts a stream that ends with the test.
func (c *cluster) startPods() *podStream {
	c.t.Helper()
	s := &podStream{c: c, api: c.watcher().CoreV1().Pods(metav1.NamespaceDefault), scheduled: map[string]bool{}, refused: map[string]refusal{}}
	version := c.version()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { s.create(ctx) })
	wg.Go(func() { c.watch(ctx, version, s.api.Watch, func(e apiwatch.Event) { s.follow(ctx, e) }) })
	c.t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return s
}

func (s *podStream) create(ctx context.Context) {
	tick := time.NewTicker(podInterval)
	defer tick.Stop()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "p"},
		Spec: corev1.PodSpec{
			HostNetwork: true,
			Containers:  []corev1.Container{{Name: "c", Image: "image:1"}},
			Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claimName},
			}}},
		},
	}
	for {
		if _, err := s.api.Create(ctx, pod, metav1.CreateOptions{}); err != nil && ctx.Err() == nil {
			s.c.t.Errorf("cannot create a pod: %v", err)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// follow deletes a pod when it is scheduled.
func (s *podStream) follow(ctx context.Context, e apiwatch.Event) {
	pod, ok := e.Object.(*corev1.Pod)
	if !ok || e.Type == apiwatch.Deleted || !s.note(pod) {
		return
	}
	now := int64(0)
	err := s.api.Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: &now})
	if err != nil && !apierrors.IsNotFound(err) && ctx.Err() == nil {
		s.c.t.Errorf("cannot delete a pod: %v", err)
	}
}

// note records the scheduler's result for a pod, and reports whether the pod was just scheduled.
func (s *podStream) note(pod *corev1.Pod) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, refused := s.refused[pod.Name]
	for _, condition := range pod.Status.Conditions {
		switch {
		case condition.Type != corev1.PodScheduled || refused:
		case condition.Status == corev1.ConditionFalse:
			s.refused[pod.Name] = refusal{message: condition.Reason + ": " + condition.Message, at: time.Now()}
		}
	}
	if pod.Spec.NodeName == "" || s.scheduled[pod.Name] {
		return false
	}
	if refused {
		r.until = time.Now()
		s.refused[pod.Name] = r
	}
	s.scheduled[pod.Name] = true
	return true
}

func (s *podStream) counts() (scheduled, refused int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.scheduled), len(s.refused)
}

func (s *podStream) refusals() []refusal {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.refused))
}

// waitScheduled waits until more pods are scheduled.
func (s *podStream) waitScheduled(more int) {
	s.c.t.Helper()
	before, _ := s.counts()
	harness.Eventually(s.c.t, time.Minute, "pods are scheduled", func() string {
		if now, refused := s.counts(); now-before < more {
			return fmt.Sprintf("%d, want %d; %d were found unschedulable", now-before, more, refused)
		}
		return ""
	})
}

// waitRefused waits until the scheduler has found a pod unschedulable because the driver is
// missing.
func (s *podStream) waitRefused() {
	s.c.t.Helper()
	want := scheduledDriver + " CSI driver is not installed on the node"
	harness.Eventually(s.c.t, time.Minute, "a pod is found unschedulable without the driver", func() string {
		for _, r := range s.refusals() {
			if strings.Contains(r.message, want) {
				return ""
			}
		}
		return fmt.Sprintf("%v", s.refusals())
	})
}

// While pods that need the driver are created continuously, the daemon is restarted and killed: the
// scheduler never misses the driver.
func TestNoPodIsUnschedulableWhileTheDaemonRestarts(t *testing.T) {
	c, _ := startScheduled(t)
	m := c.n.Manager()
	daemon := m.StartDaemon()
	daemon.WaitState(scheduledDriver, "registered", time.Minute)
	before := c.csiNode()
	pods := c.startPods()
	pods.waitScheduled(podsPerRestart)
	began := time.Now()
	for i := range restarts {
		sig := syscall.SIGTERM
		if i%2 == 1 {
			sig = syscall.SIGKILL
		}
		daemon = m.Restart(daemon, sig)
		daemon.WaitState(scheduledDriver, "registered", time.Minute)
		pods.waitScheduled(podsPerRestart)
	}
	scheduled, _ := pods.counts()
	for _, r := range pods.refusals() {
		t.Errorf("a pod was found unschedulable: %s", r.message)
	}
	if now := c.csiNode(); now.ResourceVersion != before.ResourceVersion {
		t.Errorf("the CSINode was written: version %s, was %s", now.ResourceVersion, before.ResourceVersion)
	}
	t.Logf("%d restarts in %v, %d pods scheduled, CSINode's version is %s as before",
		restarts, time.Since(began).Round(time.Second), scheduled, before.ResourceVersion)

	// The test can fail: a driver that is registered again is missing for a moment.
	if _, stderr, code := c.n.RunCommand("reregister", scheduledDriver, "--config-root", c.n.Etc); code != 0 {
		t.Fatalf("reregister: %d %s", code, stderr)
	}
	pods.waitRefused()
}
