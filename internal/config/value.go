package config

import (
	"errors"
	"fmt"
	"os/user"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// maxSocketPath is how many bytes the path of a Unix socket has at most (sun_path, less
// the zero at its end).
const maxSocketPath = 107

// value is a value as a file has it.
type value struct {
	v    any // as in document.tree
	spot spot
}

// fault is what is wrong with a value. Where the hint is empty the field's own says what
// would be right.
type fault struct {
	problem, hint string
	line          int // 0: the key's
}

func faultf(format string, args ...any) *fault {
	return &fault{problem: fmt.Sprintf(format, args...)}
}

// wrongType says what was written instead of the right type.
func wrongType(v value) *fault {
	return &fault{problem: "is " + describe(v.v, v.spot.text)}
}

// describe says what a value is, as it was written.
func describe(v any, text string) string {
	if text == "" || strings.Contains(text, "\n") {
		text = fmt.Sprint(v)
	}
	text = clip(clean(text))
	switch v := v.(type) {
	case string:
		return "the string " + shown(v)
	case bool:
		return "the boolean " + text
	case int64:
		return "the integer " + text
	case float64:
		return "the float " + text
	case time.Time:
		return "the date or time " + text
	case []any:
		return "a list"
	case []map[string]any:
		return "a list of tables"
	default:
		return "a table"
	}
}

// shown is a value in a message: quoted, on one line, not too long.
func shown(s string) string { return quote(clip(s)) }

func clip(s string) string {
	const most = 120 // characters
	if r := []rune(s); len(r) > most {
		return string(r[:most]) + "…"
	}
	return s
}

// text is a value that must be a string, of characters that can be part of a path or a name.
func text(v value) (string, *fault) {
	s, ok := v.v.(string)
	if !ok {
		return "", wrongType(v)
	}
	if i := strings.IndexFunc(s, unicode.IsControl); i >= 0 {
		return "", &fault{problem: fmt.Sprintf("has the control character U+%04X in it", []rune(s[i:])[0]),
			hint: "take it out"}
	}
	if s == "" {
		return "", faultf("is empty")
	}
	return s, nil
}

// oneOf is a value that must be one of a few words.
func oneOf(v value, words ...string) (string, *fault) {
	s, bad := text(v)
	if bad == nil && !slices.Contains(words, s) {
		bad = faultf("%s is not known", shown(s))
	}
	return s, bad
}

func boolean(v value) (bool, *fault) {
	b, ok := v.v.(bool)
	if !ok {
		return false, wrongType(v)
	}
	return b, nil
}

// duration is a value that must be a time span above zero.
func duration(v value) (time.Duration, *fault) {
	s, bad := text(v)
	if bad != nil {
		return 0, bad
	}
	d, err := time.ParseDuration(s)
	switch {
	case err != nil:
		return 0, faultf("%s is not a duration", shown(s))
	case d < 0:
		return 0, faultf("%s is negative", shown(s))
	case d == 0:
		return 0, faultf("%s is zero", shown(s))
	}
	return d, nil
}

// absolute is a value that must be an absolute path in its shortest form, so that one
// place has one name.
func absolute(v value) (string, *fault) {
	s, bad := text(v)
	if bad != nil {
		return "", bad
	}
	return s, checkPath(s)
}

func checkPath(s string) *fault {
	short := path.Clean(s)
	switch {
	case !strings.HasPrefix(s, "/"):
		return faultf("%s is not an absolute path", shown(s))
	case slices.Contains(strings.Split(s, "/"), ".."):
		return &fault{problem: shown(s) + ` has ".." in it`, hint: "if it means " + shown(short) + ", write that"}
	case s != short:
		return &fault{problem: shown(s) + " is not the shortest form of the path", hint: "write " + shown(short)}
	}
	return nil
}

// socketPath is a value that must be the path of a Unix socket. A "unix://" before it,
// as the kubelet and gRPC write it, is dropped.
func socketPath(v value) (string, *fault) {
	s, bad := text(v)
	if bad != nil {
		return "", bad
	}
	s = strings.TrimPrefix(s, "unix://")
	switch rest, scheme := strings.CutPrefix(s, "unix:"); {
	case scheme && strings.HasPrefix(rest, "/"):
		return "", &fault{problem: shown(s) + " is not an absolute path", hint: "write " + shown(path.Clean(rest))}
	case strings.HasPrefix(s, "@"):
		return "", faultf("%s is an abstract socket, the kubelet needs one with a path", shown(s))
	}
	if bad := checkPath(s); bad != nil {
		return "", bad
	}
	switch {
	case s == "/":
		return "", faultf(`"/" is a folder`)
	case len(s) > maxSocketPath:
		return "", &fault{problem: fmt.Sprintf("the path has %d bytes, a Unix socket's has at most %d", len(s), maxSocketPath),
			hint: "make it " + shorter(len(s)-maxSocketPath)}
	}
	return s, nil
}

func shorter(bytes int) string {
	if bytes == 1 {
		return "one byte shorter"
	}
	return fmt.Sprintf("%d bytes shorter", bytes)
}

// versions is a value that must be a list of CSI versions of which the kubelet takes
// one: it wants the highest that it knows to be 1.x, and passes over 2.x.
func versions(v value) ([]string, *fault) {
	list, ok := v.v.([]any)
	if !ok {
		return nil, wrongType(v)
	}
	if len(list) == 0 {
		return nil, faultf("is an empty list")
	}
	var out []string
	usable := false
	for i, e := range list {
		line := 0
		if i < len(v.spot.elements) {
			line = v.spot.elements[i]
		}
		s, isString := e.(string)
		if !isString {
			return nil, &fault{problem: "has " + describe(e, "") + " in it", line: line}
		}
		if !isVersion(s) {
			return nil, &fault{problem: shown(s) + " is not a version", line: line}
		}
		usable = usable || strings.HasPrefix(s, "1.")
		out = append(out, s)
	}
	if !usable {
		return nil, &fault{problem: "has no version 1.x", hint: `the kubelet takes no other: add "1.0.0"`}
	}
	return out, nil
}

// isVersion tells whether s is three numbers, as in 1.0.0.
func isVersion(s string) bool {
	numbers := strings.Split(s, ".")
	for _, n := range numbers {
		if n == "" || len(n) > 9 || strings.Trim(n, "0123456789") != "" || n[0] == '0' && n != "0" {
			return false
		}
	}
	return len(numbers) == 3
}

// owner is a value that must be a user: a uid, a name that exists says, or OwnerAny.
func owner(v value, exists func(name string) error) (string, *fault) {
	s, bad := text(v)
	if bad != nil {
		if _, number := v.v.(int64); number {
			bad.hint = fmt.Sprintf(`must be in quotes: "%d"`, v.v)
		}
		return "", bad
	}
	if strings.Trim(s, "0123456789") == "" {
		// The highest means "no user" to the system.
		if uid, err := strconv.ParseUint(s, 10, 32); err != nil || uid == 1<<32-1 {
			return "", faultf("%s is not a uid", shown(s))
		}
		return s, nil
	}
	if s == OwnerAny || s == "root" {
		return s, nil
	}
	if err := exists(s); err != nil {
		return "", &fault{problem: err.Error()}
	}
	return s, nil
}

// userExists asks the system for a user. (The static binary reads /etc/passwd only: a
// user from elsewhere must be given by number, which the hint says.)
func userExists(name string) error {
	_, err := user.Lookup(name)
	var unknown user.UnknownUserError
	switch {
	case errors.As(err, &unknown):
		return fmt.Errorf("there is no user %s", shown(name))
	case err != nil:
		return fmt.Errorf("cannot look up the user %s: %s", shown(name), clean(err.Error()))
	}
	return nil
}
