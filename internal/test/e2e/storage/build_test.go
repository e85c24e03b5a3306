package storage_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"csi-registrar/internal/test/e2e/built"
)

// programs returns a directory with the tests, storage.test, and the other programs that they need:
// the tools of the two modules below this directory. Building them takes minutes.
func programs(t *testing.T) string {
	t.Helper()
	var key []byte
	for _, pattern := range []string{"suite/*", "sidecars/*"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(files), err)
		}
		for _, file := range files {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			key = append(key, b...)
		}
	}
	dir, err := built.Cached("storage-tests", key, func(dir string) error {
		t.Log("building Kubernetes' storage tests, controllers and sidecars")
		for _, build := range []struct {
			module string
			args   []string
		}{
			{"suite", []string{"test", "-c", "-o", filepath.Join(dir, "storage.test"), "."}},
			{"suite", []string{"build", "-o", dir + "/", "tool"}},
			{"sidecars", []string{"build", "-o", dir + "/", "tool"}},
		} {
			cmd := exec.Command("go", append([]string{build.args[0], "-ldflags=-s -w"}, build.args[1:]...)...)
			cmd.Dir = build.module
			cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
			if out, err := cmd.CombinedOutput(); err != nil {
				return fmt.Errorf("go %q in %s: %w\n%s", build.args, build.module, err, out)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return dir
}
