package doctor

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/node/status"
)

// topologyRefusal returns the fix for a topology value that the kubelet refuses, or would refuse,
// because the label of the Node has another value (kubelet v1.36, nodeinfomanager).
func (x *diagnosis) topologyRefusal(d config.Driver, st status.Driver) (expected string, fix []Fix) {
	keys := sortedKeys(st.Topology)
	named := slices.DeleteFunc(slices.Clone(keys), func(k string) bool { return !strings.Contains(st.KubeletError, k) })
	if len(named) > 0 {
		keys = named
	}
	if other, key := x.sharesTopology(d.Name, keys); other != "" {
		return fmt.Sprintf("%s and %s report the same value of the topology key %s: a Node has one label of that name", d.Name, other, safetext.Word(key)),
			[]Fix{note("if you removed the label, the kubelet would refuse %s instead", other),
				note("change the topology of one of the two drivers in its configuration, then run"), reregister(d)}
	}
	return "the labels of the Node agree with the topology of the driver: the kubelet refuses another value while the old label is there",
		x.relabel(d, keys)
}

// relabel removes the labels of topology keys from the Node, and registers the driver again.
func (x *diagnosis) relabel(d config.Driver, keys []string) []Fix {
	fix := []Fix{note("if the new topology is right, and where kubectl works")}
	f := run("kubectl", "label", "node", x.nodeName())
	for _, k := range keys {
		if status.CheckLabelKey(k) == nil {
			f.Command.Args = append(f.Command.Args, k+"-")
		}
	}
	f.Then = []safetext.Command{safetext.Run("csi-registrar", "reregister", "--force", d.Name)}
	return append(fix, f)
}

// nodeName returns the name that the kubelet chooses for the Node object unless a cloud provider
// chooses another.
func (x *diagnosis) nodeName() string {
	if x.kubelet != nil {
		// an error: it has ended
		line, _ := readSome(x.procPath(x.kubelet.pid, "cmdline"), maxProcFile)
		args := strings.Split(string(line), "\x00")
		for i, arg := range args {
			flag, name, ok := strings.Cut(strings.TrimLeft(arg, "-"), "=")
			if !ok && i+1 < len(args) {
				name = args[i+1]
			}
			if flag == "hostname-override" && isNodeName(name) {
				return name
			}
		}
	}
	if name, err := os.Hostname(); err == nil && isNodeName(strings.ToLower(name)) {
		return strings.ToLower(name)
	}
	return "NODE"
}

// isNodeName reports whether name is valid for a Node: a DNS-1123 subdomain.
func isNodeName(name string) bool {
	return len(name) <= 253 && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-.") == "" && strings.Trim(name, "-.") == name && name != ""
}

// sharesTopology returns another driver that reports one of the topology keys, and that key.
func (x *diagnosis) sharesTopology(driver string, keys []string) (other, key string) {
	for _, st := range x.daemon.Drivers {
		for _, k := range keys {
			if _, ok := st.Topology[k]; ok && st.Name != driver && status.CheckName(st.Name) == nil {
				return st.Name, k
			}
		}
	}
	return "", ""
}
