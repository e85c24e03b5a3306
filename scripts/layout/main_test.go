package main

import (
	"slices"
	"strings"
	"testing"
)

const mixed = `package p

import (
	"csi-registrar/internal/node/status" // ours
	// needed for its side effect
	_ "google.golang.org/grpc/encoding/gzip"
	"fmt"

	"os"
)
`

const grouped = `package p

import (
	"fmt"
	"os"

	// needed for its side effect
	_ "google.golang.org/grpc/encoding/gzip"

	"csi-registrar/internal/node/status" // ours
)
`

func TestImportsAreGrouped(t *testing.T) {
	fixed, problems, err := check("p.go", []byte(mixed))
	if err != nil {
		t.Fatal(err)
	}
	if string(fixed) != grouped {
		t.Errorf("regrouped as\n%s\nwant\n%s", fixed, grouped)
	}
	if len(problems) != 1 {
		t.Errorf("problems %q, want one", problems)
	}
	if _, problems, err := check("p.go", []byte(grouped)); err != nil || len(problems) > 0 {
		t.Errorf("grouped imports have the problems %q (%v)", problems, err)
	}
}

func TestWideComments(t *testing.T) {
	words := strings.TrimSpace(strings.Repeat("word ", 19)) // 94 columns
	src := strings.Join([]string{
		"package p",
		"",
		"// " + words + " 89", // 100 columns
		"//go:generate " + words,
		"",
		"//\t" + words + " 89",
		"",
		"// https://example.com/" + strings.Repeat("x", 100),
		"",
		"// " + words + " 890", // 101
		"// next",
		"//   - not part of it",
		"func f() {",
		"\t// " + words,     // 101 with the tab
		"\tg() // " + words, // 105, beside code
		"}",
		"",
	}, "\n")
	fixed, problems, err := check("p.go", []byte(src))
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, problem := range problems {
		lines = append(lines, strings.Split(problem, ":")[1])
	}
	if want := []string{"10", "14", "15"}; !slices.Equal(lines, want) {
		t.Errorf("lines %v are too wide, want %v: %q", lines, want, problems)
	}
	want := strings.NewReplacer(
		"// "+words+" 890\n// next", "// "+words+"\n// 890 next",
		"\t// "+words+"\n", "\t// "+words[5:]+"\n\t// word\n",
	).Replace(src)
	want = strings.Replace(want, "\tg() // "+words, "\t// "+words[5:]+"\n\t// word\n\tg()", 1)
	if string(fixed) != want {
		t.Errorf("wrapped as\n%s\nwant\n%s", fixed, want)
	}
}
