package node_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"csi-registrar/internal/test/e2e/node"
)

// TestEveryKindOfNode installs the package on nodes whose kubelet has the unit, process and root
// directory of each distribution, runs doctor, pastes its fix into a shell, and waits for the
// registration. The kubelet itself is always the one of kubeadm. TRANSCRIPTS=DIR keeps the commands
// and outputs, which packaging/doc/nodes.md shows.
func TestEveryKindOfNode(t *testing.T) {
	if !*long {
		t.Skip("not for every change: -long")
	}
	t.Parallel()
	n := node.New(t, "trixie")
	debs := []string{n.Package(newer, "csi-registrar"), n.Package(newer, "csi-sample-driver")}
	n.Chroot("systemctl", "disable", "kubelet.service")
	n.Boot()
	for _, d := range distributions(t) {
		for i, unit := range d.units {
			k := &kindOfNode{Node: n, d: d, unit: unit, process: d.processes[min(i, len(d.processes)-1)]}
			t.Run(strings.ReplaceAll(d.name+" "+unit, "/", "-"), func(t *testing.T) {
				n.During(t, func() { k.try(t, debs) })
			})
			if t.Failed() {
				return // the next step would find the remains of this one
			}
		}
	}
}

// distribution is a row of the table in packaging/doc/nodes.md.
type distribution struct {
	name, rootDir, note string
	units, processes    []string
}

func distributions(t *testing.T) (all []distribution) {
	t.Helper()
	data, err := os.ReadFile("../../../../packaging/doc/nodes.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(data), "\n|---|---|---|---|---|\n")
	table, _, _ = strings.Cut(table, "\n\n")
	for row := range strings.Lines(table) {
		cells := strings.Split(row, "|")
		words := func(i int) []string {
			return strings.FieldsFunc(cells[i], func(r rune) bool { return strings.ContainsRune("`, ", r) })
		}
		if units := words(2); len(units) > 0 {
			all = append(all, distribution{strings.TrimSpace(cells[1]), words(4)[0], cells[5], units, words(3)})
		}
	}
	if len(all) < 15 {
		t.Fatalf("nodes.md has only %d distributions", len(all))
	}
	return all
}

// kindOfNode is a node with the kubelet of a distribution.
type kindOfNode struct {
	*node.Node
	d             distribution
	unit, process string

	transcript strings.Builder
}

// lateMount mounts the root directory while the node starts, as the note of some distributions
// says, and openToOthers is what AKS does to it.
const (
	lateMount    = "bind mount"
	openToOthers = "everybody may write"
)

func (k *kindOfNode) try(t *testing.T, debs []string) {
	k.Write("/etc/systemd/system/"+k.unit, fmt.Sprintf(`[Unit]
Description=The kubelet of %s
Wants=containerd.service
After=containerd.service
[Service]
ExecStart=/usr/local/bin/%s kubelet --config=%s --kubeconfig=/etc/kubernetes/kubeconfig \
	--root-dir=%s --cert-dir=%[4]s/pki --hostname-override=%s --v=2
Restart=always
RestartSec=1s
`, k.d.name, k.program(), node.KubeletConfigPath, k.d.rootDir, node.Name))
	k.Run("mkdir", "-p", k.d.rootDir)
	k.Run("systemctl", "daemon-reload")
	late := strings.Contains(k.d.note, lateMount)
	if !late {
		k.startKubelet()
	}
	k.Run(append([]string{"dpkg", "-i"}, debs...)...)
	fmt.Fprintf(&k.transcript, "# dpkg -i csi-registrar_*.deb csi-sample-driver_*.deb\n…\n")
	if late {
		k.Run("mkdir", "-p", "/mnt/kubelet")
		k.shell("mount --bind /mnt/kubelet "+k.d.rootDir, "mount", "--bind", "/mnt/kubelet", k.d.rootDir)
		if strings.Contains(k.d.note, openToOthers) {
			k.Run("chmod", "a+w", k.d.rootDir)
		}
		k.startKubelet()
	}
	out := k.shell("csi-registrar doctor", "sh", "-c", "csi-registrar doctor; true")
	if recognized := k.process + " (pid "; !strings.Contains(strings.Join(strings.Fields(out), " "), recognized) {
		t.Errorf("doctor does not name the process %s", k.process)
	}
	if fix := k.fix(t); len(fix) > 0 {
		k.shell(strings.Join(fix, "\n# "), "sh", "-ec", strings.Join(fix, "\n"))
	}
	k.shell("csi-registrar wait --timeout 55s", "csi-registrar", "wait", "--timeout", "55s")
	k.shell("csi-registrar status", "csi-registrar", "status")
	k.Run("csi-registrar", "doctor") // finds no more problems
	if dir := os.Getenv("TRANSCRIPTS"); dir != "" {
		if err := os.WriteFile(filepath.Join(dir, strings.ReplaceAll(filepath.Base(t.Name()), ".service", ".txt")), []byte(k.transcript.String()), 0o644); err != nil {
			t.Error(err)
		}
	}

	k.Run("dpkg", "--purge", "csi-sample-driver", "csi-registrar")
	k.Run("systemctl", "stop", k.unit)
	if late {
		k.Run("umount", "-R", k.d.rootDir)
	}
	k.Run("sh", "-ec", `umount -R "$1" 2>/dev/null || true; rm -rf "$0" "$1" /etc/csi-registrar /etc/systemd/system/csi-registrar.service.d`,
		"/etc/systemd/system/"+k.unit, k.d.rootDir)
	k.Run("systemctl", "daemon-reload")
}

// program makes the kubelet's program start under the name of the process.
func (k *kindOfNode) program() string {
	if k.process != "kubelet" {
		k.Run("ln", "-sf", node.KubeletPath, "/usr/local/bin/"+k.process)
		return k.process
	}
	// Called by that name, the program is the kubelet.
	k.Write("/usr/local/bin/as-kubelet", "#!/bin/sh\nshift\nexec "+node.KubeletPath+" \"$@\"\n")
	k.Run("chmod", "755", "/usr/local/bin/as-kubelet")
	return "as-kubelet"
}

func (k *kindOfNode) startKubelet() {
	k.Run("systemctl", "start", k.unit)
	k.KubeletHealthy()
}

// shell runs a command and records it, as typed, with its output.
func (k *kindOfNode) shell(typed string, args ...string) string {
	out := k.Run(args...)
	fmt.Fprintf(&k.transcript, "# %s\n%s", typed, out)
	return out
}

// fix returns the commands that doctor tells the user to paste.
func (k *kindOfNode) fix(t *testing.T) (lines []string) {
	out, _ := k.Try("csi-registrar", "doctor", "--json") // exits 1 for a problem
	var report struct {
		Findings []struct {
			ID, Severity string
			Fix          []string
		}
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatalf("doctor --json: %v\n%s", err, out)
	}
	for _, f := range report.Findings {
		if f.Severity == "problem" {
			lines = append(lines, f.Fix...)
		}
	}
	return lines
}
