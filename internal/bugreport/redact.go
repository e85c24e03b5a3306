package bugreport

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
	"unicode"
)

// mark stands for what was taken out.
const mark = "<redacted>"

// pattern compiles on first use: the daemon is the same program, and never needs any of them.
func pattern(expr string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expr) })
}

// What is secret by its form. More is taken out than is secret, rather than less.
var (
	privateKey  = pattern(`(?s)-----BEGIN [^-]*PRIVATE KEY.*?(?:-----END [^-]*-----|\z)`)
	environment = pattern(`(?m)^([ \t]*(?:Environment|SetCredential|SetCredentialEncrypted)=)(?:[^\n]*\\\n(?:[ \t]*[#;][^\n]*\n)*)*[^\n]*`)
	userInfo    = pattern(`://[^\s@"']+@`)
	bearer      = pattern(`(?i)\b(bearer|basic)[ \t]+[^\s"'\\]+`)
	webToken    = pattern(`\beyJ[\w-]+\.[\w.-]*`)
	longWord    = pattern(`[A-Za-z0-9+/_=-]+`)

	// named matches from what names a secret up to its value: a separator, or for a flag a space.
	secretNames = []string{"token", "pass", "pwd", "secret", "credential", "authoriz", "cookie", "key", "signature", "context", "attributes"}
	named       = pattern(`(?i)(?:` + strings.Join(secretNames, "|") + `)[a-z0-9_.-]*(?:\\*["'\]])*(?:[ \t]*[:=]+[ \t]*|[ \t]+|[{<\[])`)
)

// secrets takes out what looks like a secret.
func secrets(s string) string {
	s = privateKey().ReplaceAllLiteralString(s, mark)
	s = environment().ReplaceAllString(s, "${1}"+mark)
	s = userInfo().ReplaceAllLiteralString(s, "://"+mark+"@")
	s = bearer().ReplaceAllString(s, "$1 "+mark)
	s = webToken().ReplaceAllLiteralString(s, mark)
	var b strings.Builder
	for line := range strings.Lines(s) {
		lower := strings.ToLower(line)
		if slices.ContainsFunc(secretNames, func(name string) bool { return strings.Contains(lower, name) }) {
			line = namedSecrets(line)
		}
		b.WriteString(line)
	}
	return longWord().ReplaceAllStringFunc(b.String(), func(word string) string {
		if len(word) < 32 {
			return word
		}
		for part := range strings.FieldsFuncSeq(word, func(r rune) bool { return r == '/' || r == '=' }) {
			if random(part) {
				return mark
			}
		}
		return word
	})
}

// random reports whether a part of a long word is no word or number of a person or a UUID:
// base64, or a long hexadecimal number.
func random(s string) bool {
	has := func(is func(rune) bool) bool { return strings.ContainsFunc(s, is) }
	return has(unicode.IsDigit) && (len(s) >= 10 && has(unicode.IsUpper) && has(unicode.IsLower) || len(s) >= 40 && !strings.Contains(s, "-"))
}

// namedSecrets takes out of a line the values of what is named as a secret.
func namedSecrets(s string) string {
	var b strings.Builder
	for {
		at := named().FindStringIndex(s)
		if at == nil {
			return b.String() + s
		}
		start, end := at[0], at[1]
		switch last := s[end-1]; {
		case strings.IndexByte("{<[", last) >= 0: // the value is a list
			end--
		case !strings.ContainsAny(s[start:end], ":=") && !isFlag(s[:start]): // only words
			b.WriteString(s[:end])
			s = s[end:]
			continue
		}
		b.WriteString(s[:end] + mark)
		s = s[end+valueLen(s[end:]):]
	}
}

// isFlag reports whether text ends with the begin of a flag, as in "kubelet --bootstrap-".
func isFlag(text string) bool {
	word := text[strings.LastIndexFunc(text, unicode.IsSpace)+1:]
	return strings.HasPrefix(strings.TrimLeft(word, `"'`), "-")
}

// valueLen is the length of the value at the beginning of a line: a text in quotes, also where
// these are escaped; a list in brackets; else a word. What has no end ends with the line.
func valueLen(line string) int {
	line = strings.TrimSuffix(line, "\n")
	unquoted := strings.TrimLeft(line, `\`)
	escapes := len(line) - len(unquoted)
	list := strings.TrimPrefix(unquoted, "map")
	switch {
	case unquoted == "":
	case unquoted[0] == '"' || unquoted[0] == '\'':
		for i := escapes + 1; i < len(line); i++ {
			if line[i] == unquoted[0] && i-len(strings.TrimRight(line[:i], `\`)) <= escapes {
				return i + 1
			}
		}
	case list != "" && strings.IndexByte("{<[", list[0]) >= 0:
		depth := 0
		for i := len(line) - len(list); i < len(line); i++ {
			switch line[i] {
			case '{', '<', '[':
				depth++
			case '}', '>', ']':
				if depth--; depth == 0 {
					return i + 1
				}
			}
		}
	default:
		if i := strings.IndexAny(line, " \t\"'\\"); i >= 0 {
			return i
		}
	}
	return len(line)
}

// identities replaces host names, node ids and IP addresses by placeholders, the same one
// wherever a value is found.
type identities struct {
	names       []string          // host names and node ids
	placeholder map[string]string // by name in lower case, or address
	count       map[string]int    // by kind
}

func newIdentities(host string) *identities {
	x := &identities{placeholder: map[string]string{}, count: map[string]int{}}
	short, _, _ := strings.Cut(host, ".")
	for _, name := range []string{host, short} {
		x.name("host", name)
	}
	return x
}

var (
	nodeName = pattern(`(?i)\b(?:node_?(?:id|name)?|hostname)\\*"?(?:=\\*"?|:[ \t]*\\*")([^\s"'\\,;]+)`)
	ipv4     = pattern(`\b\d{1,3}(?:\.\d{1,3}){3}\b`)
	ipv6     = pattern(`\b[0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f]{0,4}){2,7}`)
)

// learn finds the names that a text calls by what they are.
func (x *identities) learn(s string) {
	for _, m := range nodeName().FindAllStringSubmatch(s, -1) {
		x.name("node", m[1])
	}
}

func (x *identities) name(kind, name string) {
	name = strings.ToLower(strings.TrimFunc(name, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) }))
	if x.placeholder[name] == "" && strings.ContainsFunc(name, unicode.IsLetter) {
		x.names = append(x.names, name)
		x.of(kind, name)
	}
}

func (x *identities) of(kind, value string) string {
	if x.placeholder[value] == "" {
		x.count[kind]++
		x.placeholder[value] = fmt.Sprintf("%s-%d", kind, x.count[kind])
	}
	return x.placeholder[value]
}

// replace takes the names out that were learned, and all addresses but those that every
// machine has.
func (x *identities) replace(s string) string {
	if len(x.names) > 0 {
		slices.SortFunc(x.names, func(a, b string) int { return len(b) - len(a) }) // the longest first
		var quoted []string
		for _, name := range x.names {
			quoted = append(quoted, regexp.QuoteMeta(name))
		}
		all := regexp.MustCompile(`(?i)\b(?:` + strings.Join(quoted, "|") + `)\b`)
		s = all.ReplaceAllStringFunc(s, func(name string) string { return x.placeholder[strings.ToLower(name)] })
	}
	ip := func(text string) string {
		addr, err := netip.ParseAddr(text)
		if err != nil || addr.IsLoopback() || addr.IsUnspecified() {
			return text
		}
		return x.of("ip", addr.String())
	}
	return ipv6().ReplaceAllStringFunc(ipv4().ReplaceAllStringFunc(s, ip), ip)
}
