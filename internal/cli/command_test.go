package cli

import (
	"context"
	"flag"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

func TestWrongUsage(t *testing.T) {
	for _, c := range []struct {
		args string
		err  string // of standard error's first line
		hint string
	}{
		{"", "a command is missing", "csi-registrar help"},
		{"nothing", `there is no command "nothing"`, "csi-registrar help"},
		{"--nothing", `there is no command "--nothing"`, "csi-registrar help"},
		{"config", "a command is missing", "csi-registrar help config"},
		{"config nothing", `there is no command "nothing"`, "csi-registrar help config"},
		{"config check x", `unexpected argument "x"`, "csi-registrar help config check"},
		{"config check --nothing", "flag provided but not defined: -nothing", "csi-registrar help config check"},
		{"config show --config", "flag needs an argument: -config", "csi-registrar help config show"},
		{"status a b", `unexpected argument "b"`, "csi-registrar help status"},
		{"status a/b", `"a/b": not a driver name`, "csi-registrar help status"},
		{"doctor a_b", `"a_b": not a driver name`, "csi-registrar help doctor"},
		{"wait .x", `".x": not a driver name`, "csi-registrar help wait"},
		{"wait --timeout soon", `invalid value "soon"`, "csi-registrar help wait"},
		{"wait --timeout -1s", "--timeout -1s is negative", "csi-registrar help wait"},
		{"reload x", `unexpected argument "x"`, "csi-registrar help reload"},
		{"reregister", "name one driver", "csi-registrar help reregister"},
		{"reregister a b", "name one driver", "csi-registrar help reregister"},
		{"completion", "name one shell", "csi-registrar help completion"},
		{"completion csh", `there is no completion for "csh"`, "csi-registrar help completion"},
		{"help nothing", `there is no command "nothing"`, "csi-registrar help"},
		{"version x", `unexpected argument "x"`, "csi-registrar help version"},
	} {
		code, stdout, stderr := try(t, strings.Fields(c.args)...)
		first, rest, _ := strings.Cut(stderr, "\n")
		if code != 2 || stdout != "" || !strings.HasPrefix(first, "error: invalid command line: "+c.err) || rest != "hint: see "+c.hint+"\n" {
			t.Errorf("%q: %d %q %q", c.args, code, stdout, stderr)
		}
	}
}

// What strangers say may get into an error; a terminal must not notice.
func TestErrorsAreHarmless(t *testing.T) {
	code, _, stderr := try(t, "status", "a\x1b[2J\nerror: b\u202e")
	if code != 2 || strings.ContainsAny(stderr, "\x1b\u202e") || strings.Count(stderr, "\n") != 2 {
		t.Errorf("%d %q", code, stderr)
	}
}

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
		fs := newFlagSet([]string{"test"})
		b, s := fs.Bool("b", false, "x"), fs.String("s", "", "x")
		rest, err := parse(fs, strings.Fields(c.args))
		if err != nil || !reflect.DeepEqual(rest, c.rest) || *b != c.b || *s != c.s {
			t.Errorf("%q: %q %v %q %v", c.args, rest, *b, *s, err)
		}
	}
}

// every command of the table, with its path; hidden ones too.
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
		fs := newFlagSet(path)
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
		if len(path) == 1 && strings.Contains(all, "\n  "+c.name+" ") == c.hidden {
			t.Errorf("help and the hidden command %v do not agree", path)
		}
		_, text, _ := try(t, append([]string{"help"}, path...)...)
		for _, flag := range []string{"-h", "-help", "--help"} {
			code, again, stderr := try(t, append(path[:len(path):len(path)], flag)...)
			if code != 0 || again != text || stderr != "" {
				t.Errorf("%v %s: %d %s %s", path, flag, code, again, stderr)
			}
		}
		for _, f := range shownFlags(path, c) {
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

// What cannot be printed is no success.
func TestFullDisk(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip(err)
	}
	defer full.Close()
	root := newRoot(t)
	newFake(driverIn("a.csi.example", "registered", hour)).serve(t, root)
	for _, args := range []string{"help", "help status", "help config", "status --help", "version", "version --json", "completion bash",
		"config check", "config show", "config show --json", "status", "status --json", "status a.csi.example", "status --watch", "__complete st"} {
		s := newSession()
		s.env.stdout = full
		words := strings.Fields(args)
		if slices.Contains([]string{"config", "status"}, words[0]) && words[len(words)-1] != "--help" {
			words = append(words, "--config-root", root)
		}
		if code := s.run(t.Context(), words...); code != exitFailed || !strings.HasPrefix(s.stderr.String(), "error: ") {
			t.Errorf("%s: %d %q", args, code, s.stderr)
		}
	}
}

func TestVersion(t *testing.T) {
	code, text, _ := try(t, "version")
	if code != 0 || !strings.HasPrefix(text, "csi-registrar ") || !strings.Contains(text, "go1.") {
		t.Errorf("%d %q", code, text)
	}
	if _, again, _ := try(t, "--version"); again != text {
		t.Errorf("--version: %q", again)
	}
	code, doc, _ := try(t, "version", "--json")
	if code != 0 || !strings.Contains(doc, `"version": "`) || !strings.Contains(doc, `"go_version": "go1.`) {
		t.Errorf("%d %s", code, doc)
	}
}

// A cancelled context, as after INT, ends a client at once.
func TestInterrupted(t *testing.T) {
	leaks(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s := newSession()
	if code := s.run(ctx, "wait", "--config-root", newRoot(t)); code != 1 || !strings.Contains(s.stderr.String(), "interrupted") {
		t.Errorf("%d %s", code, s.stderr)
	}
}
