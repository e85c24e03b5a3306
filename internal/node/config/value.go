package config

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"

	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
)

// fault describes an invalid value. If the hint is empty, the hint of the field applies.
type fault struct{ problem, hint string }

func faultf(format string, args ...any) *fault {
	return &fault{problem: fmt.Sprintf(format, args...)}
}

// text parses a string without control characters.
func text(v any) (string, *fault) {
	s, ok := v.(string)
	if !ok {
		return "", faultf("is not a string")
	}
	if i := strings.IndexFunc(s, unicode.IsControl); i >= 0 {
		return "", &fault{fmt.Sprintf("has the control character U+%04X in it", []rune(s[i:])[0]), "remove it"}
	}
	if s == "" {
		return "", faultf("is empty")
	}
	return s, nil
}

// oneOf returns a parser of one of the given words.
func oneOf[W ~string](words ...W) func(v any) (W, *fault) {
	return func(v any) (W, *fault) {
		s, err := text(v)
		if err == nil && !slices.Contains(words, W(s)) {
			err = faultf("%s is not known", safetext.Quote(s))
		}
		return W(s), err
	}
}

func boolean(v any) (bool, *fault) {
	b, ok := v.(bool)
	if !ok {
		return false, faultf("is not a boolean")
	}
	return b, nil
}

// duration returns a parser of a duration for which valid is true; problem describes any other.
func duration(valid func(time.Duration) bool, problem string) func(v any) (time.Duration, *fault) {
	return func(v any) (time.Duration, *fault) {
		s, err := text(v)
		if err != nil {
			return 0, err
		}
		d, parseErr := time.ParseDuration(s)
		switch {
		case parseErr != nil:
			return 0, faultf("%s is not a duration", safetext.Quote(s))
		case !valid(d):
			return 0, faultf("%s %s", safetext.Quote(s), problem)
		}
		return d, nil
	}
}

// absolute parses an absolute path. It must be in its shortest form, so that a file has one name.
func absolute(v any) (string, *fault) {
	s, err := text(v)
	if err == nil {
		err = checkPath(s)
	}
	return s, err
}

func checkPath(s string) *fault {
	short := path.Clean(s)
	switch {
	case !strings.HasPrefix(s, "/"):
		return faultf("%s is not an absolute path", safetext.Quote(s))
	case s != short:
		return &fault{safetext.Quote(s) + " is not the shortest form of the path", "write " + safetext.Quote(short)}
	}
	return nil
}

// socketPath parses the path of a Unix socket. It drops a "unix://" before it, as the kubelet and
// gRPC write it.
func socketPath(v any) (string, *fault) {
	s, err := text(v)
	if err != nil {
		return "", err
	}
	s = strings.TrimPrefix(s, "unix://")
	err = checkPath(s)
	if over := len(s) - unixsock.MaxPath; err == nil && over > 0 {
		err = &fault{fmt.Sprintf("the path has %d bytes, a Unix socket's has at most %d", len(s), unixsock.MaxPath),
			fmt.Sprintf("make it shorter by %d", over)}
	}
	if s == "/" {
		err = faultf(`"/" is a directory`)
	}
	return s, err
}

// versions parses a list of CSI versions that the kubelet accepts: it takes the highest 1.x, and
// ignores 2.x.
func versions(v any) ([]string, *fault) {
	list, ok := v.([]any)
	if !ok {
		return nil, faultf("is not a list")
	}
	number := regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)$`)
	var out []string
	for _, e := range list {
		s, err := text(e)
		if err != nil || !number.MatchString(s) {
			return nil, faultf("has %s in it, which is not a version", safetext.Quote(fmt.Sprint(e)))
		}
		out = append(out, s)
	}
	if !slices.ContainsFunc(out, func(s string) bool { return strings.HasPrefix(s, "1.") }) {
		return nil, &fault{"has no version 1.x", `the kubelet accepts no other: add "1.0.0"`}
	}
	return out, nil
}

// owner parses a trust.SocketOwner.
func owner(v any) (trust.SocketOwner, *fault) {
	s, err := text(v)
	if err != nil {
		return "", err
	}
	o, ownerErr := trust.ParseOwner(s)
	if ownerErr != nil {
		return "", faultf("%s", safetext.Clean(ownerErr.Error(), maxCause))
	}
	return o, nil
}
