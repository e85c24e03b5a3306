package systemd

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestCatalogIsComplete: each message ID that the code has is explained, and no other.
func TestCatalogIsComplete(t *testing.T) {
	used := map[string]string{}
	constant := regexp.MustCompile(`(?i)\bmessage\w+\s*=\s*"([0-9a-f]{32})"`)
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		code, err := os.ReadFile(path)
		for _, m := range constant.FindAllSubmatch(code, -1) {
			if other := used[string(m[1])]; other != "" {
				t.Errorf("%s is used in %s and in %s", m[1], other, path)
			}
			used[string(m[1])] = path
		}
		return err
	})
	if err != nil || len(used) == 0 {
		t.Fatal(len(used), err)
	}
	catalog, err := os.ReadFile("../../../packaging/csi-registrar.catalog")
	if err != nil {
		t.Fatal(err)
	}
	missing := maps.Clone(used)
	for _, entry := range strings.Split(string(catalog), "\n-- ")[1:] {
		id, rest, _ := strings.Cut(entry, "\n")
		if used[id] == "" {
			t.Errorf("%s is explained, and nobody uses it", id)
		}
		delete(missing, id)
		for _, part := range []string{"Subject: ", "Defined-By: csi-registrar\n", "Documentation: ", "\n\n"} {
			if !strings.Contains(rest, part) {
				t.Errorf("%s has no %q", id, part)
			}
		}
	}
	for id, path := range missing {
		t.Errorf("%s of %s is not explained", id, path)
	}
}
