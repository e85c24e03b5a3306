package controlplane

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/e2e/built"
)

// Binary is the path of cmd/kubernetes, built: etcd, kube-apiserver and kubelet in one static
// program. To build it takes minutes, so that it is kept in the user's cache directory, a file for
// each version of what it is made of.
func Binary(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(built.Root(t), "internal", "e2e")
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
	// The name says to people which Kubernetes it is, and the sum is what counts.
	sum := sha256.Sum256(fmt.Append(nil, runtime.Version(), runtime.GOARCH, string(versions), string(source)))
	_, version, _ := strings.Cut(strings.Fields(string(versions))[0], "@")
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	cache = filepath.Join(cache, "csi-registrar", "kubernetes")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	path := filepath.Join(cache, fmt.Sprintf("%s-%x", version, sum[:6]))

	lock, err := os.Create(filepath.Join(cache, ".lock"))
	if err != nil {
		return "", err
	}
	defer lock.Close() // with which the lock ends
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", err
	}
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	// Static, for the C library of a machine may be older than this one's.
	build := exec.Command("go", "build", "-ldflags=-s -w", "-o", path+".new", "./cmd/kubernetes")
	build.Dir = dir
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("cannot build Kubernetes: %w\n%s", err, out)
	}
	return path, os.Rename(path+".new", path)
}
