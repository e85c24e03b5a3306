// Package controlplane runs etcd and the API server as Kubernetes builds them, for tests, in a
// network namespace of their own; kubelets are started beside them, see package node.
package controlplane

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"csi-registrar/internal/test/e2e/child"
	"csi-registrar/internal/test/fake"
)

// Port is the API server's port at 127.0.0.1 in the namespace.
const Port = "6443"

const (
	server = "127.0.0.1:" + Port
	etcd   = "http://127.0.0.1:2379"
	peers  = "http://127.0.0.1:2380"
	token  = "a-token-in-a-namespace-of-its-own-" // the user's name is appended
	// Generous, for machines under load.
	startLimit = 2 * time.Minute
)

// The users. With RBAC the admin may do everything; the others have their usual roles and those
// that a test adds. The kubelet's node is called node.
const (
	Admin               = "admin"
	Kubelet             = "system:node:node"
	Scheduler           = "system:kube-scheduler"
	NodeProblemDetector = "system:serviceaccount:kube-system:node-problem-detector"
)

// groups are the groups of the users.
var groups = map[string]string{
	Admin: "system:masters", Kubelet: "system:nodes", Scheduler: "components", NodeProblemDetector: "system:serviceaccounts",
}

// ControlPlane is etcd and an API server, without scheduler, controllers (but see Start) and nodes.
// Unless the flags say otherwise, the API server allows everything to every user.
type ControlPlane struct {
	*Network
	API *kubernetes.Clientset

	t         testing.TB
	dir       string
	apiserver *process
	flags     []string
}

// New starts a control plane, with additional flags of the API server, and waits until it is ready.
// It ends with the test.
func New(t testing.TB, flags ...string) *ControlPlane {
	t.Helper()
	Binary(t) // first, because it may take minutes
	dir, err := os.MkdirTemp("", "controlplane")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if !slices.ContainsFunc(flags, func(f string) bool { return strings.HasPrefix(f, "--authorization-mode=") }) {
		flags = append(flags, "--authorization-mode=AlwaysAllow")
	}
	c := &ControlPlane{Network: NewNetwork(t), t: t, dir: dir, flags: flags}
	tokens := ""
	for user, group := range groups {
		tokens += fmt.Sprintf("%s%s,%[2]s,%[2]s,%s\n", token, user, group)
	}
	if err := os.WriteFile(c.path("tokens.csv"), []byte(tokens), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(c.path("sa.pem"), newKey(t), 0o600); err != nil {
		t.Fatal(err)
	}
	c.start("etcd", c.path("etcd"), etcd, peers)
	if c.API, err = kubernetes.NewForConfig(c.Config(Admin)); err != nil {
		t.Fatal(err)
	}
	c.StartAPIServer()
	return c
}

// Config returns a user's client configuration.
func (c *ControlPlane) Config(user string) *rest.Config {
	return &rest.Config{
		Host: "https://" + server, BearerToken: token + user, TLSClientConfig: rest.TLSClientConfig{Insecure: true},
		QPS: 100, Burst: 100, Dial: c.Dial, Timeout: time.Minute,
	}
}

// CA returns the certificates of the API server.
func (c *ControlPlane) CA() []byte {
	c.t.Helper()
	b, err := os.ReadFile(c.path("certs/apiserver.crt"))
	if err != nil {
		c.t.Fatal(err)
	}
	return b
}

func (c *ControlPlane) path(name string) string { return filepath.Join(c.dir, name) }

func newKey(t testing.TB) []byte {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
}

// StartAPIServer starts the API server and waits until it is ready.
func (c *ControlPlane) StartAPIServer() {
	c.t.Helper()
	c.apiserver = c.start("kube-apiserver", append([]string{
		"--etcd-servers", etcd, "--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1", "--secure-port", Port,
		"--cert-dir", c.path("certs"), "--token-auth-file", c.path("tokens.csv"),
		"--allow-privileged", "--disable-admission-plugins", "ServiceAccount,TaintNodesByCondition",
		"--endpoint-reconciler-type", "none",
		"--kubelet-preferred-address-types", "InternalIP", // nobody resolves the node's name
		"--service-account-issuer", "https://test", "--service-account-key-file", c.path("sa.pem"),
		"--service-account-signing-key-file", c.path("sa.pem"), "--service-cluster-ip-range", "10.0.0.0/24",
	}, c.flags...)...)
	Eventually(c.t, startLimit, "the API server to be ready", func() error {
		if !c.apiserver.running() {
			c.t.Fatalf("the API server ended: %v", c.apiserver.cmd.ProcessState)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_, err := c.API.RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		return err
	})
}

// StopAPIServer kills the API server. Its data is in etcd.
func (c *ControlPlane) StopAPIServer() {
	c.t.Helper()
	c.apiserver.kill()
}

// Kubeconfig returns the path of the admin's kubeconfig for processes in the network namespace.
func (c *ControlPlane) Kubeconfig() string { return c.KubeconfigOf(Admin) }

// KubeconfigOf is Kubeconfig for another user.
func (c *ControlPlane) KubeconfigOf(user string) string { return c.KubeconfigAt(user, server) }

// KubeconfigAt returns the path of a user's kubeconfig with another address of the API server.
func (c *ControlPlane) KubeconfigAt(user, address string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://%s", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: %q}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, address, token+user)
}

// Eventually tries until check finds nothing wrong, and fails the test with the last thing that it
// found.
func Eventually(t testing.TB, limit time.Duration, what string, check func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited %s for %s: %v", limit, what, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// process is a child process. It is always waited for.
type process struct {
	cmd    *exec.Cmd
	output fake.Buffer
	ended  <-chan struct{}
}

// start starts cmd/kubernetes in one of its roles.
func (c *ControlPlane) start(role string, args ...string) *process {
	c.t.Helper()
	return c.startCommand(role, c.Command(append([]string{Binary(c.t), role}, args...)...))
}

// Start starts a command that Command returned. It ends with the test.
func (c *ControlPlane) Start(name string, cmd *exec.Cmd) {
	c.t.Helper()
	c.startCommand(name, cmd)
}

func (c *ControlPlane) startCommand(name string, cmd *exec.Cmd) *process {
	c.t.Helper()
	p := &process{cmd: cmd}
	p.cmd.Stdout, p.cmd.Stderr = &p.output, &p.output
	var err error
	if p.ended, err = child.Start(p.cmd, syscall.SIGKILL); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		p.kill()
		if c.t.Failed() {
			b := p.output.String()
			c.t.Logf("the end of the log of %s\n%s", name, b[max(0, len(b)-4000):])
		}
	})
	return p
}

func (p *process) running() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

func (p *process) kill() {
	if p.running() {
		_ = p.cmd.Process.Kill() // it may have ended meanwhile
	}
	<-p.ended
}
