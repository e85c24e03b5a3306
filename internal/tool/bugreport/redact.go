package bugreport

import (
	"encoding/base64"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"unicode"

	"csi-registrar/internal/sys/safetext"
)

// mark replaces a secret.
const mark = "<redacted>"

// Patterns of secrets. They match too much rather than too little.
var (
	keyMark     = safetext.Pattern(`-----(BEGIN|END) [^-\n]*PRIVATE KEY.*`)
	keyBody     = safetext.Pattern(`[A-Za-z0-9+/=]+\s*$`)
	environment = safetext.Pattern(`(?m)^([ \t]*[#;]*[ \t]*(?:Environment|SetCredential|SetCredentialEncrypted)[ \t]*=)(?:[^\n]*\\\n(?:[ \t]*[#;][^\n]*\n)*)*[^\n]*`)
	userInfo    = safetext.Pattern(`://[^\s"']+@`)
	sasToken    = safetext.Pattern(`(?i)((?:\b|u0026|%26)sig(?:=|%3d|\\u003d))[^\s&"'\\]+`)
	accessKey   = safetext.Pattern(`\b(?:AKIA|ASIA|AIDA|AROA)[A-Z0-9]{16}\b`)
	userName    = safetext.Pattern(`(?i)\b(user_?name\\*["']?[ \t]*[=:]+[ \t]*\\*["']?)[^\s,;&"'\\]+`)
	goMap       = safetext.Pattern(`^map\[[\w.]+\][\w.*]*\{`)
	bearer      = safetext.Pattern(`(?i)\b(bearer|basic)[ \t]+[^\s"'\\]+`)
	webToken    = safetext.Pattern(`\beyJ[\w-]+\.[\w.-]*`)
	longWord    = safetext.Pattern(`[A-Za-z0-9+/_=-]+`)

	// named matches the name of a secret and what separates it from the value: a separator, or a
	// space after a flag.
	secretNames = []string{"token", "pass", "pwd", "secret", "credential", "authoriz", "cookie", "key", "signature", "context", "attributes"}
	named       = safetext.Pattern(`(?i)(?:` + strings.Join(secretNames, "|") + `)[a-z0-9_.-]*(?:\\*["'\]])*(?:[ \t]*[:=]+>?[ \t]*|\?|[ \t]+|[{<\[])`)
)

// redactor replaces text that looks like a secret, and later all repetitions of the secrets that it
// recognized, which are its keys.
type redactor map[string]bool

// sentences are parts of messages of systemd, the kubelet, the API server and csi-registrar that
// have the name of a secret before a word of the sentence, and words that can be secrets elsewhere.
// They stay, wherever they are.
var sentences = []string{"user credentials: No such process", "set up credentials: Protocol error", "/run/credentials: No such file",
	"kernel keyring: Permission denied", "Unknown key ", "failed to fetch token: serviceaccounts", "invalid bearer token",
	"this sandbox: the sandbox of this process", "has no credentials: the process", "unknown key: socket", "topology key: ",
	`" : failed`, `" : couldn't`, `" : rpc error`, `" : kubernetes.io/`, "NoCredentialProviders: no valid", `secret=""`,
	"authorization: server message", "insufficient_scope: authorization failed", "secrets are required: key "}

// shielded returns the replacer that puts numbers between zero bytes in place of sentences, and the
// one that puts them back. No text has zero bytes.
var shielded = sync.OnceValues(func() (shield, unshield *strings.Replacer) {
	var to, from []string
	for i, sentence := range sentences {
		number := fmt.Sprintf("\x00%d\x00", i)
		to, from = append(to, sentence, number), append(from, number, sentence)
	}
	return strings.NewReplacer(to...), strings.NewReplacer(from...)
})

// recognize replaces text that is a secret by its form or its name, and remembers the secrets.
func (r redactor) recognize(s string) string {
	shield, unshield := shielded()
	s = privateKeys(shield.Replace(s))
	s = replace(environment(), s, func(m []string) string {
		for line := range strings.Lines(m[0]) {
			r.namedSecrets(line)
		}
		return m[1] + mark
	})
	s = replace(userInfo(), s, func(m []string) string {
		_, password, _ := strings.Cut(strings.TrimSuffix(m[0][len("://"):], "@"), ":")
		r.remember("password", password)
		return "://" + mark + "@"
	})
	s = replace(sasToken(), s, func(m []string) string { r.remember("signature", m[0][len(m[1]):]); return m[1] + mark })
	s = replace(userName(), s, func(m []string) string { return m[1] + mark })
	s = accessKey().ReplaceAllLiteralString(s, mark)
	s = replace(bearer(), s, func(m []string) string { r.remember(m[1], m[0][len(m[1]):]); return m[1] + " " + mark })
	s = replace(webToken(), s, func(m []string) string { r.remember("token", m[0]); return mark })
	var b strings.Builder
	for line := range strings.Lines(s) {
		lower := strings.ToLower(line)
		if slices.ContainsFunc(secretNames, func(name string) bool { return strings.Contains(lower, name) }) {
			line = r.namedSecrets(line)
		}
		b.WriteString(line)
	}
	return unshield.Replace(longWord().ReplaceAllStringFunc(b.String(), func(word string) string {
		if len(word) < 32 {
			return word
		}
		for part := range strings.FieldsFuncSeq(word, func(r rune) bool { return r == '/' || r == '=' }) {
			if random(part) {
				r.remember("token", word)
				return mark
			}
		}
		return word
	}))
}

// replace is ReplaceAllStringFunc with the groups of a match.
func replace(p *regexp.Regexp, s string, with func(groups []string) string) string {
	return p.ReplaceAllStringFunc(s, func(found string) string { return with(p.FindStringSubmatch(found)) })
}

// repeated returns a function that replaces the secrets that recognize has remembered: as they are,
// in base64 and percent-encoded.
func (r redactor) repeated() func(string) string {
	var forms []string
	for secret := range r {
		forms = append(forms, secret, base64.RawStdEncoding.EncodeToString([]byte(secret)), url.QueryEscape(secret))
	}
	// The longest first: a secret can begin with another one.
	slices.SortFunc(forms, func(a, b string) int { return len(b) - len(a) })
	var pairs []string
	for _, form := range forms {
		pairs = append(pairs, form, mark)
	}
	secrets := strings.NewReplacer(pairs...)
	shield, unshield := shielded()
	return func(s string) string { return unshield.Replace(secrets.Replace(shield.Replace(s))) }
}

const (
	minRemembered = 6
	maxRemembered = 4 << 10
)

// notValues are words that follow the name of a secret in sentences and are not its value.
var notValues = []string{"required", "invalid", "incorrect", "expired", "missing", "unknown", "unset", "not set", "disabled", "enabled"}

// remember adds a value to the known secrets if it cannot be a word of the language or the name of
// an object: any value of a password, and other values that have capitals or digits.
func (r redactor) remember(name, value string) {
	value = strings.Trim(strings.TrimSpace(value), `"'\,;{}<>[]()`)
	name = strings.ToLower(strings.TrimFunc(name, func(c rune) bool { return !unicode.IsLetter(c) }))
	isPassword := strings.Contains(name, "pass") || strings.Contains(name, "pwd")
	switch {
	case len(value) < minRemembered, len(value) > maxRemembered, strings.Contains(value, mark), strings.HasPrefix(value, "/"):
	case strings.Contains(name, "context"), strings.Contains(name, "attributes"), slices.Contains(notValues, strings.ToLower(value)):
	case slices.ContainsFunc([]string{"name", "ref", "path", "file", "dir", "namespace"}, func(end string) bool { return strings.HasSuffix(name, end) }):
	case isPassword, strings.ContainsFunc(value, unicode.IsUpper), strings.ContainsFunc(value, unicode.IsDigit):
		r[value] = true
		if end := strings.IndexAny(value, ",;&"); end > 0 { // other options follow
			r.remember(name, value[:end])
		}
	}
}

// privateKeys replaces private keys in PEM, also if each line is an entry of a journal, in either
// order, or if one end is missing. Text that is not part of a key stays.
func privateKeys(s string) string {
	if !strings.Contains(s, "PRIVATE KEY") {
		return s
	}
	lines := strings.Split(s, "\n")
	for i, line := range lines {
		at := keyMark().FindStringSubmatchIndex(line)
		if at == nil {
			continue
		}
		end := line[at[2]:at[3]] == "END"
		for _, step := range []int{1, -1} {
			for j := i + step; j >= 0 && j < len(lines) && !strings.Contains(lines[j], "-----"); j += step {
				body := strings.TrimSpace(keyBody().FindString(lines[j]))
				// The last line of a key, beside its end, may be short.
				if last := end && j == i+step; body == "" || len(body) < 16 && !last {
					break
				}
				lines[j] = keyBody().ReplaceAllLiteralString(lines[j], mark)
			}
		}
		lines[i] = line[:at[0]] + mark
	}
	return strings.Join(lines, "\n")
}

// random reports whether a part of a long word looks random: base64 or a long hexadecimal number,
// but no UUID.
func random(s string) bool {
	has := func(is func(rune) bool) bool { return strings.ContainsFunc(s, is) }
	return has(unicode.IsDigit) && (len(s) >= 10 && has(unicode.IsUpper) && has(unicode.IsLower) || len(s) >= 40 && !strings.Contains(s, "-"))
}

// namedSecrets replaces the values in a line that have the name of a secret.
func (r redactor) namedSecrets(s string) string {
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
		// Only words.
		case !strings.ContainsAny(s[start:end], ":=?") && !isFlag(s[:start]) && !goMap().MatchString(s[end:]):
			b.WriteString(s[:end])
			s = s[end:]
			continue
		}
		b.WriteString(s[:end] + mark)
		value := s[end:][:valueLen(s[end:])]
		r.remember(s[start:end], value)
		s = s[end+len(value):]
	}
}

// isFlag reports whether text ends with the beginning of a flag, as in "kubelet --bootstrap-".
func isFlag(text string) bool {
	word := text[strings.LastIndexFunc(text, unicode.IsSpace)+1:]
	return strings.HasPrefix(strings.TrimLeft(word, `"'`), "-")
}

// valueLen returns the length of the value at the beginning of a line: a text in quotes, which may
// be escaped, a list in brackets, or a word. A value without an end extends to the end of the line.
func valueLen(line string) int {
	line = strings.TrimSuffix(line, "\n")
	unquoted := strings.TrimLeft(line, `\`)
	escapes := len(line) - len(unquoted)
	list := strings.TrimPrefix(unquoted, "map")
	if typed := goMap().FindString(unquoted); typed != "" {
		list = unquoted[len(typed)-1:]
	}
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
