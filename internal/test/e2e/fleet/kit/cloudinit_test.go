package kit_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestCloudInit boots a node for the first time with the example's user data: the package comes
// from the signed repository, and the driver of the drop-in is registered.
func TestCloudInit(t *testing.T) {
	t.Parallel()
	m := newMachine(t, suite, "node")
	packages := repository(t)
	key, err := os.ReadFile(filepath.Join(packages, "key.asc"))
	if err != nil {
		t.Fatal(err)
	}
	// Indented as a block of YAML.
	block := strings.ReplaceAll(strings.TrimSpace(string(key)), "\n", "\n        ")
	m.Args = append(m.Args, "--bind-ro="+packages+":/srv/repository")
	if err := os.Remove(m.Path("/etc/cloud/cloud-init.disabled")); err != nil {
		t.Fatal(err)
	}
	// The machine has neither a network nor Debian's mirror.
	m.Write("/etc/cloud/cloud.cfg.d/99-test.cfg", "network: {config: disabled}\napt: {preserve_sources_list: true}\ndatasource_list: [NoCloud]\n")
	m.Write("/var/lib/cloud/seed/nocloud/meta-data", "instance-id: node\nlocal-hostname: node\n")
	m.Write("/var/lib/cloud/seed/nocloud/user-data", strings.NewReplacer("URL", "file:///srv/repository", "KEY\n", block+"\n").
		Replace(read(t, "packaging/examples/provision/cloud-init.yaml")))
	// The driver of the drop-in.
	const name = "nfs.csi.k8s.io"
	m.Write("/etc/systemd/system/csi-sample-driver.service.d/name.conf", `[Service]
ExecStart=
ExecStart=/usr/bin/csi-sample-driver --socket /var/lib/kubelet/plugins/csi-nfsplugin/csi.sock --name `+name+` --data /var/lib/csi-sample
ExecStartPre=/bin/mkdir -p /var/lib/kubelet/plugins/csi-nfsplugin
`)
	m.Boot()
	out, _ := m.Try("cloud-init", "status", "--wait", "--long") // 2 for a warning
	if !strings.Contains(out, "status: done") {
		t.Errorf("cloud-init: %s\n%s", out, m.Read("/var/log/cloud-init-output.log"))
	}
	m.registered(name, true)
	m.Run("csi-registrar", "config", "check")
	m.Run("systemctl", "is-active", "csi-registrar.service")
}
