package repotest

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestSecurityNamesItsTests checks that each promise of SECURITY.md names the tests that hold it,
// and that these exist.
func TestSecurityNamesItsTests(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(top, "SECURITY.md"))
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile(`\b(?:Test|Fuzz)[A-Z]\w*`)
	exists := testNames(t)
	for _, name := range named.FindAllString(string(text), -1) {
		if !exists[name] {
			t.Errorf("SECURITY.md names %s, which does not exist", name)
		}
	}
	promises := 0
	_, table, _ := strings.Cut(string(text), "| who | can reach | promised |\n|---|---|---|\n")
	for line := range strings.Lines(table) {
		cells := strings.Split(line, " | ")
		if len(cells) != 3 {
			break
		}
		for promise := range strings.SplitSeq(cells[2], "; ") {
			promises++
			if !named.MatchString(promise) {
				t.Errorf("no test holds the promise %q", promise)
			}
		}
	}
	if promises < 20 {
		t.Errorf("only %d promises were checked", promises)
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
