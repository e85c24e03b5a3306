package doctor

import (
	"fmt"
	"math"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"csi-registrar/internal/status"
)

const maxNodeID = 256 // bytes: the kubelet, and the API server for CSINode

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
		if err := status.CheckLabelKey(key); err != nil {
			problem(fmt.Sprintf("the topology key %q is no label key: %v", key, err), "PREFIX/NAME, as a label of the node has")
		} else if reserved(key) {
			found = append(found, Finding{Severity: Warning,
				Is:     fmt.Sprintf("the topology key %q is in Kubernetes' own name space: with the NodeRestriction admission the kubelet may not set it", key),
				Should: "a prefix of the driver's own"})
		}
		value := r.GetAccessibleTopology().GetSegments()[key]
		if err := status.CheckLabelValue(value); err != nil {
			problem(fmt.Sprintf("the value %q of the topology key %q is no label value: %v", value, key, err),
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
