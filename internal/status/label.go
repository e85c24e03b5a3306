package status

import (
	"errors"
	"fmt"
	"strings"
)

// In bytes, which all are letters of ASCII: apimachinery, validation of labels.
const (
	maxLabelName   = 63
	maxLabelValue  = 63
	maxLabelPrefix = 253
)

// CheckLabelKey returns an error if a text may not be the key of a node's label, [PREFIX/]NAME. The
// kubelet makes labels and a CSINode of the driver's topology, and the API server refuses
// the whole object if one is wrong (apimachinery, IsQualifiedName).
func CheckLabelKey(key string) error {
	prefix, name, hasPrefix := strings.Cut(key, "/")
	if !hasPrefix {
		prefix, name = "", key
	} else if err := subdomain(prefix); err != nil {
		return fmt.Errorf("before the slash: %w", err)
	}
	switch {
	case name == "":
		return errors.New("the name is empty")
	case len(name) > maxLabelName:
		return fmt.Errorf("the name has %d characters, at most %d are allowed", len(name), maxLabelName)
	}
	return labelText(name)
}

// CheckLabelValue returns an error if a text may not be the value of a node's label; it may be empty.
func CheckLabelValue(value string) error {
	if len(value) > maxLabelValue {
		return fmt.Errorf("it has %d characters, at most %d are allowed", len(value), maxLabelValue)
	}
	if value == "" {
		return nil
	}
	return labelText(value)
}

func labelText(s string) error {
	for _, c := range []byte(s) {
		if !alphanumeric(c) && !strings.ContainsRune("-_.", rune(c)) {
			return fmt.Errorf("%q is not allowed", c)
		}
	}
	if !alphanumeric(s[0]) || !alphanumeric(s[len(s)-1]) {
		return errors.New("it must begin and end with a letter or a digit")
	}
	return nil
}

// subdomain is the rule of RFC 1123 as Kubernetes has it.
func subdomain(s string) error {
	if s == "" || len(s) > maxLabelPrefix {
		return fmt.Errorf("it has %d characters, 1 to %d are allowed", len(s), maxLabelPrefix)
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || label[0] == '-' || label[len(label)-1] == '-' {
			return errors.New("each part between dots must begin and end with a letter or a digit")
		}
		for _, c := range []byte(label) {
			if !alphanumeric(c) && c != '-' || c >= 'A' && c <= 'Z' {
				return fmt.Errorf("%q is not allowed", c)
			}
		}
	}
	return nil
}
