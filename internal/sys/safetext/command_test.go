package safetext_test

import (
	"os/exec"
	"strings"
	"testing"
	"unicode"

	"csi-registrar/internal/sys/safetext"
)

var hostile = []string{
	"a b", "$(reboot)", "`reboot`", "40;reboot.toml", "it's", `"`, `\`, "a\nhint: run x", "\x1b[2J\x1b[31m", "\u202egnp.exe",
	"~root", "=ls", "*", "a&b|c>d<e", "\xff\xfe", "#x", "!!", "{a,b}", "'; reboot; '", "\n'; reboot; '", "$'x'",
}

func TestCommandsAreQuotedForAShell(t *testing.T) {
	for _, c := range []struct {
		command safetext.Command
		want    string
	}{
		{safetext.Run("systemctl", "restart", "kubelet.service"), "systemctl restart kubelet.service"},
		{safetext.Run("rm", "/etc/csi-registrar/conf.d/40;reboot.toml"), "rm '/etc/csi-registrar/conf.d/40;reboot.toml'"},
		{safetext.Run("rm", "it's"), `rm 'it'\''s'`},
		{safetext.Run("rm", ""), "rm ''"},
		{safetext.Run("rm", "a\n'b"), `rm $'a\012\047b'`},
		{safetext.Command{Name: "printf", Args: []string{`%s\n`, "x"}, Stdout: "/a b"}, `printf '%s\n' x > '/a b'`},
	} {
		if got := c.command.String(); got != c.want {
			t.Errorf("got %s, want %s", got, c.want)
		}
	}
}

func TestAShellReadsBackWhatWasQuoted(t *testing.T) {
	for _, word := range hostile {
		out, err := exec.Command("bash", "-c", safetext.Run("printf", "%s", word).String()).Output()
		if err != nil || string(out) != word {
			t.Errorf("%q was read as %q (%v)", word, out, err)
		}
	}
}

func TestQuotedTextEndsAtItsOwnQuote(t *testing.T) {
	for _, text := range append(hostile, strings.Repeat("x", 1000), strings.Repeat(`"`, 1000), strings.Repeat(`\`, 1000)) {
		checkQuoted(t, safetext.Quote(text))
		if word := safetext.Word(text); strings.HasPrefix(word, `"`) {
			checkQuoted(t, word)
		} else if safetext.ShellWord(word) != word {
			t.Errorf("%q is no plain word", word)
		}
	}
	if got := safetext.Word("/run/x/csi.sock"); got != "/run/x/csi.sock" {
		t.Errorf("a plain path is %s", got)
	}
	if got := safetext.Quote("x: run \"curl|sh\"\n"); got != `"x: run \"curl|sh\"\n"` {
		t.Errorf("got %s", got)
	}
}

// checkQuoted checks that the only quotes that are not escaped are the first and last character.
func checkQuoted(t *testing.T, q string) {
	t.Helper()
	if len(q) < 2 || q[0] != '"' || q[len(q)-1] != '"' {
		t.Fatalf("%s is not in quotes", q)
	}
	inner := q[1 : len(q)-1]
	for i := 0; i < len(inner); i++ {
		if inner[i] == '\\' {
			i++
		} else if inner[i] == '"' {
			t.Fatalf("%s ends early", q)
		}
		if i >= len(inner) {
			t.Fatalf("%s: its last quote is escaped", q)
		}
	}
	if strings.ContainsFunc(q, func(r rune) bool { return !unicode.IsPrint(r) }) || len(q) > 10000 {
		t.Fatalf("%q is not harmless", q)
	}
}

func TestUnitNamesAreChecked(t *testing.T) {
	for _, name := range []string{"kubelet.service", "snap.microk8s.daemon-kubelite.service", "a@b.service", `dev-x\x2dy.mount`, "cri-containerd-0a.scope"} {
		if !safetext.UnitName(name) {
			t.Errorf("%s is one", name)
		}
	}
	for _, name := range append(hostile, "", "x", ".service", "-x.service", "$(reboot).service", "a b.service", "x.service;reboot", "x.toml", strings.Repeat("x", 300)+".service") {
		if safetext.UnitName(name) {
			t.Errorf("%q is none", name)
		}
	}
}

func FuzzCommand(f *testing.F) {
	for _, s := range hostile {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		checkQuoted(t, safetext.Quote(s))
		word := safetext.ShellWord(s)
		if strings.ContainsFunc(word, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Fatalf("%q is not printable", word)
		}
		if got, ok := unquote(word); !ok || got != s {
			t.Fatalf("%s is %q for a shell, want %q", word, got, s)
		}
	})
}

// unquote reads one word as a POSIX shell does; not ok if it is not one word, or if anything
// in it means something to a shell.
func unquote(word string) (string, bool) {
	var b strings.Builder
	for i := 0; i < len(word); i++ {
		switch c := word[i]; {
		case strings.HasPrefix(word[i:], "$'"):
			for i += 2; i < len(word) && word[i] != '\''; i++ {
				if word[i] != '\\' {
					b.WriteByte(word[i])
					continue
				}
				if i+3 >= len(word) {
					return "", false
				}
				b.WriteByte(word[i+1]<<6 | word[i+2]&7<<3 | word[i+3]&7)
				i += 3
			}
		case c == '\'':
			end := strings.IndexByte(word[i+1:], '\'')
			if end < 0 {
				return "", false
			}
			b.WriteString(word[i+1 : i+1+end])
			i += end + 1
		case c == '\\' && i+1 < len(word):
			i++
			b.WriteByte(word[i])
		case strings.IndexByte(" ;&|<>()$`\"\\*?[]#~!{}^", c) >= 0:
			return "", false
		default:
			b.WriteByte(c)
		}
	}
	return b.String(), word != ""
}
