package bugreport

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

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

// learn finds host names and node IDs that a text labels as such.
func (x *identities) learn(s string) {
	for _, m := range nodeName().FindAllStringSubmatch(s, -1) {
		x.name("node", m[1])
	}
}

// minNumber is the shortest number that is replaced wherever it is.
const minNumber = 5

func (x *identities) name(kind, name string) {
	name = strings.ToLower(strings.TrimFunc(name, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) }))
	if x.placeholder[name] != "" || name == "" {
		return
	}
	x.placeholderFor(kind, name)
	if strings.ContainsFunc(name, unicode.IsLetter) || len(name) >= minNumber {
		x.names = append(x.names, name)
	}
}

func (x *identities) placeholderFor(kind, value string) string {
	if x.placeholder[value] == "" {
		x.count[kind]++
		x.placeholder[value] = fmt.Sprintf("%s-%d", kind, x.count[kind])
	}
	return x.placeholder[value]
}

// replace replaces the known names, and all addresses except those that every machine has.
func (x *identities) replace(s string) string {
	if len(x.names) > 0 {
		// The longest first.
		slices.SortFunc(x.names, func(a, b string) int { return len(b) - len(a) })
		var quoted []string
		for _, name := range x.names {
			quoted = append(quoted, regexp.QuoteMeta(name))
		}
		all := regexp.MustCompile(`(?i)\b(?:` + strings.Join(quoted, "|") + `)\b`)
		s = all.ReplaceAllStringFunc(s, func(name string) string { return x.placeholder[strings.ToLower(name)] })
	}
	s = replace(nodeName(), s, func(m []string) string { // short numbers, only after a label
		if placeholder := x.placeholder[m[1]]; placeholder != "" {
			return strings.TrimSuffix(m[0], m[1]) + placeholder
		}
		return m[0]
	})
	ip := func(text string) string {
		addr, err := netip.ParseAddr(text)
		if err != nil || addr.IsLoopback() || addr.IsUnspecified() {
			return text
		}
		return x.placeholderFor("ip", addr.String())
	}
	return ipv6().ReplaceAllStringFunc(ipv4().ReplaceAllStringFunc(s, ip), ip)
}
