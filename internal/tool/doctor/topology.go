package doctor

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
)

// topologyRefusal returns the fix for a topology value that the kubelet refuses, or would refuse,
// because the label of the Node has another value (kubelet v1.36, nodeinfomanager).
func (x *diagnosis) topologyRefusal(ctx context.Context, d config.Driver, st status.Driver) (expected string, fix []Fix) {
	keys := sortedKeys(st.Topology)
	named := slices.DeleteFunc(slices.Clone(keys), func(k string) bool { return !strings.Contains(st.KubeletError, k) })
	if len(named) > 0 {
		keys = named
	}
	if other, key := x.sharesTopology(st, keys); other != "" {
		return fmt.Sprintf("%s and %s report different values of the topology key %s: a Node has one label of that name", d.Name, other, safetext.Word(key)),
			[]Fix{note("if you removed the label, the kubelet would refuse %s instead", other),
				note("change the topology of one of the two drivers in its configuration, then run"), reregister(d)}
	}
	return "the labels of the Node agree with the topology of the driver: the kubelet refuses another value while the old label is there",
		x.relabel(d, keys, x.serverOf(ctx, d.Name, process{}).restart())
}

// relabel removes the labels of topology keys from the Node, and registers the driver again.
func (x *diagnosis) relabel(d config.Driver, keys []string, restart []Fix) []Fix {
	fix := append([]Fix{note("if the new topology is wrong, as after a change of the host name: correct the configuration of the driver, then")}, restart...)
	fix = append(fix, note("if it is right: remove the label where kubectl works"))
	f := run("kubectl", "label", "node", x.nodeName())
	for _, k := range keys {
		if csiname.CheckLabelKey(k) == nil {
			f.Command.Args = append(f.Command.Args, k+"-")
		}
	}
	return append(fix, f, note("when the label is gone, on this node: csi-registrar reregister --force %s", d.Name))
}

// nodeName returns the name that the kubelet chooses for the Node object unless a cloud provider
// chooses another.
func (x *diagnosis) nodeName() string {
	if name := x.kubeletFlag("hostname-override"); isNodeName(name) {
		return name
	}
	if name, err := os.Hostname(); err == nil && isNodeName(strings.ToLower(name)) {
		return strings.ToLower(name)
	}
	return "NODE"
}

// kubeletFlag returns the value of a flag of the kubelet; empty if it has none.
func (x *diagnosis) kubeletFlag(name string) string {
	if x.kubelet == nil {
		return ""
	}
	line, _ := readSome(x.procPath(x.kubelet.pid, "cmdline"), maxProcFile) // an error: it has ended
	args := strings.Split(string(line), "\x00")
	for i, arg := range args {
		flag, value, ok := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		if !ok && i+1 < len(args) {
			value = args[i+1]
		}
		if flag == name {
			return value
		}
	}
	return ""
}

// isNodeName reports whether name is valid for a Node: a DNS-1123 subdomain.
func isNodeName(name string) bool {
	return len(name) <= 253 && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-.") == "" && strings.Trim(name, "-.") == name && name != ""
}

// sharesTopology returns another driver that reports another value of one of the topology keys, and
// that key.
func (x *diagnosis) sharesTopology(driver status.Driver, keys []string) (other, key string) {
	for _, st := range x.daemon.Drivers {
		for _, k := range keys {
			if value, ok := st.Topology[k]; ok && value != driver.Topology[k] && csiname.CheckName(st.Name) == nil {
				return st.Name, k
			}
		}
	}
	return "", ""
}
