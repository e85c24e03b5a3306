// Package csiname has the rules of the API server for the names of CSI drivers and for the labels
// that the kubelet makes of their topology.
package csiname

import (
	"errors"
	"fmt"
	"strings"
)

// MaxName is the maximum length of a driver's name in bytes: the CSI specification and the API
// server (for a CSINode) both allow 63.
const MaxName = 63

// ErrName is wrapped by all errors of CheckName.
var ErrName = errors.New("not a driver name that the API server accepts")

// CheckName returns an error if name is not valid for a CSI driver. The kubelet accepts any name,
// but the API server requires that it is a DNS-1123 subdomain after lower-casing, of at most 63
// characters (v1.36: Foo.Example is registered, Under_score! is refused). A valid name is also
// safe as part of a file name: it has no separator and no leading dot.
func CheckName(name string) error {
	if err := checkSubdomain(name, MaxName); err != nil {
		return fmt.Errorf("%w: %w", ErrName, err)
	}
	return nil
}

// checkSubdomain checks a DNS-1123 subdomain of at most limit characters; letters may be
// upper-case.
func checkSubdomain(name string, limit int) error {
	switch {
	case name == "":
		return errors.New("it is empty")
	case len(name) > limit:
		return fmt.Errorf("it has %d characters, at most %d are allowed", len(name), limit)
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" {
			return errors.New("it begins or ends with a dot, or has two in a row")
		}
		if err := checkText(label, "-", "'-' and '.'"); err != nil {
			return err
		}
	}
	return nil
}

// checkText checks a text that may have the other characters inside; allowed names them.
func checkText(s, others, allowed string) error {
	for _, c := range []byte(s) {
		if !alphanumeric(c) && !strings.ContainsRune(others, rune(c)) {
			return fmt.Errorf("only letters, digits, %s are allowed, not %q", allowed, c)
		}
	}
	if !alphanumeric(s[0]) || !alphanumeric(s[len(s)-1]) {
		return fmt.Errorf("%q must begin and end with a letter or a digit", s)
	}
	return nil
}

func alphanumeric(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

// Limits of apimachinery's validation of labels, in bytes, and the characters besides letters and
// digits; all of them must be ASCII.
const (
	maxLabelName   = 63
	maxLabelValue  = 63
	maxLabelPrefix = 253
	labelOthers    = "-_."
	labelAllowed   = "'-', '_' and '.'"
)

// CheckLabelKey returns an error if key is not valid as the key of a label, [PREFIX/]NAME. The
// kubelet copies the driver's topology to labels of the Node and to the CSINode, and the API server
// refuses the whole object if one is not valid (apimachinery, IsQualifiedName).
func CheckLabelKey(key string) error {
	prefix, name, hasPrefix := strings.Cut(key, "/")
	if !hasPrefix {
		prefix, name = "", key
	} else if err := checkSubdomain(prefix, maxLabelPrefix); err != nil {
		return fmt.Errorf("before the slash: %w", err)
	} else if strings.ToLower(prefix) != prefix {
		return errors.New("before the slash: upper-case letters are not allowed")
	}
	switch {
	case name == "":
		return errors.New("the name is empty")
	case len(name) > maxLabelName:
		return fmt.Errorf("the name has %d characters, at most %d are allowed", len(name), maxLabelName)
	}
	return checkText(name, labelOthers, labelAllowed)
}

// CheckLabelValue returns an error if value is not valid as the value of a label.
func CheckLabelValue(value string) error {
	if len(value) > maxLabelValue {
		return fmt.Errorf("it has %d characters, at most %d are allowed", len(value), maxLabelValue)
	}
	if value == "" {
		return nil
	}
	return checkText(value, labelOthers, labelAllowed)
}
