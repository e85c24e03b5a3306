package bugreport

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/sys/worker"
)

// TestPartThatIsTooLong checks that only whole lines of it are kept: half a secret might not be
// recognized.
func TestPartThatIsTooLong(t *testing.T) {
	line := strings.Repeat("x", 999) + "\n"
	part := Part{Write: func(_ context.Context, w io.Writer) error {
		// an error is that of the part
		_, _ = io.WriteString(w, strings.Repeat(line, maxPart/1000+1))
		return nil
	}}
	got, err := part.make(t.Context(), worker.NewPool())
	if err == nil || len(got) != maxPart/1000*1000 || !strings.HasSuffix(got, "\n") {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// TestWordsAfterTheNameOfASecret checks that a word of a sentence is not taken for a secret, in
// small letters or not: otherwise it would be hidden everywhere.
func TestWordsAfterTheNameOfASecret(t *testing.T) {
	r := redactor{}
	r.recognize("password: Required\npassword: invalid\ntoken=Expired\npassword=hunter22\n")
	const text = "Required field, invalid value, Expired certificate"
	if got := r.repeated()(text); got != text {
		t.Errorf("%q", got)
	}
	if got := r.repeated()("hunter22"); got != mark {
		t.Errorf("%q", got)
	}
}

// TestShortestSecret checks that a password of six characters is known, one of five is not.
func TestShortestSecret(t *testing.T) {
	r := redactor{}
	r.recognize("password=sixsix\npassword=fives\n")
	if got, want := r.repeated()("sixsix fives"), mark+" fives"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// TestSecretsAtTheirLimits checks for each form of a secret the shortest that is hidden, and one
// that is a character shorter and is not.
func TestSecretsAtTheirLimits(t *testing.T) {
	word := func(n int) string { return "Aa1" + strings.Repeat("x", n-3) }
	key := func(n int) string {
		return "-----BEGIN PRIVATE KEY-----\n" + strings.Repeat("k", n) + "\n" + strings.Repeat("l", 64) + "\n-----END PRIVATE KEY-----\n"
	}
	for _, c := range []struct {
		what         string
		long, secret string // the text, and what of it must be hidden
		short        string // is not changed
	}{
		{"a long word", "is " + word(32), word(32), "is " + word(31)},
		{"a part of a long word", strings.Repeat("a", 22) + "/" + word(10), word(10), strings.Repeat("a", 22) + "/" + word(9)},
		{"a hexadecimal number", strings.Repeat("0a", 20), strings.Repeat("0a", 20), strings.Repeat("0a", 19) + "0"},
		{"a quoted text", `password="one \" two" three`, "two", "three"},
		{"a list", "secret={one two} three", "two", "three"},
		{"a list in a list", "secrets=map[a:[one] b:two] three", "two", "three"},
		{"a word", "token=one,two three", "two", "three"},
	} {
		if got := (redactor{}).recognize(c.long); strings.Contains(got, c.secret) || !strings.Contains(got, mark) {
			t.Errorf("%s: %q becomes %q", c.what, c.long, got)
		}
		if c.short == "three" { // what follows stays
			if got := (redactor{}).recognize(c.long); !strings.HasSuffix(got, " three") {
				t.Errorf("%s: %q becomes %q", c.what, c.long, got)
			}
		} else if got := (redactor{}).recognize(c.short); got != c.short {
			t.Errorf("%s: %q becomes %q", c.what, c.short, got)
		}
	}
	if got := privateKeys(key(16)); strings.Contains(got, "kkk") || strings.Contains(got, "lll") {
		t.Errorf("%q", got)
	}
	if got := privateKeys(key(15)); !strings.Contains(got, strings.Repeat("k", 15)) {
		t.Errorf("text of 15 characters, which is no line of a key: %q", got)
	}
}

// TestLongestSecretThatIsRemembered checks that a secret of 4 KiB is known in other parts, and a
// longer one is not: it would be a whole file.
func TestLongestSecretThatIsRemembered(t *testing.T) {
	for n, want := range map[int]bool{4 << 10: true, 4<<10 + 1: false} {
		r := redactor{}
		secret := strings.Repeat("Ab1", n/3) + strings.Repeat("z", n%3)
		r.remember("password", secret)
		if got := r.repeated()(secret) == mark; got != want {
			t.Errorf("%d bytes: hidden %v", n, got)
		}
	}
}

// TestTimesOfTheArchive checks that no entry is of the future: tar rounds to the nearest second,
// and warns of each.
func TestTimesOfTheArchive(t *testing.T) {
	var archive bytes.Buffer
	now := time.Unix(1_800_000_000, 900_000_000)
	if err := Write(t.Context(), &archive, "dir", now, []Part{{Name: "a", Write: func(context.Context, io.Writer) error { return nil }}}); err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(&archive)
	if err != nil {
		t.Fatal(err)
	}
	header, err := tar.NewReader(z).Next()
	if err != nil || header.ModTime.After(now) {
		t.Errorf("%v, %v", header, err)
	}
}

// The text of a part cannot move the cursor of a terminal, and keeps its lines and tabs.
func TestTextOfAPart(t *testing.T) {
	for text, want := range map[string]string{
		"": "", "\n": "\n", "a\t\tb\n\nc": "a\t\tb\n\nc", "\x1b[2J\xff\t\u202e\r\n": `\x1b[2J\xff` + "\t" + `\u202e\r` + "\n",
	} {
		if got := printable(text); got != want {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
}
