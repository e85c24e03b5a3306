package controlplane

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"csi-registrar/internal/test/e2e/built"
)

// Binary builds cmd/kubernetes (etcd, kube-apiserver, kubelet and kubeadm in one static program)
// and returns its path. Building takes minutes, so the program is kept in the user's cache
// directory.
func Binary(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(built.Root(t), "internal", "test", "e2e")
	binary.Do(func() { binary.path, binary.err = cachedBinary(dir) })
	if binary.err != nil {
		t.Fatal(binary.err)
	}
	return binary.path
}

var binary struct {
	sync.Once
	path string
	err  error
}

func cachedBinary(dir string) (string, error) {
	source, err := os.ReadFile(filepath.Join(dir, "cmd", "kubernetes", "main.go"))
	if err != nil {
		return "", err
	}
	list := exec.Command("go", "list", "-m", "-f", "{{.Path}}@{{.Version}}{{with .Replace}}@{{.Version}}{{end}}",
		"k8s.io/kubernetes", "go.etcd.io/etcd/server/v3", "google.golang.org/grpc")
	list.Dir = dir
	versions, err := list.Output()
	if err != nil {
		return "", fmt.Errorf("cannot list the versions of Kubernetes and etcd: %w", err)
	}
	_, version, _ := strings.Cut(strings.Fields(string(versions))[0], "@")
	cached, err := built.Cached("kubernetes-"+version, append(versions, source...), func(to string) error {
		// Static, because another machine's C library may be older than this one's. kubeadm
		// compares versions.
		build := exec.Command("go", "build", "-ldflags=-s -w -X k8s.io/component-base/version.gitVersion="+version, "-o", to, "./cmd/kubernetes")
		build.Dir = dir
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			return fmt.Errorf("cannot build Kubernetes: %w\n%s", err, out)
		}
		return nil
	})
	return filepath.Join(cached, "kubernetes"), err
}
