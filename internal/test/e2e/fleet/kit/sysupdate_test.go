package kit_test

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/pages"
)

const transfer = "/etc/sysupdate.csi-registrar.d/csi-registrar.transfer"

// loops gives a container the loop devices that a node has, before systemd-sysext runs.
const loops = `[Unit]
DefaultDependencies=no
Before=systemd-sysext.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -ec 'mknod /dev/loop-control c 10 237; for i in $$(seq 0 63); do mknod /dev/loop$$i b 7 $$i; done'
[Install]
WantedBy=sysinit.target
`

// TestSysupdate installs the system extension on a running node, as images.md says, and updates it
// with the example's transfer file. The kubelet does not notice the update.
func TestSysupdate(t *testing.T) {
	t.Parallel()
	m := newMachine(t, suite, "node")
	p := newPublished(t)
	p.add(older)
	m.Args = append(m.Args, "--bind-ro="+p.dir+":/srv/extensions")
	m.Write("/etc/systemd/system/loops.service", loops)
	m.Chroot("systemctl", "enable", "loops.service")
	m.Write(transfer, strings.NewReplacer("URL/", "file:///srv/extensions/", "amd64", runtime.GOARCH).Replace(read(t, "packaging/examples/provision/csi-registrar.transfer")))
	key, err := os.ReadFile(p.key)
	if err != nil {
		t.Fatal(err)
	}
	m.Write("/etc/systemd/import-pubring.gpg", string(key))
	m.Write("/etc/csi-registrar/conf.d/60-sample.toml", read(t, "packaging/examples/sample/20-sample.toml"))
	m.Boot()
	sysupdate := []string{"/usr/lib/systemd/systemd-sysupdate", "-C", "csi-registrar", "update"}
	m.Run("mkdir", "-p", "/var/lib/extensions")
	m.Run(sysupdate...)
	m.Run("systemctl", "enable", "systemd-sysext")
	m.types("images.md", "System extension")
	m.registered(driver, true)

	p.add(newer)
	refused := func(what, change string) {
		t.Helper()
		shell(t, p.dir, change)
		if out, err := m.Try(sysupdate...); err == nil {
			t.Errorf("%s was accepted:\n%s", what, out)
		}
		p.sign()
	}
	refused("a list with another sum", "sed -i s/^./x/ SHA256SUMS")
	refused("a list without a signature", "rm SHA256SUMS.gpg")
	image := filepath.Join(p.dir, "csi-registrar_"+newer+"_"+runtime.GOARCH+".raw")
	refused("an image that is not the one in the list", "echo >>'"+image+"'")
	shell(t, p.dir, "truncate -s -1 '"+image+"'")
	p.sign()

	m.unnoticed(newer, func() {
		m.Run(sysupdate...)
		m.Run("systemd-sysext", "refresh")
		m.Run("systemctl", "restart", "csi-registrar.service")
	})
	// Back, by hand.
	m.unnoticed(older, func() {
		m.Run("ln", "-sf", "/var/lib/csi-registrar/csi-registrar_"+older+"_"+runtime.GOARCH+".raw", "/var/lib/extensions/csi-registrar.raw")
		m.Run("systemd-sysext", "refresh")
		m.Run("systemctl", "restart", "csi-registrar.service")
	})
	m.Reboot()
	m.Run("csi-registrar", "wait", "--timeout", "55s", driver)
	if running := m.daemonVersion(); running != older {
		t.Errorf("version %s after the boot", running)
	}
}

// types types the commands of a section of a page.
func (m *machine) types(page, section string) {
	m.t.Helper()
	blocks, err := pages.Read(built.Root(m.t), "packaging/doc/"+page)
	if err != nil {
		m.t.Fatal(err)
	}
	for _, b := range blocks {
		for _, c := range b.Commands() {
			if _, left := pages.Listed(page+"#"+section, c.Text); b.Section == section && !left {
				m.Run("sh", "-ec", c.Text)
			}
		}
	}
}
