package cli

import (
	"flag"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestFlagsAnywhere(t *testing.T) {
	for _, c := range []struct {
		args string
		rest []string
		b    bool
		s    string
	}{
		{"", nil, false, ""},
		{"x -b --s v y", []string{"x", "y"}, true, "v"},
		{"--s=v x -b=false", []string{"x"}, false, "v"},
		{"x -- -b --s", []string{"x", "-b", "--s"}, false, ""},
		{"- -b", []string{"-"}, true, ""},
	} {
		fs := newFlagSet()
		b, s := fs.Bool("b", false, "x"), fs.String("s", "", "x")
		rest, err := parse(fs, strings.Fields(c.args))
		if err != nil || !reflect.DeepEqual(rest, c.rest) || *b != c.b || *s != c.s {
			t.Errorf("%q: %q %v %q %v", c.args, rest, *b, *s, err)
		}
	}
}

// everyCommand calls f for every command of the table with its path.
func everyCommand(f func(path []string, c command)) {
	var walk func(path []string, all []command)
	walk = func(path []string, all []command) {
		for _, c := range all {
			p := append(path[:len(path):len(path)], c.name)
			f(p, c)
			walk(p, c.sub)
		}
	}
	walk(nil, commands())
}

func TestTable(t *testing.T) {
	everyCommand(func(path []string, c command) {
		name := strings.Join(path, " ")
		if (c.setup == nil) == (c.sub == nil) {
			t.Errorf("%s must have a setup or commands of its own", name)
		}
		if c.summary == "" || strings.HasSuffix(c.summary, ".") {
			t.Errorf("%s: summary %q", name, c.summary)
		}
		if c.setup == nil {
			return
		}
		fs := newFlagSet()
		if c.setup(fs) == nil {
			t.Errorf("%s: nothing to run", name)
		}
		fs.VisitAll(func(f *flag.Flag) {
			if f.Usage != "" && (strings.HasSuffix(f.Usage, ".") || f.Usage[0] >= 'A' && f.Usage[0] <= 'Z' && f.Usage[1] >= 'a') {
				t.Errorf("%s --%s: usage %q", name, f.Name, f.Usage)
			}
		})
	})
}

func TestHelp(t *testing.T) {
	code, all, stderr := try(t, "help")
	if code != 0 || stderr != "" {
		t.Fatalf("%d %s", code, stderr)
	}
	everyCommand(func(path []string, c command) {
		if len(path) == 1 && !strings.Contains(all, "\n  "+c.name+" ") {
			t.Errorf("help does not list %v", path)
		}
		_, text, _ := try(t, append([]string{"help"}, path...)...)
		for _, flag := range []string{"-h", "-help", "--help"} {
			code, again, stderr := try(t, append(path[:len(path):len(path)], flag)...)
			if code != 0 || again != text || stderr != "" {
				t.Errorf("%v %s: %d %s %s", path, flag, code, again, stderr)
			}
		}
		fs := newFlagSet()
		if c.setup != nil {
			c.setup(fs)
		}
		for _, f := range shownFlags(fs) {
			if !strings.Contains(text, "\n  --"+f.Name) {
				t.Errorf("%v: no --%s in\n%s", path, f.Name, text)
			}
		}
		for line := range strings.Lines(text) {
			if utf8.RuneCountInString(line) > 81 {
				t.Errorf("%v: over 80 columns: %s", path, line)
			}
		}
	})
}

// Errors about flags write them as help does, and say what is missing.
func TestFlagProblems(t *testing.T) {
	for args, want := range map[string]string{
		"status --nothing":      "flag provided but not defined: --nothing",
		"wait --timeout 30":     `invalid value "30" for flag --timeout: it must be a number with a unit, such as 30s or 2m`,
		"wait --timeout":        "flag needs an argument: --timeout",
		"status --json=x":       `invalid boolean value "x" for --json: parse error`,
		"import --name= x.yaml": `invalid value "" for flag --name: the name is empty`,
		"import --name=a= x.y":  `invalid value "a=" for flag --name: the name is empty`,
		"run --csi-address":     "flag needs an argument: --csi-address",
		"wait --timeout=-1x -":  `invalid value "-1x" for flag --timeout: it must be a number with a unit, such as 30s or 2m`,
	} {
		if code, _, stderr := try(t, strings.Fields(args)...); code != exitUsage || !strings.HasPrefix(stderr, "error: invalid command line: "+want+"\n") {
			t.Errorf("%s: exit code %d, %s", args, code, stderr)
		}
	}
}
