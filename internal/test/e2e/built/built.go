// Package built gives tests the programs as they are shipped.
package built

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
)

// Registrar returns the path of csi-registrar: $CSI_REGISTRAR_BIN if it is set, else the output of
// scripts/build.
func Registrar(t testing.TB) string {
	t.Helper()
	path := os.Getenv("CSI_REGISTRAR_BIN")
	if path == "" {
		return program(t, "csi-registrar")
	}
	path, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// SampleDriver returns the path of csi-sample-driver, as built by scripts/build.
func SampleDriver(t testing.TB) string {
	t.Helper()
	return program(t, "csi-sample-driver")
}

// Command builds a command of internal/test/e2e/cmd for this test and returns its path. It is
// static, because another machine's C library may be older than this one's, and an image may have
// none.
func Command(t testing.TB, name string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", path, "./cmd/"+name)
	cmd.Dir = filepath.Join(Root(t), "internal", "test", "e2e")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cannot build cmd/%s: %v\n%s", name, err, out)
	}
	return path
}

func program(t testing.TB, name string) string {
	t.Helper()
	root := Root(t)
	if err := build(root); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(root, "bin", name)
}

var once struct {
	sync.Once
	err error
}

// build builds the programs in bin, once per process. Several processes may do so at once: the
// script moves the finished programs into place.
func build(root string) error {
	once.Do(func() {
		if out, err := exec.Command(filepath.Join(root, "scripts", "build")).CombinedOutput(); err != nil {
			once.err = fmt.Errorf("scripts/build: %w\n%s", err, out)
		}
	})
	return once.err
}

// Packages returns a directory with the deb packages of this tree, built as the given version once
// per process. The package that calls it has Main as its TestMain.
func Packages(t testing.TB, version string) string {
	t.Helper()
	root := Root(t)
	packages.Lock()
	defer packages.Unlock()
	if dir, ok := packages.dirs[version]; ok {
		return dir
	}
	dir, err := os.MkdirTemp("", "packages")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(root, "scripts", "packages"))
	cmd.Env = append(os.Environ(), "DIST="+dir, "VERSION="+version, "ARCHS="+runtime.GOARCH, "FORMATS=deb")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("scripts/packages: %v\n%s", errors.Join(err, os.RemoveAll(dir)), out)
	}
	if packages.dirs == nil {
		packages.dirs = map[string]string{}
	}
	packages.dirs[version] = dir
	return dir
}

var packages struct {
	sync.Mutex
	dirs map[string]string // by version
}

// Main is the TestMain of a package that uses Packages.
func Main(m *testing.M) {
	code := m.Run()
	for _, dir := range packages.dirs {
		if err := os.RemoveAll(dir); err != nil {
			fmt.Fprintln(os.Stderr, "cannot remove the packages:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// Root returns the directory of module csi-registrar, above the test's own.
func Root(t testing.TB) string {
	t.Helper()
	root, err := root()
	if err != nil {
		t.Fatal(err)
	}
	return root
}

func root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "scripts", "build")); err == nil {
			return dir, nil
		}
	}
	return "", errors.New("cannot find scripts/build above the test")
}
