// Package built gives tests the programs as they are shipped.
package built

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// Registrar is the path of csi-registrar: the file that CSI_REGISTRAR_BIN names, else what
// scripts/build makes.
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

// SampleDriver is the path of csi-sample-driver, as scripts/build makes it.
func SampleDriver(t testing.TB) string {
	t.Helper()
	return program(t, "csi-sample-driver")
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

// build makes the programs in bin, once in a process. Several processes may do so at once:
// the script moves what it made into place.
func build(root string) error {
	once.Do(func() {
		if out, err := exec.Command(filepath.Join(root, "scripts", "build")).CombinedOutput(); err != nil {
			once.err = fmt.Errorf("scripts/build: %w\n%s", err, out)
		}
	})
	return once.err
}

// Root is the directory of module csi-registrar, above the test's own.
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
