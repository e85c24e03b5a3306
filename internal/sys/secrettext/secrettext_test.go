package secrettext

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

const mark = "(secret)"

// form is how a driver may repeat a secret.
type form struct {
	name  string
	write func(string) string
}

func allForms() []form {
	b64 := func(e *base64.Encoding, before, after string) func(string) string {
		return func(s string) string { return e.EncodeToString([]byte(before + s + after)) }
	}
	forms := []form{
		{"as it is", func(s string) string { return s }},
		{"upper case", strings.ToUpper},
		{"lower case", strings.ToLower},
		{"quoted", strconv.Quote},
		{"quoted in ASCII", strconv.QuoteToASCII},
		{"quoted twice", func(s string) string { return strconv.Quote(strconv.Quote(s)) }},
		{"JSON", func(s string) string { b, _ := json.Marshal(s); return string(b) }},
		{"percent-encoded", url.QueryEscape},
		{"percent-encoded path", url.PathEscape},
		{"hexadecimal", func(s string) string { return hex.EncodeToString([]byte(s)) }},
		{"HEXADECIMAL", func(s string) string { return strings.ToUpper(hex.EncodeToString([]byte(s))) }},
		{"without the final newline", func(s string) string { return strings.TrimSuffix(s, "\n") }},
		{"in quotes", func(s string) string { return `"` + s + `"` }},
		{"in brackets", func(s string) string { return "[" + s + "]" }},
		{"as a Go map", func(s string) string { return "map[password:" + s + "]" }},
		{"as an option", func(s string) string { return "-o username=x,password=" + s + ",vers=3" }},
		{"in a URL", func(s string) string { return "https://user:" + s + "@host/path" }},
		{"doubled blanks", func(s string) string { return strings.ReplaceAll(s, " ", "  ") }},
		{"blanks as tabs", func(s string) string { return strings.ReplaceAll(s, " ", "\t") }},
		{"folded lines", func(s string) string { return strings.ReplaceAll(s, "\n", " ") }},
		{"lines joined", func(s string) string { return strings.ReplaceAll(s, "\n", "") }},
		{"CRLF", func(s string) string { return strings.ReplaceAll(s, "\n", "\r\n") }},
		{"wrapped at 64", func(s string) string { return wrap(s, 64) }},
		{"wrapped at 20", func(s string) string { return wrap(s, 20) }},
		{"first half", func(s string) string { return s[:len(s)/2] }},
		{"last half", func(s string) string { return s[len(s)/2:] }},
		{"cut with dots", func(s string) string { return s[:len(s)*3/4] + "..." }},
		{"a line of it", func(s string) string { lines := strings.Split(strings.TrimSpace(s), "\n"); return lines[len(lines)/2] }},
	}
	for name, e := range map[string]*base64.Encoding{"base64": base64.StdEncoding, "base64url": base64.URLEncoding,
		"raw base64": base64.RawStdEncoding, "raw base64url": base64.RawURLEncoding} {
		forms = append(forms,
			form{name, b64(e, "", "")},
			form{name + " of user:", b64(e, "user:", "")},
			form{name + " of bob:", b64(e, "bob:", "")},
			form{name + " of JSON", b64(e, `{"a":"b","password":"`, `"}`)},
			form{name + " and more", b64(e, "", ":more")},
			form{name + " with a newline", b64(e, "", "\n")},
		)
	}
	return forms
}

func wrap(s string, n int) string {
	var b strings.Builder
	for i, c := range s {
		if i > 0 && i%n == 0 {
			b.WriteByte('\n')
		}
		b.WriteRune(c)
	}
	return b.String()
}

// plantedSecrets are of the kinds that Kubernetes has in Secrets.
func plantedSecrets(r *rand.Rand, n int) []string {
	word := func(n int) string {
		const letters = "abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789"
		b := make([]byte, n)
		for i := range b {
			b[i] = letters[r.IntN(len(letters))]
		}
		return string(b)
	}
	kinds := []func() string{
		func() string { return word(12) },
		func() string { return word(24) + "\n" },
		func() string { return " " + word(16) + " " },
		func() string { return word(5) + " " + word(6) + " " + word(7) },
		func() string { return word(4) + `"` + word(8) + `\` + word(6) + "&=" + word(4) },
		func() string { return "pässwörd-" + word(10) },
		func() string {
			return "-----BEGIN PRIVATE KEY-----\n" + word(64) + "\n" + word(64) + "\n" + word(20) + "\n-----END PRIVATE KEY-----\n"
		},
		func() string { return word(9 << 10) },
		func() string {
			return hex.EncodeToString([]byte(word(16)))
		},
		func() string { return "eyJ" + word(40) + "." + word(60) + "." + word(40) },
	}
	all := make([]string, n)
	for i := range all {
		all[i] = kinds[i%len(kinds)]()
	}
	return all
}

// visible returns a run of the secret's own characters that the text still shows, if there is one.
func visible(text, secret string) string {
	const run = 6
	flat := strings.Join(strings.Fields(strings.ToLower(secret)), "")
	text = strings.Join(strings.Fields(strings.ToLower(text)), "")
	for i := 0; i+run <= len(flat); i++ {
		// A run of quotes and escapes is nobody's secret.
		alnum := strings.IndexFunc(flat[i:i+run], func(c rune) bool { return !isWord(c) }) < 0
		if alnum && strings.Contains(text, flat[i:i+run]) {
			return flat[i : i+run]
		}
	}
	return ""
}

// TestNoFormOfASecretIsShown plants 200 secrets in all forms.
func TestNoFormOfASecretIsShown(t *testing.T) {
	forms := allForms()
	if len(forms) < 50 {
		t.Fatalf("only %d forms", len(forms))
	}
	r := rand.New(rand.NewPCG(1, 2))
	for i, secret := range plantedSecrets(r, 200) {
		if i >= 20 && len(secret) > 1<<10 {
			continue // one is slow enough
		}
		m := New()
		m.Add(secret)
		for _, f := range forms {
			written := f.write(secret)
			text := "rpc error: login failed: " + written + " was refused by the server"
			got := m.Redact(text, mark)
			if !strings.Contains(got, mark) {
				t.Fatalf("%s: %q is shown: %q", f.name, secret, got)
			}
			// In addition to the text around it, a few characters at the edges of an encoding can
			// be left.
			rest := strings.ReplaceAll(got, mark, " ")
			for _, around := range []string{"rpc error: login", "refused by the server"} {
				if !strings.Contains(got, around) {
					t.Errorf("%s: the text around %q is gone: %q", f.name, secret, got)
				}
				rest = strings.ReplaceAll(rest, around, "")
			}
			if run := visible(rest, secret); run != "" {
				t.Fatalf("%s: %q of %q is shown: %q", f.name, run, secret, got)
			}
			if run := visible(rest, written); run != "" && !strings.Contains(f.name, "of ") && !strings.Contains(f.name, "more") &&
				!strings.HasPrefix(f.name, "as a") && !strings.HasPrefix(f.name, "in a URL") {
				t.Fatalf("%s: %q of %q is shown: %q", f.name, run, written, got)
			}
		}
		for _, harmless := range []string{"volume vol-1 not found", "mount.nfs: connection timed out", "exit status 32"} {
			if got := m.Redact(harmless, mark); got != harmless {
				t.Errorf("%q becomes %q", harmless, got)
			}
		}
	}
}

func TestFieldsOfAStructuredSecret(t *testing.T) {
	for _, secret := range []string{
		`{"type":"x","user":"bob","password":"s3cr","nested":{"list":["k3y1",{"deep":"d33p"}]},"pin":314159}`,
		"user=bob\npassword=s3cr\nk3y1: d33p\npin 314159\n",
		"bob:s3cr;k3y1,d33p&pin=314159",
		"https://bob:s3cr@host?k3y1=d33p|314159",
	} {
		m := New()
		m.Add(secret)
		for _, value := range []string{"s3cr", "d33p", "314159", "S3CR"} {
			got := m.Redact("refused: '"+value+"' is wrong", mark)
			if strings.Contains(got, value) || !strings.Contains(got, "is wrong") {
				t.Errorf("%q: %q is shown: %q", secret, value, got)
			}
		}
		if got := m.Redact("obs3crx is another word", mark); got != "obs3crx is another word" {
			t.Errorf("%q: %q", secret, got)
		}
	}
}

// TestWhatIsNotFound: the man page says with the same words what is not found.
func TestWhatIsNotFound(t *testing.T) {
	manual, err := os.ReadFile("../../../packaging/man/csi-registrar.1")
	if err != nil {
		t.Fatal(err)
	}
	const secret = "Xk29dLq8RtVw"
	reversed := []byte(secret)
	slices.Reverse(reversed)
	hashed := sha256.Sum256([]byte(secret))
	var references string
	for _, c := range []byte(secret) {
		references += fmt.Sprintf("&#%d;", c)
	}
	for _, c := range []struct{ words, secret, text string }{
		{"a value of one or two characters", "ab", "ab is refused"},
		{"a part of fewer than 6 characters that is no field", secret, "it begins with Xk29d"},
		{"a secret in base32", secret, base32.StdEncoding.EncodeToString([]byte(secret))},
		{"in character references (&#83;)", secret, references},
		{"with separators between its characters", secret, strings.Join(strings.Split(secret, ""), "-----")},
		{"a secret that was reversed, hashed or encrypted", secret, string(reversed)},
		{"a secret that was reversed, hashed or encrypted", secret, hex.EncodeToString(hashed[:])},
	} {
		m := New()
		m.Add(c.secret)
		if got := m.Redact(c.text, mark); got != c.text {
			t.Errorf("%q is found in %q: the documentation says that it is not", c.secret, c.text)
		}
		if !strings.Contains(string(manual), c.words) {
			t.Errorf("csi-registrar(1) does not say %q", c.words)
		}
	}
}

func TestMoreThanAMatcherRemembers(t *testing.T) {
	m := New()
	r := rand.New(rand.NewPCG(3, 4))
	for range 100 {
		for _, secret := range plantedSecrets(r, 10) {
			m.Add(secret)
		}
	}
	if !m.Full() {
		t.Fatal("it is never full")
	}
}

// TestMatchingIsLinear: a driver writes the texts, and the trace must keep up.
func TestMatchingIsLinear(t *testing.T) {
	m := New()
	m.Add(strings.Repeat("a", 1<<16))
	began := time.Now()
	m.Redact(strings.Repeat("a", 1<<20), mark)
	if took := time.Since(began); took > 30*time.Second {
		t.Errorf("a text of 1 MiB takes %s", took)
	}
}

// Encodings in which a driver's language or library may write bytes.
func TestEncodingsOfBytes(t *testing.T) {
	const secret = "S3cr3t/Pa55"
	m := New()
	m.Add(secret)
	var percent, escapes string
	for _, c := range []byte(secret) {
		percent += fmt.Sprintf("%%%02X", c)
		escapes += fmt.Sprintf("\\u%04X", c)
	}
	for _, text := range []string{fmt.Sprint([]byte(secret)), percent, escapes} {
		if got := m.Redact("x "+text+" y", mark); strings.Contains(got, text[1:len(text)-1]) || !strings.HasPrefix(got, "x ") || !strings.HasSuffix(got, " y") || len(got) > 30 {
			t.Errorf("%s becomes %s", text, got)
		}
	}
}

// A short secret is found at the very end of a text, too.
func TestShortSecretAtTheEnd(t *testing.T) {
	m := New()
	m.Add("ab1cd")
	if got := m.Redact("wrong password ab1cd", mark); got != "wrong password "+mark {
		t.Errorf("%q", got)
	}
}
