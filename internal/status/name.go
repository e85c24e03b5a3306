package status

import (
	"errors"
	"fmt"
	"strings"
)

// MaxName is the longest driver name, in bytes: the CSI specification and the API
// server (a CSINode entry) both allow 63.
const MaxName = 63

// ErrName is the error, or wrapped by the error, of every refused name.
var ErrName = errors.New("not a driver name that the API server accepts")

// CheckName returns an error if a name may not be a CSI driver's. The kubelet itself takes any
// name; the API server wants a DNS-1123 subdomain once it is lower-cased, at most 63
// characters (seen with v1.36: Foo.Example registers, Under_score! does not). A name
// that passes is also safe as part of a file name: no separator, no leading dot.
func CheckName(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("%w: it is empty", ErrName)
	case len(name) > MaxName:
		return fmt.Errorf("%w: it has %d characters, at most %d are allowed", ErrName, len(name), MaxName)
	}
	for label := range strings.SplitSeq(name, ".") {
		if err := checkLabel(label); err != nil {
			return fmt.Errorf("%w: %w", ErrName, err)
		}
	}
	return nil
}

func checkLabel(label string) error {
	if label == "" {
		return errors.New("it begins or ends with a dot, or has two in a row")
	}
	for _, c := range []byte(label) {
		if !alphanumeric(c) && c != '-' {
			return fmt.Errorf("only letters, digits, '-' and '.' are allowed, not %q", c)
		}
	}
	if !alphanumeric(label[0]) || !alphanumeric(label[len(label)-1]) {
		return fmt.Errorf("%q must begin and end with a letter or a digit", label)
	}
	return nil
}

func alphanumeric(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}
