package repotest

import (
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"csi-registrar/internal/test/pages"
)

// TestCommandsOfPages checks that each command in a page is typed by a test or is listed with the
// reason why it is not, and that the lists have nothing else.
func TestCommandsOfPages(t *testing.T) {
	found, err := filepath.Glob(filepath.Join(top, "packaging/doc/*.md"))
	if err != nil || len(found) < 10 {
		t.Fatalf("cannot find the pages: %q %v", found, err)
	}
	sections, listed := map[string]bool{}, map[pages.Untyped]bool{}
	for _, path := range append(found, filepath.Join(top, "README.md")) {
		blocks, err := pages.Read("", path)
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range blocks {
			section := b.Page + "#" + b.Section
			sections[section] = sections[section] || len(b.Commands())+len(b.Files()) > 0
			for _, c := range b.Commands() {
				u, ok := pages.Listed(section, c.Text)
				listed[u] = true
				if pages.Typed[section] == "" && !ok {
					t.Errorf("%s: no test types %q, and internal/test/pages has no reason for that", section, c.Text)
				}
			}
		}
	}
	tests := testNames(t)
	for section, test := range pages.Typed {
		if !sections[section] {
			t.Errorf("%s has no command", section)
		}
		if !tests[test] {
			t.Errorf("%s: there is no %s", section, test)
		}
	}
	for _, u := range pages.NotTyped {
		if !listed[u] {
			t.Errorf("%s has no command that begins with %q, or an earlier entry has it", u.Place, u.Text)
		}
		for word := range strings.FieldsSeq(u.Why) {
			if name := strings.Trim(word, ",:;."); strings.HasPrefix(name, "Test") && !tests[name] {
				t.Errorf("%s: there is no %s", u.Place, name)
			}
		}
	}
}

// TestPagesCanBeSkimmed limits the words of the pages, without findings.md, which is only looked
// up, and of the manual pages, the width of lines that are not code, and the length of a table's
// cell.
func TestPagesCanBeSkimmed(t *testing.T) {
	for limit, patterns := range map[int][]string{
		18_000: {"README.md", "SECURITY.md", "packaging/config.toml", "packaging/doc/*.md"},
		9_325:  {"packaging/man/*"},
	} {
		words := 0
		for name, text := range texts(t, patterns...) {
			if filepath.Base(name) != "findings.md" {
				words += len(strings.Fields(text))
			}
		}
		if words > limit {
			t.Errorf("%q have %d words, the limit is %d", patterns, words, limit)
		}
	}
	for name, text := range texts(t, "*.md", "packaging/doc/*.md") {
		if filepath.Base(name) != "CHANGELOG.md" {
			checkWidth(t, name, text)
		}
	}
}

// texts returns the contents of the files that match the patterns, and their names.
func texts(t *testing.T, patterns ...string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, pattern := range patterns {
		files, err := filepath.Glob(filepath.Join(top, pattern))
		if err != nil || len(files) == 0 {
			t.Fatalf("there is no %s: %v", pattern, err)
		}
		for _, file := range files {
			all[strings.TrimPrefix(file, top)] = read(t, strings.TrimPrefix(file, top))
		}
	}
	return all
}

// checkWidth checks the lines of a page.
func checkWidth(t *testing.T, page, text string) {
	code := false
	for i, line := range strings.Split(text, "\n") {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			code = !code
		}
		switch {
		case code || strings.HasPrefix(line, "    "):
		case strings.HasPrefix(line, "|"):
			for cell := range strings.SplitSeq(line, "|") {
				if n := utf8.RuneCountInString(strings.TrimSpace(cell)); n > 160 {
					t.Errorf("%s:%d: a cell has %d characters, the limit is 160", page, i+1, n)
				}
			}
		case utf8.RuneCountInString(line) > 120:
			t.Errorf("%s:%d is wider than 120 columns", page, i+1)
		}
	}
}
