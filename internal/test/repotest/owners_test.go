package repotest

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestOwnersExist checks that the tests that own a promise, in the README of the tests, exist.
func TestOwnersExist(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(top, "internal", "test", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	exists := testNames(t)
	named := regexp.MustCompile(`\bTest[A-Z]\w*`).FindAllString(string(text), -1)
	for _, name := range named {
		if !exists[name] {
			t.Errorf("the README names %s, which does not exist", name)
		}
	}
	if len(named) < 20 {
		t.Errorf("only %d tests are named", len(named))
	}
}

// testNames returns the names of all tests in the repository.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	names := map[string]bool{}
	err := filepath.WalkDir(filepath.Join(top, "internal"), func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, found := range declared.FindAllStringSubmatch(string(text), -1) {
			names[found[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}
