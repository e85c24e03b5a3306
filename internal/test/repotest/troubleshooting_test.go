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
	values = regexp.MustCompile(`…|/run/x/csi\.sock|/run/x|"[ab]\.example"|NodeGetInfo|Probe|2m0s|5s|nobody \(uid 65534\)|\broot\b|DRIVER|process 4711 \(uid 0\)|no space left on device|, but `)
)

// TestTroubleshootingQuotesMessages checks that the messages in the page occur literally in the
// code, so that users can search the page for what they see.
func TestTroubleshootingQuotesMessages(t *testing.T) {
	page, err := os.ReadFile("../../../packaging/doc/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(page), "## From `csi-registrar status` and the journal")
	section, _, ends := strings.Cut(section, "\n## ")
	if !found || !ends {
		t.Fatal("the section is not there")
	}
	said := strings.Join(literals(t, ".."), "\x00")
	quotes := 0
	for line := range strings.Lines(section) {
		cells := strings.Split(line, "|")
		if len(cells) != 5 {
			continue
		}
		for _, quote := range quoteInPage.FindAllStringSubmatch(cells[2], -1) {
			quotes++
			for _, part := range values.Split(quote[1], -1) {
				if part = strings.Trim(part, " .,:;()"); !strings.Contains(said, part) {
					t.Errorf("nothing says %q, which is quoted in %q", part, quote[1])
				}
			}
		}
	}
	if quotes < 20 {
		t.Errorf("only %d messages are quoted", quotes)
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
