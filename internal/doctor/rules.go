package doctor

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

const (
	maxNodeID     = 256 // bytes: the kubelet, and the API server for CSINode
	maxLabelName  = 63  // bytes: apimachinery, validation of labels
	maxLabelValue = 63
	maxPrefix     = 253
)

// nodeRules holds what the driver says of the node against the rules of the kubelet and
// of the API server, which refuse the driver, or the whole CSINode object.
func nodeRules(r *csi.NodeGetInfoResponse) (found []Finding) {
	problem := func(is, should string) {
		found = append(found, Finding{Severity: Problem, Is: is, Should: should})
	}
	switch n := len(r.GetNodeId()); {
	case n == 0:
		problem("the driver gives an empty node id", "1 to 256 characters")
	case n > maxNodeID:
		problem(fmt.Sprintf("the node id has %d characters: the kubelet refuses it", n), "1 to 256 characters")
	}
	for _, key := range sortedKeys(r.GetAccessibleTopology().GetSegments()) {
		if err := labelKey(key); err != nil {
			problem(fmt.Sprintf("the topology key %q is no label key: %v", key, err), "PREFIX/NAME, as a label of the node has")
		} else if reserved(key) {
			found = append(found, Finding{Severity: Warning,
				Is:     fmt.Sprintf("the topology key %q is in Kubernetes' own name space: with the NodeRestriction admission the kubelet may not set it", key),
				Should: "a prefix of the driver's own"})
		}
		if value := r.GetAccessibleTopology().GetSegments()[key]; labelValue(value) != nil {
			problem(fmt.Sprintf("the value %q of the topology key %q is no label value: %v", value, key, labelValue(value)),
				"at most 63 letters, digits, '-', '_' and '.', a letter or digit at both ends")
		}
	}
	switch n := r.GetMaxVolumesPerNode(); {
	case n < 0:
		problem(fmt.Sprintf("max_volumes_per_node is %d", n), "0 for no limit, or more")
	case n > math.MaxInt32:
		found = append(found, Finding{Severity: Warning, Is: fmt.Sprintf("max_volumes_per_node is %d: the kubelet makes %d of it", n, math.MaxInt32), Should: "0 for no limit"})
	}
	return found
}

// labelKey tells why a text may not be the key of a label: [PREFIX/]NAME.
func labelKey(key string) error {
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

// labelValue tells why a text may not be the value of a label; it may be empty.
func labelValue(value string) error {
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
	if s == "" || len(s) > maxPrefix {
		return fmt.Errorf("it has %d characters, 1 to %d are allowed", len(s), maxPrefix)
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

func alphanumeric(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

// reserved tells whether NodeRestriction keeps the kubelet from setting a label.
func reserved(key string) bool {
	prefix, _, hasPrefix := strings.Cut(key, "/")
	if !hasPrefix {
		return false
	}
	in := func(domain string) bool { return prefix == domain || strings.HasSuffix(prefix, "."+domain) }
	switch {
	case in("node-restriction.kubernetes.io"):
		return true
	case in("kubelet.kubernetes.io"), in("node.kubernetes.io"):
		return false
	case !in("kubernetes.io") && !in("k8s.io"):
		return false
	}
	switch key {
	case "kubernetes.io/hostname", "kubernetes.io/arch", "kubernetes.io/os",
		"beta.kubernetes.io/arch", "beta.kubernetes.io/os", "beta.kubernetes.io/instance-type",
		"topology.kubernetes.io/zone", "topology.kubernetes.io/region",
		"failure-domain.beta.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/region":
		return false
	}
	return true
}
