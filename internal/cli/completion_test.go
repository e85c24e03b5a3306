package cli

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestComplete(t *testing.T) {
	drivers := func(root string) []string { return []string{"a.csi.example", "b.csi.example", root} }
	for _, c := range []struct{ words, want string }{
		{"", ":words completion config doctor help import reload reregister run status trace version wait"},
		{"re", ":words reload reregister"},
		{"config ", ":words check show"},
		{"config s", ":words show"},
		{"nothing ", ":words"},
		{"status ", ":words / a.csi.example b.csi.example"},
		{"status b", ":words b.csi.example"},
		{"status a.csi.example ", ":words"},
		{"status --config-root /x ", ":words /x a.csi.example b.csi.example"},
		{"status --config-root=/x ", ":words /x a.csi.example b.csi.example"},
		{"status --config-root = /x ", ":words /x a.csi.example b.csi.example"}, // as bash splits it
		{"status --j", ":words --json"},
		{"status --", ":words --config-root --help --json --watch"},
		{"status --json ", ":words / a.csi.example b.csi.example"},
		{"status --config-root ", ":dirs"},
		{"wait a.csi.example ", ":words / b.csi.example"},
		{"wait --timeout ", ":words"},
		{"reregister ", ":words / a.csi.example b.csi.example"},
		{"config check --config ", ":files"},
		{"run --csi-address ", ":files"},
		{"run --kubelet-registration-path ", ":files"},
		{"run --plugin-registration-path ", ":dirs"},
		{"import ", ":files"},
		{"import one.yaml ", ":files"},
		{"completion ", ":words bash fish zsh"},
		{"completion z", ":words zsh"},
		{"completion zsh ", ":words"},
		{"help st", ":words status"},
		{"help config ", ":words check show"},
		{"help version ", ":words"},
	} {
		words := strings.Split(c.words, " ")
		kind, list := complete(commands(), words, drivers)
		var names []string
		for _, line := range list {
			name, _, _ := strings.Cut(line, "\t")
			names = append(names, name)
		}
		slices.Sort(names)
		got := strings.Join(append([]string{kind}, names...), " ")
		if c.words == "" {
			// Commands come and go; the hidden ones must not be there.
			if strings.Contains(got, "__complete") || !strings.Contains(got, " status ") {
				t.Errorf("%q: %s", c.words, got)
			}
			continue
		}
		if got != c.want {
			t.Errorf("%q: %s, want %s", c.words, got, c.want)
		}
	}
}

// program puts csi-registrar, which is this test's binary, into a directory for PATH.
func program(t *testing.T) (dir string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir = newRoot(t)
	script := fmt.Sprintf("#!/bin/sh\n%s=1 exec %s \"$@\"\n", asProgram, self)
	if err := os.WriteFile(filepath.Join(dir, "csi-registrar"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// The scripts, loaded by their shells; the names of drivers are from the files.
func TestShells(t *testing.T) {
	shells := map[string]string{
		"bash": `set -eu
eval "$(csi-registrar completion bash)"
complete -p csi-registrar >/dev/null
try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _csi_registrar; printf '%s ' "${COMPREPLY[@]}"; echo; }
try csi-registrar stat
try csi-registrar status --config-root "$ROOT" ''
try csi-registrar completion ''
cd "$ROOT"; try csi-registrar config check --config-root e
`,
		"zsh": `set -eu
autoload -U compinit; compinit -u -D
eval "$(csi-registrar completion zsh)"
[[ $_comps[csi-registrar] == _csi-registrar ]]
_describe() { print -r -- "${(@)candidates%%:*} " }
_files() { print -r -- "files $* " }
try() { words=("$@"); CURRENT=$#; _csi-registrar }
try csi-registrar stat
try csi-registrar status --config-root "$ROOT" ''
try csi-registrar completion ''
print etc ''
try csi-registrar config check --config-root e >/dev/null
`,
		"fish": `csi-registrar completion fish | source
function try; complete -C "$argv" | string replace -r '\t.*' '' | string join ' ' | string replace -r '$' ' '; end
try 'csi-registrar stat'
try "csi-registrar status --config-root $ROOT "
try 'csi-registrar completion '
cd $ROOT; try 'csi-registrar config check --config-root e' | string replace '/' ''
`,
	}
	root, home := newRoot(t), newRoot(t)
	writeConfig(t, root, "[driver.\"a.csi.example\"]\nsocket = \"/run/a.sock\"\n[driver.\"b.csi.example\"]\nsocket = \"/run/b.sock\"\n")
	path := program(t) + ":" + os.Getenv("PATH")
	for shell, script := range shells {
		t.Run(shell, func(t *testing.T) {
			binary, err := exec.LookPath(shell)
			if err != nil {
				if os.Getenv("CI") == "true" {
					t.Fatalf("%s is not here, and under CI it must be", shell)
				}
				t.Skipf("%s is not here", shell)
			}
			args := []string{"-c", script}
			if shell != "fish" {
				args = append([]string{map[string]string{"bash": "--norc", "zsh": "-f"}[shell]}, args...)
			}
			cmd := exec.CommandContext(t.Context(), binary, args...)
			cmd.Env = append(os.Environ(), "PATH="+path, "ROOT="+root, "HOME="+home, "XDG_CONFIG_HOME="+home, "TERM=dumb")
			cmd.Dir = home
			out, err := cmd.CombinedOutput()
			want := "status \na.csi.example b.csi.example \nbash zsh fish \netc \n"
			if shell == "fish" {
				want = "status \na.csi.example b.csi.example \nbash fish zsh \netc \n" // it sorts
			}
			if err != nil || string(out) != want {
				t.Errorf("%v\ngot  %q\nwant %q", err, out, want)
			}
		})
	}
}
