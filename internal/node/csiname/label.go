package csiname

import (
	"errors"
	"fmt"
	"strings"
)

// Limits of apimachinery's validation of labels, in bytes; all of them must be ASCII.
const (
	maxLabelName   = 63
	maxLabelValue  = 63
	maxLabelPrefix = 253
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
	return labelText(name)
}

// CheckLabelValue returns an error if value is not valid as the value of a label.
func CheckLabelValue(value string) error {
	if len(value) > maxLabelValue {
		return fmt.Errorf("it has %d characters, at most %d are allowed", len(value), maxLabelValue)
	}
	if value == "" {
		return nil
	}
	return labelText(value)
}

// labelText checks the characters of a name or a value.
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
