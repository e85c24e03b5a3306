package secrettext

import (
	"fmt"
	"strings"
	"testing"
)

// TestShortValues checks that values of three to five characters are hidden wherever they are a
// word: at the beginning, in the middle and at the very end of a text.
func TestShortValues(t *testing.T) {
	for _, secret := range []string{"a1b", "a1b2", "ab1cd"} {
		m := New()
		m.Add(secret)
		for _, text := range []string{"%s", "%s was wrong", "wrong password %s", "wrong (%s) password", "wrong: %s\n"} {
			if got, want := m.Redact(fmt.Sprintf(text, secret), mark), fmt.Sprintf(text, mark); got != want {
				t.Errorf("%q in %q: %q", secret, text, got)
			}
		}
		for _, text := range []string{"x" + secret, secret + "x"} { // another word
			if got := m.Redact(text, mark); got != text {
				t.Errorf("%q: %q", text, got)
			}
		}
	}
	m := New()
	m.Add("ab") // it is in every text
	if got := m.Redact("ab", mark); got != "ab" {
		t.Errorf("%q", got)
	}
}

// TestLongValues checks that the shortest part that is found anywhere has six characters, and is
// found at both ends of a text.
func TestLongValues(t *testing.T) {
	m := New()
	m.Add("Qw7rT9zU")
	for text, want := range map[string]string{
		"xQw7rT9": "x" + mark, "r T9zUx": "r T9zUx", "7rT9zUx": mark + "x", "Qw7rT": "Qw7rT", "Qw7rT9": mark,
	} {
		if got := m.Redact(text, mark); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// TestGapBetweenMatches checks that up to four characters between two parts of a secret are hidden
// with them, and five are not.
func TestGapBetweenMatches(t *testing.T) {
	m := New()
	m.Add("Qw7rT9zU")
	for gap := 1; gap <= 6; gap++ {
		between := strings.Repeat("+", gap)
		want := mark
		if gap > 4 {
			want = mark + between + mark
		}
		if got := m.Redact("Qw7rT9"+between+"7rT9zU", mark); got != want {
			t.Errorf("%d characters between: %q, want %q", gap, got, want)
		}
	}
}

// TestMemoryOfAMatcher checks that a Matcher is full after a quarter of a million windows, which
// take 16 MiB, and remembers nothing more.
func TestMemoryOfAMatcher(t *testing.T) {
	m := New()
	for i := 0; !m.Full(); i++ {
		if i > 100_000 {
			t.Fatal("it is never full")
		}
		m.Add(fmt.Sprintf("a secret %d with many windows %d %d", i*7919, i*104729, i*1299709))
	}
	size := len(m.windows)
	if size < 1<<18 || size > 1<<18+10_000 {
		t.Errorf("it is full with %d windows", size)
	}
	m.Add("TheSecretThatCameLate")
	if len(m.windows) != size {
		t.Errorf("it remembers more: %d windows", len(m.windows))
	}
}

// TestFold checks what is left out: white space, controls and invisible characters, each alone.
func TestFold(t *testing.T) {
	if got := text(fold("A b\tc\nd\u200be\u0000f\u00adg")); got != "abcdefg" {
		t.Errorf("%q", got)
	}
	// lower case letters of one upper case letter
	if got := text(fold("ſıςσΣ")); got != "siσσσ" {
		t.Errorf("%q", got)
	}
}

// TestNamesAreNoSecrets checks that short names of values are shown, and their values are not.
func TestNamesAreNoSecrets(t *testing.T) {
	for secret, value := range map[string]string{
		"user=b0bby": "b0bby", "user: b0bby": "b0bby", `{"user": "b0bby"}`: "b0bby", `{"user": 31415}`: "31415",
	} {
		m := New()
		m.Add(secret)
		if got := m.Redact("user is set, "+value+" is wrong", mark); got != "user is set, "+mark+" is wrong" {
			t.Errorf("%s: %q", secret, got)
		}
	}
}

// TestSecretInBase64 checks that a secret in base64 is also found decoded, and that both alphabets
// of base64 are known.
func TestSecretInBase64(t *testing.T) {
	for secret, written := range map[string]string{
		"UzNjcjN0L1BhNTU=": "S3cr3t/Pa55", "YTFiMg==": "a1b2", // decoded
		"~~~>>>???": "fn5-Pj4-Pz8_", "~~~>>>???~~~": "fn5+Pj4+Pz8/fn5+", // encoded
	} {
		m := New()
		m.Add(secret)
		if got := m.Redact("refused: "+written, mark); got != "refused: "+mark {
			t.Errorf("%s: %q", secret, got)
		}
	}
}
