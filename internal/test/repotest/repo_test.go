// Package repotest tests the repository: the agreement of documentation and code, imports, linked
// modules, and budgets of the packaged program.
package repotest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// top is the module's directory, relative to this one.
const top = "../../.."

func TestMain(m *testing.M) {
	os.Exit(tests(m))
}

func tests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "repotest")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Setenv("TMPDIR", dir); err != nil {
		panic(err)
	}
	return m.Run()
}

// built builds the packaged programs once. The log has the dependencies that the linker found.
var built = sync.OnceValues(func() (log string, err error) {
	build := exec.Command("scripts/build", "", os.TempDir())
	build.Dir = top
	build.Env = append(os.Environ(), "LDFLAGS=-dumpdep")
	out, err := build.CombinedOutput()
	return string(out), err
})

// program returns the path of the packaged program and the log of the linker.
func program(t *testing.T) (path, log string) {
	t.Helper()
	log, err := built()
	if err != nil {
		t.Fatalf("scripts/build: %v\n%s", err, log)
	}
	return filepath.Join(os.TempDir(), "csi-registrar"), log
}

// unroff returns the text of a manual page with unescaped dashes.
func unroff(t *testing.T, page string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "..", "packaging", "man", page))
	if err != nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(string(b), `\-`, "-")
}
