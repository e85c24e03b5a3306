package node

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"csi-registrar/internal/test/e2e/controlplane"
)

const namespace = metav1.NamespaceDefault

// WriterFile is the file in its volume that a pod of Writer writes to.
const WriterFile = "log"

// Client creates pods and volumes on the node of a control plane. Unless documented otherwise, an
// error fails the test.
type Client struct {
	Cluster *controlplane.ControlPlane

	t     testing.TB
	limit time.Duration
	node  string // its name
}

// NewClient returns a client that waits at most limit for actions of the node.
func NewClient(t testing.TB, cluster *controlplane.ControlPlane, limit time.Duration) *Client {
	return &Client{Cluster: cluster, t: t, limit: limit, node: Name}
}

// CreateVolume creates a volume of the sample driver in its package, see CreateVolumeOf.
func (n *Node) CreateVolume(name string) (handle string) {
	n.t.Helper()
	return n.CreateVolumeOf(Driver, DriverSocket, name)
}

// CreateVolumeOf creates a volume of a running sample driver with the given driver name, and a
// claim that is bound to it, as the provisioner and the controller manager would. It returns the
// volume handle.
func (n *Node) CreateVolumeOf(driver, socket, name string) (handle string) {
	n.t.Helper()
	handle = MakeVolume(n.t, n.Path(socket), name)
	n.BindVolume(driver, name, handle)
	return handle
}

// BindVolume creates the objects of a volume that the driver already has, and a claim of that name
// that is bound to it.
func (c *Client) BindVolume(driver, name, handle string) {
	c.t.Helper()
	c.createCSIDriver(driver)
	size := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")}
	modes := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	class := ""
	api := c.Cluster.API.CoreV1()
	claim, err := api.PersistentVolumeClaims(namespace).Create(c.ctx(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: modes, VolumeName: name, StorageClassName: &class,
			Resources: corev1.VolumeResourceRequirements{Requests: size},
		},
	}, metav1.CreateOptions{})
	c.must(err)
	volume, err := api.PersistentVolumes().Create(c.ctx(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes: modes, Capacity: size,
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			ClaimRef:                      &corev1.ObjectReference{Namespace: namespace, Name: name, UID: claim.UID},
			PersistentVolumeSource: corev1.PersistentVolumeSource{
				CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: handle},
			},
		},
	}, metav1.CreateOptions{})
	c.must(err)
	volume.Status.Phase = corev1.VolumeBound
	_, err = api.PersistentVolumes().UpdateStatus(c.ctx(), volume, metav1.UpdateOptions{})
	c.must(err)
	claim.Status.Phase, claim.Status.AccessModes, claim.Status.Capacity = corev1.ClaimBound, modes, size
	_, err = api.PersistentVolumeClaims(namespace).UpdateStatus(c.ctx(), claim, metav1.UpdateOptions{})
	c.must(err)
}

// MakeVolume makes the sample driver at a socket create a volume, and returns the volume handle.
func MakeVolume(t testing.TB, socket, name string) (handle string) {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	made, err := csi.NewControllerClient(conn).CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: name,
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		}},
	}, grpc.WaitForReady(true))
	if err != nil {
		t.Fatal(err)
	}
	return made.GetVolume().GetVolumeId()
}

func (c *Client) createCSIDriver(driver string) {
	c.t.Helper()
	no := false
	_, err := c.Cluster.API.StorageV1().CSIDrivers().Create(c.ctx(), &storagev1.CSIDriver{
		ObjectMeta: metav1.ObjectMeta{Name: driver},
		Spec:       storagev1.CSIDriverSpec{AttachRequired: &no},
	}, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		c.must(err)
	}
}

// Writer returns a pod that writes a line every 100 ms to the volume of a claim, see cmd/pod.
func Writer(name, claim string) *corev1.Pod {
	grace, no := int64(5), false
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
		Spec: corev1.PodSpec{
			NodeName: Name, HostNetwork: true, TerminationGracePeriodSeconds: &grace,
			AutomountServiceAccountToken: &no, EnableServiceLinks: &no,
			Volumes: []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim},
			}}},
			Containers: []corev1.Container{{
				Name: "writer", Image: Image, ImagePullPolicy: corev1.PullNever,
				Command:      []string{"/bin/pod", "write", "/v/" + WriterFile},
				VolumeMounts: []corev1.VolumeMount{{Name: "v", MountPath: "/v"}},
			}},
		},
	}
}

// LongestGap returns the longest time between two lines of a Writer, minus the delays that the
// machine caused.
func LongestGap(lines []string) (time.Duration, error) {
	var worst, last int64
	for i, line := range lines {
		at, stall, ok := strings.Cut(line, " ")
		a, err1 := strconv.ParseInt(at, 10, 64)
		b, err2 := strconv.ParseInt(stall, 10, 64)
		if !ok || err1 != nil || err2 != nil {
			return 0, fmt.Errorf("line %q", line)
		}
		if i > 0 {
			worst = max(worst, a-last-b-100)
		}
		last = a
	}
	return time.Duration(worst) * time.Millisecond, nil
}

// CreatePod creates a pod.
func (c *Client) CreatePod(pod *corev1.Pod) {
	c.t.Helper()
	_, err := c.Cluster.API.CoreV1().Pods(namespace).Create(c.ctx(), pod, metav1.CreateOptions{})
	c.must(err)
}

// Pod returns a pod, or nil if it does not exist.
func (c *Client) Pod(name string) *corev1.Pod {
	c.t.Helper()
	pod, err := c.Cluster.API.CoreV1().Pods(namespace).Get(c.ctx(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	c.must(err)
	return pod
}

// Running waits until the containers of a pod are ready, and returns the pod.
func (c *Client) Running(name string) *corev1.Pod {
	c.t.Helper()
	var pod *corev1.Pod
	controlplane.Eventually(c.t, c.limit, "pod "+name+" to be Ready", func() error {
		if pod = c.Pod(name); pod == nil {
			return fmt.Errorf("there is none")
		}
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("%s: %+v\nevents: %s", pod.Status.Phase, pod.Status, c.events(name))
	})
	return pod
}

// DeletePod deletes a pod and waits until it is gone, which is after its volumes were unpublished.
func (c *Client) DeletePod(name string) {
	c.t.Helper()
	c.must(c.Cluster.API.CoreV1().Pods(namespace).Delete(c.ctx(), name, metav1.DeleteOptions{}))
	c.Gone(name)
}

// Gone waits until a pod does not exist.
func (c *Client) Gone(name string) {
	c.t.Helper()
	controlplane.Eventually(c.t, c.limit, "pod "+name+" to be gone", func() error {
		if pod := c.Pod(name); pod != nil {
			return fmt.Errorf("%+v\nevents: %s", pod.Status, c.events(name))
		}
		return nil
	})
}

// events returns the Event objects of a pod.
func (c *Client) events(name string) string {
	list, err := c.Cluster.API.CoreV1().Events(namespace).List(c.ctx(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + name})
	if err != nil {
		return err.Error()
	}
	all := ""
	for _, e := range list.Items {
		all += fmt.Sprintf("\n%s %s x%d: %s", e.LastTimestamp.Format(time.TimeOnly), e.Reason, e.Count, e.Message)
	}
	return all
}

// Each request has its own time limit.
func (c *Client) ctx() context.Context { return context.Background() }

func (c *Client) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}
