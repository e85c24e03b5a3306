package node_test

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cluster-bootstrap/token/jws"

	"csi-registrar/internal/test/e2e/controlplane"
	"csi-registrar/internal/test/e2e/node"
)

const (
	tokenID, tokenSecret = "abcdef", "0123456789abcdef"

	drivers = 6 // in all

	// clusterConfig is what `kubeadm init` would be given. The kubelet's part is as elsewhere in
	// this suite, for a container.
	clusterConfig = `apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
bootstrapTokens: [{token: ` + tokenID + "." + tokenSecret + `}]
localAPIEndpoint: {advertiseAddress: 10.0.0.1}
nodeRegistration: {criSocket: "` + criSocket + `"}
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: %s
controlPlaneEndpoint: 127.0.0.1:` + controlplane.Port + `
---
%s`
	criSocket = "unix:///run/containerd/containerd.sock"

	// The drop-in of kubeadm's package.
	kubeadmDropIn = `[Service]
Environment="KUBELET_KUBECONFIG_ARGS=--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf"
Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml"
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
ExecStart=
ExecStart=/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS
RestartSec=10
`
)

// TestKubeadm resets a node and joins it again, with the real kubeadm, while the daemon and drivers
// run: kubeadm finds nothing in its way, and all drivers are registered again without another
// command.
func TestKubeadm(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t)
	n := node.New(t, "trixie", "--client-ca-file="+ca.file, "--enable-bootstrap-token-auth", "--authorization-mode=Node,RBAC")
	n.Args = append(n.Args, "--bind-ro="+controlplane.Binary(t)+":/usr/bin/kubeadm")
	n.Chroot("ln", "-s", node.KubeletPath, "/usr/bin/kubelet") // which kubeadm asks for its version
	n.Write("/usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf", kubeadmDropIn)
	n.Install(newer, "csi-registrar", "csi-sample-driver")
	n.Write("/usr/lib/systemd/system/csi-many@.service", manyUnit)
	enable := []string{"systemctl", "enable"}
	for i := 1; i < drivers; i++ {
		n.Write(fmt.Sprintf("/etc/csi-registrar/conf.d/%d.toml", i), fmt.Sprintf("[driver.\"d%d.example\"]\nsocket = \"/run/csi-many-%d/csi.sock\"\n", i, i))
		enable = append(enable, fmt.Sprintf("csi-many@%d.service", i))
	}
	n.Chroot(enable...)
	k := &kubeadmNode{&stage{Node: n, t: t}}
	k.Boot()
	k.init()
	signing := make(chan struct{})
	ctx, stop := context.WithCancel(t.Context())
	defer func() { stop(); <-signing }()
	go func() { defer close(signing); ca.sign(ctx, t, n.Cluster) }()

	k.join()
	k.CreateVolume(passing)
	k.left = k.ours()
	k.check()

	k.reset()
	k.join()
	k.check()
}

// kubeadmNode is a node that kubeadm joins to the control plane.
type kubeadmNode struct{ *stage }

// init creates the objects of `kubeadm init` in the API server, and takes the part of the
// controller manager's signer.
func (k *kubeadmNode) init() {
	k.t.Helper()
	version, err := k.Cluster.API.ServerVersion()
	if err != nil {
		k.t.Fatal(err)
	}
	// kubeadm waits for the health port, and omits what is empty.
	kubelet := strings.NewReplacer("healthzPort: 0\n", "", "enforceNodeAllocatable: []", "enforceNodeAllocatable: [none]").Replace(k.Read(node.KubeletConfigPath))
	k.Write("/root/cluster.yaml", fmt.Sprintf(clusterConfig, version.GitVersion, kubelet))
	k.Write("/root/admin.conf", strings.Replace(k.Cluster.Kubeconfig(), "insecure-skip-tls-verify: true",
		"certificate-authority-data: "+base64.StdEncoding.EncodeToString(k.Cluster.CA()), 1))
	for _, phase := range []string{"upload-config all", "bootstrap-token"} {
		k.Run("sh", "-ec", "kubeadm init phase "+phase+" --config /root/cluster.yaml --kubeconfig /root/admin.conf")
	}
	maps := k.Cluster.API.CoreV1().ConfigMaps(metav1.NamespacePublic)
	info, err := maps.Get(k.t.Context(), "cluster-info", metav1.GetOptions{})
	if err != nil {
		k.t.Fatal(err)
	}
	if info.Data["jws-kubeconfig-"+tokenID], err = jws.ComputeDetachedSignature(info.Data["kubeconfig"], tokenID, tokenSecret); err != nil {
		k.t.Fatal(err)
	}
	if _, err := maps.Update(k.t.Context(), info, metav1.UpdateOptions{}); err != nil {
		k.t.Fatal(err)
	}
}

// join joins the node to the cluster, and waits until all drivers are registered.
func (k *kubeadmNode) join() {
	k.t.Helper()
	k.kubeadm("join 127.0.0.1:" + controlplane.Port + " --token " + tokenID + "." + tokenSecret +
		" --discovery-token-unsafe-skip-ca-verification --ignore-preflight-errors=SystemVerification,FileContent--proc-sys-net-ipv4-ip_forward")
	joined := time.Now()
	k.KubeletHealthy()
	k.Registered()
	k.t.Logf("all drivers are registered %s after kubeadm join", time.Since(joined).Round(10*time.Millisecond))
}

// reset removes the node from the cluster: its files with kubeadm, and its objects as the
// administrator and the controller manager do.
func (k *kubeadmNode) reset() {
	k.t.Helper()
	out := k.kubeadm("reset --force --cri-socket " + criSocket + " && echo left: && find /var/lib/kubelet -mindepth 1")
	if strings.Contains(out, "ailed to") || !strings.HasSuffix(out, "left:\n") {
		k.t.Errorf("kubeadm reset could not remove everything:\n%s", out)
	}
	now := int64(0)
	for what, err := range map[string]error{
		"Node":    k.Cluster.API.CoreV1().Nodes().Delete(k.t.Context(), node.Name, metav1.DeleteOptions{}),
		"CSINode": k.Cluster.API.StorageV1().CSINodes().Delete(k.t.Context(), node.Name, metav1.DeleteOptions{}),
		"pod":     k.Cluster.API.CoreV1().Pods(metav1.NamespaceDefault).Delete(k.t.Context(), passing, metav1.DeleteOptions{GracePeriodSeconds: &now}),
	} {
		if err != nil {
			k.t.Errorf("cannot delete the %s: %v", what, err)
		}
	}
}

// kubeadm runs a command of kubeadm, which may take minutes on a busy machine, and returns its
// output.
func (k *kubeadmNode) kubeadm(command string) string {
	k.t.Helper()
	const log = "/var/log/kubeadm"
	cmd := k.Start("sh", "-c", "{ kubeadm "+command+"; } >"+log+" 2>&1")
	err := cmd.Wait()
	out := k.Read(log)
	if err != nil {
		k.t.Fatalf("kubeadm %s: %v\n%s\n%s", command, err, out, k.Journal("-u", "kubelet.service", "-n", "50"))
	}
	return out
}

// check checks that the drivers are in the CSINode, that a pod gets its volume, and that nothing
// else is left.
func (k *kubeadmNode) check() {
	k.t.Helper()
	k.Eventually(soon, "all drivers in the CSINode", func() error {
		csiNode, err := k.Cluster.API.StorageV1().CSINodes().Get(k.t.Context(), node.Name, metav1.GetOptions{})
		if err != nil || len(csiNode.Spec.Drivers) != drivers {
			return fmt.Errorf("%v %w", csiNode, err)
		}
		return nil
	})
	k.CreatePod(node.Writer(passing, passing))
	k.Running(passing)
	if now := k.ours(); !slices.Equal(now, k.left) {
		k.t.Errorf("of ours there is\n%s\nwant\n%s", strings.Join(now, "\n"), strings.Join(k.left, "\n"))
	}
	k.Run("csi-registrar", "doctor")
	pid := k.show(unit, "MainPID")
	for _, forbidden := range []string{"echo >>/var/lib/kubelet/config.yaml", "cat /var/lib/kubelet/pki/kubelet-client-current.pem", "cat /etc/kubernetes/kubelet.conf"} {
		if out, err := k.Try("nsenter", "-t", pid, "-m", "sh", "-c", forbidden); err == nil {
			k.t.Errorf("in the daemon's sandbox one can %s: %s", forbidden, out)
		}
	}
}

// authority signs certificates of kubelets, as the controller manager does.
type authority struct {
	file string
	key  *rsa.PrivateKey
	cert *x509.Certificate
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{file: filepath.Join(t.TempDir(), "ca.crt"), key: key, cert: &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"}, NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}}
	if err := os.WriteFile(a.file, a.certificate(t, a.cert, key.Public()), 0o644); err != nil {
		t.Fatal(err)
	}
	return a
}

func (a *authority) certificate(t *testing.T, template *x509.Certificate, key any) []byte {
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key, a.key)
	if err != nil {
		t.Error(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// sign approves and signs all requests of kubelets until ctx is done.
func (a *authority) sign(ctx context.Context, t *testing.T, c *controlplane.ControlPlane) {
	requests := c.API.CertificatesV1().CertificateSigningRequests()
	for ctx.Err() == nil {
		list, err := requests.List(ctx, metav1.ListOptions{FieldSelector: "spec.signerName=" + certificatesv1.KubeAPIServerClientKubeletSignerName})
		for i := range list.Items {
			r := &list.Items[i]
			if err != nil || len(r.Status.Certificate) > 0 {
				continue
			}
			r.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Test"}}
			if r, err = requests.UpdateApproval(ctx, r.Name, r, metav1.UpdateOptions{}); err != nil {
				continue
			}
			block, _ := pem.Decode(r.Spec.Request)
			request, parseErr := x509.ParseCertificateRequest(block.Bytes)
			if parseErr != nil {
				t.Error(parseErr)
				return
			}
			r.Status.Certificate = a.certificate(t, &x509.Certificate{
				SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: request.Subject, NotAfter: a.cert.NotAfter,
				KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
			}, request.PublicKey)
			_, err = requests.UpdateStatus(ctx, r, metav1.UpdateOptions{})
		}
		if err != nil && ctx.Err() == nil {
			t.Error(err)
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
}
