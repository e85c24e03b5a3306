package node

import (
	"context"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const namespace = metav1.NamespaceDefault

// WriterFile is the file in its volume that a pod of Writer writes to.
const WriterFile = "log"

// CreateVolume makes a volume of the sample driver's package, see CreateVolumeOf.
func (n *Node) CreateVolume(name string) (handle string) {
	n.t.Helper()
	return n.CreateVolumeOf(Driver, DriverSocket, name)
}

// CreateVolumeOf makes a volume of a driver that is a sample driver, which must run, and a claim of that
// name bound to it, as the provisioner and the controller manager would. It returns the volume's handle.
func (n *Node) CreateVolumeOf(driver, socket, name string) (handle string) {
	n.t.Helper()
	handle = n.driverVolume(socket, name)
	n.createCSIDriver(driver)
	size := corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")}
	modes := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
	class := ""
	api := n.Cluster.API.CoreV1()
	claim, err := api.PersistentVolumeClaims(namespace).Create(n.ctx(), &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: modes, VolumeName: name, StorageClassName: &class,
			Resources: corev1.VolumeResourceRequirements{Requests: size},
		},
	}, metav1.CreateOptions{})
	n.must(err)
	volume, err := api.PersistentVolumes().Create(n.ctx(), &corev1.PersistentVolume{
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
	n.must(err)
	volume.Status.Phase = corev1.VolumeBound
	_, err = api.PersistentVolumes().UpdateStatus(n.ctx(), volume, metav1.UpdateOptions{})
	n.must(err)
	claim.Status.Phase, claim.Status.AccessModes, claim.Status.Capacity = corev1.ClaimBound, modes, size
	_, err = api.PersistentVolumeClaims(namespace).UpdateStatus(n.ctx(), claim, metav1.UpdateOptions{})
	n.must(err)
	return handle
}

// driverVolume has the driver make a volume, and returns its id.
func (n *Node) driverVolume(socket, name string) string {
	n.t.Helper()
	conn, err := grpc.NewClient("unix:"+n.Path(socket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	n.must(err)
	defer conn.Close()
	ctx, cancel := context.WithTimeout(n.ctx(), limit)
	defer cancel()
	made, err := csi.NewControllerClient(conn).CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: name,
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		}},
	}, grpc.WaitForReady(true))
	n.must(err)
	return made.GetVolume().GetVolumeId()
}

func (n *Node) createCSIDriver(driver string) {
	n.t.Helper()
	no := false
	_, err := n.Cluster.API.StorageV1().CSIDrivers().Create(n.ctx(), &storagev1.CSIDriver{
		ObjectMeta: metav1.ObjectMeta{Name: driver},
		Spec:       storagev1.CSIDriverSpec{AttachRequired: &no},
	}, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		n.must(err)
	}
}

// Writer is a pod that writes a line every 100 ms to the volume of a claim, see cmd/pod.
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

// CreatePod posts a pod.
func (n *Node) CreatePod(pod *corev1.Pod) {
	n.t.Helper()
	_, err := n.Cluster.API.CoreV1().Pods(namespace).Create(n.ctx(), pod, metav1.CreateOptions{})
	n.must(err)
}

// Pod asks for a pod; nil if there is none.
func (n *Node) Pod(name string) *corev1.Pod {
	n.t.Helper()
	pod, err := n.Cluster.API.CoreV1().Pods(namespace).Get(n.ctx(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	n.must(err)
	return pod
}

// Running waits until the containers of a pod are ready, and gives the pod.
func (n *Node) Running(name string) *corev1.Pod {
	n.t.Helper()
	var pod *corev1.Pod
	n.Eventually(limit, "pod "+name+" to be Ready", func() error {
		if pod = n.Pod(name); pod == nil {
			return fmt.Errorf("there is none")
		}
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("%s: %+v\nevents: %s", pod.Status.Phase, pod.Status, n.events(name))
	})
	return pod
}

// DeletePod deletes a pod and waits until it is gone, which it is when its volumes are unpublished.
func (n *Node) DeletePod(name string) {
	n.t.Helper()
	n.must(n.Cluster.API.CoreV1().Pods(namespace).Delete(n.ctx(), name, metav1.DeleteOptions{}))
	n.Gone(name)
}

// Gone waits until there is no pod of that name.
func (n *Node) Gone(name string) {
	n.t.Helper()
	n.Eventually(limit, "pod "+name+" to be gone", func() error {
		if pod := n.Pod(name); pod != nil {
			return fmt.Errorf("%+v\nevents: %s", pod.Status, n.events(name))
		}
		return nil
	})
}

// events are what was said of a pod.
func (n *Node) events(name string) string {
	list, err := n.Cluster.API.CoreV1().Events(namespace).List(n.ctx(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + name})
	if err != nil {
		return err.Error()
	}
	all := ""
	for _, e := range list.Items {
		all += fmt.Sprintf("\n%s %s x%d: %s", e.LastTimestamp.Format(time.TimeOnly), e.Reason, e.Count, e.Message)
	}
	return all
}

func (n *Node) ctx() context.Context { return context.Background() } // each request has a limit of its own

func (n *Node) must(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}
