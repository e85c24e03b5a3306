// Command layout checks what gofmt leaves open in the Go files below the given directories: imports
// are grouped as standard library, third-party and csi-registrar/..., separated by one blank line
// each, and comments are at most 100 columns wide. With -fix it regroups the imports and wraps the
// comments.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxWidth is the width of a comment in columns; a tab counts as tabWidth.
const (
	maxWidth = 100
	tabWidth = 4
)

func main() {
	fix := flag.Bool("fix", false, "regroup the imports and wrap the comments")
	flag.Parse()
	problems, err := checkAll(flag.Args(), *fix)
	for _, problem := range problems {
		fmt.Println(problem)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "layout:", err)
	}
	if err != nil || len(problems) > 0 {
		os.Exit(1)
	}
}

// checkAll returns the problems in all Go files below the directories.
func checkAll(dirs []string, fix bool) ([]string, error) {
	var problems []string
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || filepath.Ext(path) != ".go" {
				return err
			}
			src, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			fixed, found, err := check(path, src)
			if err != nil {
				return err
			}
			if fix && !bytes.Equal(src, fixed) {
				return os.WriteFile(path, fixed, 0o644)
			}
			problems = append(problems, found...)
			return nil
		})
		if err != nil {
			return problems, err
		}
	}
	return problems, nil
}

// check returns the problems in one file, and its source without them.
func check(path string, src []byte) (fixed []byte, problems []string, err error) {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, path, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, nil, err
	}
	wide := wideComments(fset, file, src)
	for _, line := range wide {
		problems = append(problems, fmt.Sprintf("%s:%d: the comment is wider than %d columns", path, line, maxWidth))
	}
	if fixed, err = wrap(src, wide); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	fset = token.NewFileSet()
	if file, err = parser.ParseFile(fset, path, fixed, parser.ParseComments|parser.SkipObjectResolution); err != nil {
		return nil, nil, err
	}
	grouped, err := regroup(fset, file, fixed)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	if !bytes.Equal(grouped, fixed) {
		problems = append(problems, path+": imports are not grouped as standard library, third-party, csi-registrar/...")
	}
	return grouped, problems, nil
}

// regroup returns src with the specs of its parenthesized import declaration in groups. A comment
// stays with the import that it stands above or beside.
func regroup(fset *token.FileSet, file *ast.File, src []byte) ([]byte, error) {
	for _, decl := range file.Decls {
		imports, ok := decl.(*ast.GenDecl)
		if !ok || imports.Tok != token.IMPORT {
			break
		}
		if !imports.Lparen.IsValid() {
			continue
		}
		var groups [3][]byte
		start := fset.Position(imports.Lparen).Offset + 1
		for _, spec := range imports.Specs {
			spec := spec.(*ast.ImportSpec)
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return nil, err
			}
			end := fset.Position(spec.End()).Offset
			end += bytes.IndexByte(src[end:], '\n') // with the comment beside it
			group := &groups[groupOf(path)]
			*group = append(append(*group, bytes.TrimSpace(src[start:end])...), '\n')
			start = end
		}
		block := bytes.Join(slices.DeleteFunc(groups[:], func(g []byte) bool { return len(g) == 0 }), []byte("\n"))
		open, end := fset.Position(imports.Lparen).Offset+1, fset.Position(imports.Rparen).Offset
		return format.Source(slices.Concat(src[:open], []byte("\n"), block, src[end:]))
	}
	return src, nil
}

// groupOf returns the group of an import path: 0 standard library, 1 third-party, 2 this project.
func groupOf(path string) int {
	first, _, _ := strings.Cut(path, "/")
	switch {
	case first == "csi-registrar":
		return 2
	case strings.Contains(first, "."):
		return 1
	}
	return 0
}

// wideComments returns the numbers of the lines with a comment that ends beyond maxWidth.
// Directives, preformatted lines and single words, such as a URL, cannot be wrapped.
func wideComments(fset *token.FileSet, file *ast.File, src []byte) []int {
	lines := strings.Split(string(src), "\n")
	var wide []int
	for _, group := range file.Comments {
		for _, comment := range group.List {
			if strings.HasPrefix(comment.Text, "//go:") || strings.HasPrefix(comment.Text, "//\t") {
				continue
			}
			start := fset.Position(comment.Pos()).Line
			for i, text := range strings.Split(comment.Text, "\n") {
				if width(lines[start-1+i]) > maxWidth && len(strings.Fields(text)) > 2 {
					wide = append(wide, start+i)
				}
			}
		}
	}
	return wide
}

var (
	commentLine = regexp.MustCompile(`^(\t*)// (\S.*)$`)
	besideCode  = regexp.MustCompile(`^(\t*)(.*\S)\s+// (\S.*)$`)
	listItem    = regexp.MustCompile(`^([-*]|\d+\.) `)
)

// wrap returns src with the given comments wrapped: together with their paragraph, or, beside code,
// on lines of their own above it.
func wrap(src []byte, wide []int) ([]byte, error) {
	if len(wide) == 0 {
		return src, nil
	}
	lines := strings.Split(string(src), "\n")
	last := len(lines) // the lines from here on are done
	for _, number := range slices.Backward(wide) {
		i := number - 1
		if i >= last {
			continue
		}
		if code := besideCode.FindStringSubmatch(lines[i]); code != nil && !commentLine.MatchString(lines[i]) {
			above := fill(code[1], strings.Fields(code[3]))
			lines = slices.Replace(lines, i, i+1, append(above, code[1]+code[2])...)
			last = i
			continue
		}
		indent := ""
		if m := commentLine.FindStringSubmatch(lines[i]); m != nil {
			indent = m[1]
		} else {
			continue // of another form: for a person
		}
		text := func(i int) (string, bool) { // of a line that may belong to the paragraph
			if i < 0 || i >= len(lines) {
				return "", false
			}
			m := commentLine.FindStringSubmatch(lines[i])
			if m == nil || m[1] != indent {
				return "", false
			}
			return m[2], true
		}
		first, end := i, i+1
		for {
			here, _ := text(first)
			if _, ok := text(first - 1); !ok || listItem.MatchString(here) {
				break
			}
			first--
		}
		for {
			next, ok := text(end)
			if !ok || end == last || listItem.MatchString(next) {
				break
			}
			end++
		}
		var words []string
		for j := first; j < end; j++ {
			here, _ := text(j)
			words = append(words, strings.Fields(here)...)
		}
		lines = slices.Replace(lines, first, end, fill(indent, words)...)
		last = first
	}
	return format.Source([]byte(strings.Join(lines, "\n")))
}

// fill returns comment lines with the words.
func fill(indent string, words []string) []string {
	var lines []string
	for _, word := range words {
		if n := len(lines) - 1; n >= 0 && width(lines[n]+" "+word) <= maxWidth {
			lines[n] += " " + word
		} else {
			lines = append(lines, indent+"// "+word)
		}
	}
	return lines
}

// width returns the width of a line in columns.
func width(line string) int {
	return utf8.RuneCountInString(line) + (tabWidth-1)*strings.Count(line, "\t")
}
