package repotest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

var (
	quoteInPage = regexp.MustCompile("`([^`]+)`")
	// Placeholders in the page, and places where a message is composed of two texts.
	values = regexp.MustCompile(`…| \(there is no /run/csi-registrar/control\.sock|/run/x/csi\.sock|/run/x|"[ab]\.example"|NodeGetInfo|Probe|2m0s|5s|nobody \(uid 65534\)|\broot\b|DRIVER|process 4711 \(uid 0\)|no space left on device|, but `)
)

// TestTroubleshootingQuotesMessages checks that the messages in the page occur literally in the
// code, so that users can search the page for what they see.
func TestTroubleshootingQuotesMessages(t *testing.T) {
	page, err := os.ReadFile("../../../packaging/doc/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	said := strings.Join(literals(t, "../.."), "\x00")
	quotes := 0
	// The sections with our own messages, and in which column these are.
	for heading, column := range map[string]int{"From `csi-registrar status` and the journal": 2, "From csi-registrar, on the command line": 1} {
		_, section, found := strings.Cut(string(page), "## "+heading+"\n")
		section, _, ends := strings.Cut(section, "\n## ")
		if !found || !ends {
			t.Fatalf("there is no section %s", heading)
		}
		quotes += checkQuotes(t, section, column, said)
	}
	if quotes < 21 {
		t.Errorf("only %d messages are quoted", quotes)
	}
}

// checkQuotes checks the quotes in a column of the tables of a section, and counts them.
func checkQuotes(t *testing.T, section string, column int, said string) (quotes int) {
	for line := range strings.Lines(section) {
		cells := strings.Split(line, "|")
		if len(cells) < column+3 {
			continue
		}
		for _, quote := range quoteInPage.FindAllStringSubmatch(cells[column], -1) {
			quotes++
			for _, part := range values.Split(quote[1], -1) {
				if part = strings.Trim(part, " .,:;()"); !strings.Contains(said, part) {
					t.Errorf("nothing says %q, which is quoted in %q", part, quote[1])
				}
			}
		}
	}
	return quotes
}

// TestManLinks checks that the pages that the man pages name exist.
func TestManLinks(t *testing.T) {
	pages, err := filepath.Glob("../../../packaging/man/*")
	if err != nil {
		t.Fatal(err)
	}
	names := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range regexp.MustCompile(`[\w-]+\.md\b`).FindAllString(strings.ReplaceAll(string(text), `\-`, "-"), -1) {
			names++
			if name == "SECURITY.md" { // it is installed beside them
				continue
			}
			if _, err := os.Stat(filepath.Join("../../../packaging/doc", name)); err != nil {
				t.Errorf("%s names %s: %v", page, name, err)
			}
		}
	}
	if names < 3 {
		t.Errorf("only %d pages are named", names)
	}
}

// literals returns the string constants of all packages below dir, without tests.
func literals(t *testing.T, dir string) (all []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && d.Name() == "e2e":
			return fs.SkipDir
		case filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				text, unquoteErr := strconv.Unquote(lit.Value)
				if unquoteErr != nil {
					err = unquoteErr
				}
				all = append(all, text)
			}
			return true
		})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}
