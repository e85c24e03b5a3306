package safetext_test

import (
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"csi-registrar/internal/sys/safetext"
)

func TestClean(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"plain", "nfs.csi.k8s.io 4.2", "nfs.csi.k8s.io 4.2"},
		{"letters of other scripts", "Müller Привет 你好 שלום عربي é", "Müller Привет 你好 שלום عربي é"},
		{"empty", "", ""},
		{"newline", "a\nb\r\n\tc", `a\nb\r\n\tc`},
		{"NUL and ESC", "a\x00\x1b[31mred\x7f", `a\x00\x1b[31mred\x7f`},
		{"C1 control", "\u009b31m", `\u009b31m`},
		{"invalid UTF-8", "a\xff\xc3(", `a\xff\xc3(`},
		{"surrogate in UTF-8", "\xed\xa0\x80", `\xed\xa0\x80`},
		{"true replacement character", "a\ufffdb", "a\ufffdb"},
		{"bidi override", "abc\u202egnp.exe", `abc\u202egnp.exe`},
		{"bidi isolates and marks", "\u2066\u2069\u200e\u200f\u061c", `\u2066\u2069\u200e\u200f\u061c`},
		{"zero width", "a\u200bb\u200cc\u200dd\ufeffe\u2060", `a\u200bb\u200cc\u200dd\ufeffe\u2060`},
		{"soft hyphen", "a\u00adb", `a\u00adb`},
		{"line and paragraph separators", "a\u2028b\u2029c", `a\u2028b\u2029c`},
		{"other spaces", "a\u00a0b\u3000c", `a\u00a0b\u3000c`},
		{"invisible letters", "a\u3164b\u115fc\u034fd", `a\u3164b\u115fc\u034fd`},
		{"variation selector", "a\ufe0f", `a\ufe0f`},
		{"tag characters", "\U000e0041", `\U000e0041`},
		{"private use", "\ue000", `\ue000`},
		{"backslash is left", `C:\temp`, `C:\temp`},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := safetext.Clean(c.in, 100); got != c.want {
				t.Errorf("Clean(%q) = %q, want %q", c.in, got, c.want)
			}
		})
	}
}

func TestCleanIsBounded(t *testing.T) {
	for _, c := range []struct {
		in    string
		limit int
		want  string
	}{
		{"abcdef", 6, "abcdef"},
		{"abcdef", 5, "abcd…"},
		{"äöüßéñ", 6, "äöüßéñ"},
		{"äöüßéñ", 3, "äö…"},
		{"abcdef", 1, "…"},
		{"a", 1, "a"},
		{"abcdef", 0, ""},
		{"abcdef", -1, ""},
		{"abc\n", 5, `abc\n`},
		{"abc\nd", 5, "abc…"}, // no half escape
		{"abcd\n", 5, "abcd…"},
		{"\u202e", 3, "…"},
		{"\x00\x00", 8, `\x00\x00`},
		{"\x00\x00a", 8, `\x00…`},
		{strings.Repeat("x", 1<<20), 4, "xxx…"},
	} {
		if got := safetext.Clean(c.in, c.limit); got != c.want {
			t.Errorf("Clean(%.20q, %d) = %q, want %q", c.in, c.limit, got, c.want)
		}
	}
}

func TestCleanDoesNotCopyWhatIsClean(t *testing.T) {
	s := strings.Repeat("ordinary ", 10)
	if n := testing.AllocsPerRun(100, func() { safetext.Clean(s, 200) }); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}

func FuzzClean(f *testing.F) {
	for _, s := range []string{"", "a", "a\nb", "\xff", "\u202e", "äö", "\x00\x1b[2J", strings.Repeat("\u200b", 50), "\U000e0041"} {
		f.Add(s, 10)
	}
	f.Fuzz(func(t *testing.T, s string, limit int) {
		limit %= 1000
		got := safetext.Clean(s, limit)
		if !utf8.ValidString(got) {
			t.Fatalf("%q is not UTF-8", got)
		}
		if n := utf8.RuneCountInString(got); n > max(limit, 0) {
			t.Fatalf("%q has %d characters, limit %d", got, n, limit)
		}
		for _, r := range got {
			if !unicode.IsPrint(r) {
				t.Fatalf("%q holds %U", got, r)
			}
		}
		if again := safetext.Clean(got, limit); again != got {
			t.Fatalf("Clean(%q) = %q: not stable", got, again)
		}
		if limit > 0 && s != "" && got == "" {
			t.Fatalf("Clean(%q, %d) lost everything", s, limit)
		}
	})
}
