// Package secrettext finds known secrets in untrusted texts: an error of a driver that repeats a
// part of its request, or a line of a log.
package secrettext

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash/maphash"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

const (
	// window is the number of consecutive characters of a secret that are found anywhere. Shorter
	// sequences are found only if they are whole values.
	window = 6
	// minValue is the shortest value that is looked for: shorter ones are in every text.
	minValue = 3
	// maxGap is the number of characters between two matches that are hidden with them, such as \n
	// in quotes.
	maxGap = 4
	// maxWindows limits the memory of a Matcher to about 16 MiB.
	maxWindows = 1 << 18
)

// Matcher remembers secrets and finds them in texts. It ignores case and white space, knows the
// lines and fields of a secret, and finds it quoted, percent-encoded, in \u escapes, in hexadecimal
// digits, as the decimal numbers of its bytes and in base64, alone or as a part, as in base64 of
// user:password.
//
// It does not find a value of one or two characters, a part of fewer than 6 characters that is not
// a field, a secret in base32, in character references or with separators between its characters,
// or a secret that was reversed, hashed or encrypted. Not safe for concurrent use.
type Matcher struct {
	seed    maphash.Seed
	added   map[uint64]bool // hashes of the secrets that are known
	windows map[uint64]bool // hashes of all windows of all forms
	values  map[string]bool // folded values that are shorter than a window
	full    bool
}

// New returns a Matcher without secrets.
func New() *Matcher {
	return &Matcher{seed: maphash.MakeSeed(), added: map[uint64]bool{}, windows: map[uint64]bool{}, values: map[string]bool{}}
}

// Full reports whether the Matcher has reached its limit. It does not find secrets that are added
// after that.
func (m *Matcher) Full() bool { return m.full }

// Add remembers a secret.
func (m *Matcher) Add(secret string) {
	h := maphash.String(m.seed, secret)
	if m.added[h] || m.full {
		return
	}
	m.added[h] = true
	for _, form := range forms(secret) {
		m.remember(form)
	}
	for _, field := range fields(secret) {
		m.rememberValue(field)
	}
}

// remember adds all windows of a form, or the form itself if it is shorter than a window.
func (m *Matcher) remember(form string) {
	folded := fold(form)
	if len(folded) < window {
		m.rememberValue(form)
		return
	}
	for i := range len(folded) - window + 1 {
		m.windows[m.hash(folded[i:i+window])] = true
	}
	m.full = len(m.windows) > maxWindows
}

// rememberValue adds a whole value, and all its windows if it has any.
func (m *Matcher) rememberValue(value string) {
	switch folded := fold(value); {
	case len(folded) >= window:
		m.remember(value)
	case len(folded) >= minValue:
		m.values[text(folded)] = true
		for _, form := range encodings(value) {
			if len(fold(form)) >= window {
				m.remember(form)
			}
		}
	}
}

// forms returns the forms in which a secret may be written.
func forms(secret string) []string {
	trimmed := strings.TrimSpace(secret)
	all := slices.Concat([]string{secret}, encodings(secret), encodings(trimmed))
	if plain, err := base64.StdEncoding.DecodeString(trimmed); err == nil && utf8.Valid(plain) {
		all = append(all, string(plain))
	}
	return all
}

// encodings returns the quoted and encoded forms of a text. Base64 has three: the text can begin at
// each of the three bytes of a group. Characters that also depend on the neighbors are left out.
func encodings(s string) []string {
	quoted, _ := json.Marshal(s) // of a string it cannot fail
	all := []string{
		unquoted(strconv.Quote(s)), unquoted(strconv.QuoteToASCII(s)), unquoted(string(quoted)),
		url.QueryEscape(s), url.PathEscape(s), hex.EncodeToString([]byte(s)),
		strings.Trim(fmt.Sprint([]byte(s)), "[]"),
	}
	var percent, escapes strings.Builder
	for _, c := range []byte(s) {
		fmt.Fprintf(&percent, "%%%02x", c)
	}
	for _, unit := range utf16.Encode([]rune(s)) {
		fmt.Fprintf(&escapes, `\u%04x`, unit)
	}
	all = append(all, percent.String(), escapes.String())
	for offset := range 3 {
		for _, encoding := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			encoded := encoding.EncodeToString(append(make([]byte, offset), s...))
			first := []int{0, 2, 3}[offset]
			if last := len(encoded) - (len(s)+offset)%3; last > first {
				all = append(all, encoded[first:last])
			}
		}
	}
	return all
}

// unquoted returns a quoted text without its quotes.
func unquoted(s string) string { return strings.TrimSuffix(strings.TrimPrefix(s, `"`), `"`) }

// fields returns the values in a structured secret: JSON, lines, KEY=VALUE and KEY: VALUE, and
// values between separators.
func fields(secret string) []string {
	var all []string
	var document any
	if json.Unmarshal([]byte(secret), &document) == nil {
		if all = jsonValues(document); strings.ContainsAny(secret, "{[") {
			return all // its names are no secrets
		}
	}
	const separators = "\t\n\v\f\r ,;&|\"'{}[]()<>:=@/?"
	for begin := 0; begin < len(secret); {
		n := strings.IndexAny(secret[begin:], separators)
		if n < 0 {
			return append(all, secret[begin:])
		}
		// The text before = or : is the name of a value.
		if end := begin + n; secret[end] != '=' && secret[end] != ':' {
			all = append(all, secret[begin:end])
		}
		begin += n + 1
	}
	return all
}

func jsonValues(document any) (all []string) {
	switch v := document.(type) {
	case string:
		all = append(append(all, v), fields(v)...)
	case float64:
		all = append(all, strconv.FormatFloat(v, 'f', -1, 64))
	case []any:
		for _, e := range v {
			all = append(all, jsonValues(e)...)
		}
	case map[string]any:
		for _, e := range v {
			all = append(all, jsonValues(e)...)
		}
	}
	return all
}

// Redact returns the text with mark in place of each secret that it finds.
func (m *Matcher) Redact(s, mark string) string {
	folded := fold(s)
	found := make([]bool, len(folded))
	for i := range len(folded) - window + 1 {
		if m.windows[m.hash(folded[i:i+window])] {
			for j := range window {
				found[i+j] = true
			}
		}
	}
	m.findValues(s, folded, found)
	var b strings.Builder
	end := 0 // of what is written or hidden
	for i := 0; i < len(folded); i++ {
		if !found[i] {
			continue
		}
		last := i
		for j := i + 1; j < len(folded) && j <= last+1+maxGap; j++ {
			if found[j] {
				last = j
			}
		}
		b.WriteString(s[end:folded[i].begin] + mark)
		end, i = folded[last].end, last
	}
	return b.String() + s[end:]
}

// findValues finds the values that are shorter than a window, where they are separate words.
func (m *Matcher) findValues(s string, folded []char, found []bool) {
	if len(m.values) == 0 {
		return
	}
	for i := range folded {
		if !wordBegins(s, folded[i].begin) {
			continue
		}
		for n := minValue; n < window && i+n <= len(folded); n++ {
			if wordEnds(s, folded[i+n-1].end) && m.values[text(folded[i:i+n])] {
				for j := range n {
					found[i+j] = true
				}
			}
		}
	}
}

func wordBegins(s string, at int) bool {
	before, _ := utf8.DecodeLastRuneInString(s[:at])
	return at == 0 || !isWord(before)
}

func wordEnds(s string, at int) bool {
	after, _ := utf8.DecodeRuneInString(s[at:])
	return at == len(s) || !isWord(after)
}

func isWord(c rune) bool { return unicode.IsLetter(c) || unicode.IsDigit(c) }

// char is a character that counts, in lower case, and where it is in the text.
type char struct {
	c          rune
	begin, end int
}

// fold leaves out white space and invisible characters.
func fold(s string) []char {
	folded := make([]char, 0, len(s))
	for i, c := range s {
		if !unicode.IsSpace(c) && !unicode.IsControl(c) && !unicode.Is(unicode.Cf, c) {
			_, size := utf8.DecodeRuneInString(s[i:])
			folded = append(folded, char{unicode.ToLower(unicode.ToUpper(c)), i, i + size})
		}
	}
	return slices.Clip(folded)
}

func text(folded []char) string {
	var b strings.Builder
	for _, c := range folded {
		b.WriteRune(c.c)
	}
	return b.String()
}

func (m *Matcher) hash(folded []char) uint64 {
	var b [window * utf8.UTFMax]byte
	n := 0
	for _, c := range folded {
		n += utf8.EncodeRune(b[n:], c.c)
	}
	return maphash.Bytes(m.seed, b[:n])
}
