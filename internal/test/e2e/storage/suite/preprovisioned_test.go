package suite

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/gomega"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/kubernetes/test/e2e/framework"
	e2epod "k8s.io/kubernetes/test/e2e/framework/pod"
	e2evolume "k8s.io/kubernetes/test/e2e/framework/volume"
	storageframework "k8s.io/kubernetes/test/e2e/storage/framework"
	"k8s.io/kubernetes/test/e2e/storage/testsuites"
)

// preprovisioned makes the same tests run with volumes that an administrator has created.
// --storage.testdriver can only define drivers with a provisioner or inline volumes.
type preprovisioned struct {
	driver csi.ControllerClient
	info   storageframework.DriverInfo
}

var _ storageframework.PreprovisionedPVTestDriver = preprovisioned{}

func describePreprovisioned(socket string) error {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	p := preprovisioned{driver: csi.NewControllerClient(conn)} // connected until this process ends
	plugin, err := csi.NewIdentityClient(conn).GetPluginInfo(context.Background(), &csi.GetPluginInfoRequest{})
	if err != nil {
		return err
	}
	p.info = storageframework.DriverInfo{
		Name:               plugin.GetName(),
		SupportedSizeRange: e2evolume.SizeRange{Min: "1Mi"},
		SupportedFsType:    sets.NewString(""),
		Capabilities: map[storageframework.Capability]bool{
			storageframework.CapPersistence: true, storageframework.CapExec: true, storageframework.CapFsGroup: true,
			storageframework.CapMultiPODs: true, storageframework.CapSingleNodeVolume: true,
		},
	}
	framework.Describe("Pre-provisioned Storage", func() {
		storageframework.DefineTestSuites(p, testsuites.CSISuites)
	})
	return nil
}

func (p preprovisioned) GetDriverInfo() *storageframework.DriverInfo { return &p.info }

func (p preprovisioned) SkipUnsupportedTest(storageframework.TestPattern) string { return "" }

func (p preprovisioned) PrepareTest(_ context.Context, f *framework.Framework) *storageframework.PerTestConfig {
	return &storageframework.PerTestConfig{
		Driver: p, Prefix: "preprovisioned", Framework: f, ClientNodeSelection: e2epod.NodeSelection{},
	}
}

func (p preprovisioned) GetPersistentVolumeSource(readOnly bool, fsType string, v storageframework.TestVolume) (*corev1.PersistentVolumeSource, *corev1.VolumeNodeAffinity) {
	return &corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
		Driver: p.info.Name, VolumeHandle: v.(volume).id, ReadOnly: readOnly, FSType: fsType,
	}}, nil
}

type volume struct {
	driver csi.ControllerClient
	id     string
}

func (p preprovisioned) CreateVolume(ctx context.Context, _ *storageframework.PerTestConfig, _ storageframework.TestVolType) storageframework.TestVolume {
	ginkgo.GinkgoHelper()
	created, err := p.driver.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: "preprovisioned-" + string(uuid.NewUUID()),
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		}},
	})
	framework.ExpectNoError(err)
	return volume{p.driver, created.GetVolume().GetVolumeId()}
}

// DeleteVolume is called when no pod uses the volume any more, but it may still be staged.
func (v volume) DeleteVolume(ctx context.Context) {
	ginkgo.GinkgoHelper()
	gomega.Eventually(ctx, func(ctx context.Context) error {
		_, err := v.driver.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.id})
		return err
	}).WithTimeout(2 * time.Minute).WithPolling(time.Second).Should(gomega.Succeed())
}
