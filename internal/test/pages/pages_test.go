package pages

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

const page = `# A page

Text.

    dnf install x
    apt install x \
        y

## Lists

1. A file:

       # /etc/x/60-nfs.toml
       [driver."x"]

2. A loop:
       not a command, because the line above is not empty

   ` + "```sh" + `
   for i in 1 2; do
       echo "$i"
   done
   status
   ` + "```" + `

## Console

` + "```console" + `
# one
shown

shown, too
$ two
` + "```" + `
` + "```yaml" + `
a: b
` + "```" + `
`

func TestCommandsAndFilesOfAPage(t *testing.T) {
	top := t.TempDir()
	if err := os.WriteFile(filepath.Join(top, "x.md"), []byte(page), 0o600); err != nil {
		t.Fatal(err)
	}
	blocks, err := Read(top, "x.md")
	if err != nil {
		t.Fatal(err)
	}
	type got struct {
		Section  string
		Commands []Command
		Files    []File
	}
	var all []got
	for _, b := range blocks {
		all = append(all, got{b.Section, b.Commands(), b.Files()})
	}
	want := []got{
		{"", []Command{{Text: "dnf install x"}, {Text: "apt install x \\\n    y"}}, nil},
		{"Lists", nil, []File{{"/etc/x/60-nfs.toml", "[driver.\"x\"]\n"}}},
		{"Lists", []Command{{Text: "for i in 1 2; do\n    echo \"$i\"\ndone"}, {Text: "status"}}, nil},
		{"Console", []Command{{"one", "shown\n\nshown, too\n"}, {"two", ""}}, nil},
		{"Console", nil, nil},
	}
	if !reflect.DeepEqual(all, want) {
		t.Errorf("got\n%q, want\n%q", all, want)
	}
}
