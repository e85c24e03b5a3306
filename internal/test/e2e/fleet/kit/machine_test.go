// Package kit runs the examples that roll csi-registrar out (packaging/examples/ansible and
// provision) on booted machines.
package kit_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/system/nspawn"
)

const (
	driver = "sample.csi.csi-registrar.dev"
	// Two versions of this tree.
	older, newer = "0.1.98", "0.1.99"
	// events is the file of what the kubelet does.
	events = "/var/log/kubelet.events"
	// suite is Debian 13 with Ansible, cloud-init and systemd-sysupdate.
	suite = "trixie-fleet"
	// limit is generous, for machines under load.
	limit = 2 * time.Minute
)

func TestMain(m *testing.M) {
	os.Exit(tests(m))
}

// tests runs the tests with a directory for temporary files, which also has the programs that all
// use.
func tests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "kit")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Setenv("TMPDIR", dir); err != nil {
		panic(err)
	}
	return m.Run()
}

// machine is a booted node with a driver and the part of a kubelet that registers it.
type machine struct {
	*nspawn.Machine
	t    *testing.T
	name string
}

// newMachine prepares a machine that is off. Nothing of csi-registrar is in it.
func newMachine(t *testing.T, suite, name string) *machine {
	t.Helper()
	kubelet, err := kubelet()
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{nspawn.New(t, suite), t, name}
	m.Args = []string{"--bind-ro=" + kubelet + ":/srv/kubelet", "--bind-ro=" + built.SampleDriver(t) + ":/usr/bin/csi-sample-driver"}
	m.Write("/etc/hostname", name+"\n")
	m.Write("/etc/systemd/system/kubelet.service", `[Service]
ExecStart=/srv/kubelet --root /var/lib/kubelet --node `+name+`
StandardOutput=append:`+events+`
StandardError=null
[Install]
WantedBy=multi-user.target
`)
	m.Write("/etc/systemd/system/csi-sample-driver.service", read(t, "packaging/examples/sample/csi-sample-driver.service"))
	m.Chroot("systemctl", "enable", "kubelet.service", "csi-sample-driver.service")
	m.Write("/etc/apt/sources.list", "")
	m.Write("/etc/cloud/cloud-init.disabled", "")
	return m
}

// read returns a file of the source.
func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(built.Root(t), path))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// kubelet is the path of the part of a kubelet, $CSI_E2E_KUBELET or built once.
var kubelet = sync.OnceValues(func() (string, error) {
	if given := os.Getenv("CSI_E2E_KUBELET"); given != "" {
		return given, nil
	}
	dir, err := os.MkdirTemp("", "kubelet")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "kubelet")
	build := exec.Command("go", "build", "-ldflags=-s -w", "-o", path, "csi-registrar/internal/test/e2e/cmd/kubelet")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("cannot build cmd/kubelet: %w\n%s", err, out)
	}
	return path, nil
})

// registered waits until the CSINode has the driver, or does not.
func (m *machine) registered(name string, want bool) {
	m.t.Helper()
	m.Eventually(limit, fmt.Sprintf("%s registered on %s: %t", name, m.name, want), func() error {
		lines := strings.Split(m.Read(events), "\n")
		for i := len(lines) - 1; i >= 0; i-- {
			if strings.Contains(lines[i], `"event":"csinode"`) {
				if got := strings.Contains(lines[i], `"name":"`+name+`"`); got != want {
					return errors.New(lines[i])
				}
				return nil
			}
		}
		return errors.New("the CSINode was never written")
	})
}

// writes counts the kubelet's writes of the CSINode.
func (m *machine) writes() int { return strings.Count(m.Read(events), `"event":"csinode"`) }

// sidecar adds `csi-registrar run` in the place of node-driver-registrar to a machine that is off.
func (m *machine) sidecar() {
	m.t.Helper()
	m.Args = append(m.Args, "--bind-ro="+built.Registrar(m.t)+":/srv/csi-registrar")
	const socket = "/run/csi-sample/csi.sock"
	m.Write("/etc/systemd/system/sidecar.service", `[Service]
ExecStart=/srv/csi-registrar run --csi-address=`+socket+` --kubelet-registration-path=`+socket+` --plugin-registration-path=/var/lib/kubelet/plugins_registry
Restart=always
[Install]
WantedBy=multi-user.target
`)
	m.Chroot("systemctl", "enable", "sidecar.service")
}

// costs makes a change, after which the kubelet has written the CSINode that often and has the
// driver.
func (m *machine) costs(writes int, change func()) {
	m.t.Helper()
	before := m.writes()
	change()
	m.Eventually(limit, fmt.Sprintf("%d writes on %s", writes, m.name), func() error {
		if n := m.writes() - before; n < writes {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	time.Sleep(1500 * time.Millisecond) // the kubelet's loop takes 1 s
	if n := m.writes() - before; n != writes {
		m.t.Errorf("%s: %d writes of the CSINode, want %d", m.name, n, writes)
	}
	m.registered(driver, true)
}

// unnoticed makes a change that replaces the daemon by another version, and checks that the kubelet
// writes nothing.
func (m *machine) unnoticed(version string, change func()) {
	m.t.Helper()
	before := m.writes()
	change()
	m.Run("csi-registrar", "wait", "--timeout", "55s", driver)
	if running := m.daemonVersion(); running != version {
		m.t.Errorf("%s: version %s is running, want %s", m.name, running, version)
	}
	time.Sleep(1500 * time.Millisecond) // the kubelet's loop takes 1 s
	if after := m.writes(); after != before || before == 0 {
		m.t.Errorf("%s: %d writes of the CSINode, then %d", m.name, before, after)
	}
}

// daemonVersion returns the version of the program that the running daemon executes.
func (m *machine) daemonVersion() string {
	m.t.Helper()
	out := m.Run("sh", "-ec", `"/proc/$(systemctl show --property=MainPID --value csi-registrar.service)/exe" version`)
	for field := range strings.FieldsSeq(out) {
		if strings.HasPrefix(field, "0.") {
			return field
		}
	}
	m.t.Fatalf("%s: %q has no version", m.name, out)
	return ""
}

// tools installs commands on this machine, as scripts/need takes them.
func tools(t *testing.T, commands ...string) {
	t.Helper()
	if out, err := exec.Command(filepath.Join(built.Root(t), "scripts", "need"), commands...).CombinedOutput(); err != nil {
		nspawn.Need(t, string(out))
	}
}

// shell runs a script on this machine in a directory.
func shell(t *testing.T, dir, script string, env ...string) string {
	t.Helper()
	cmd := exec.Command("sh", "-euc", script)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}

// newKey makes a key that signs, and returns the directory of gpg, and the files of the public key,
// binary and ASCII.
func newKey(t *testing.T) (gnupg, binary, ascii string) {
	t.Helper()
	tools(t, "gpg:gnupg")
	gnupg, err := os.MkdirTemp("", "gpg") // a short path, for its sockets
	if err != nil {
		t.Fatal(err)
	}
	env := "GNUPGHOME=" + gnupg
	t.Cleanup(func() {
		shell(t, gnupg, "gpgconf --kill gpg-agent", env)
		if err := os.RemoveAll(gnupg); err != nil {
			t.Error(err)
		}
	})
	shell(t, gnupg, `gpg --batch --quiet --passphrase "" --quick-gen-key fleet@example.com rsa2048 sign never
		gpg --batch --export >key; gpg --batch --armor --export >key.asc`, env)
	return gnupg, filepath.Join(gnupg, "key"), filepath.Join(gnupg, "key.asc")
}

// repository makes a signed apt repository with both versions, as scripts/repository lays it out.
// Its key is key.asc there.
func repository(t *testing.T) (dir string) {
	t.Helper()
	gnupg, _, ascii := newKey(t)
	dir = t.TempDir()
	for _, version := range []string{older, newer} {
		shell(t, dir, `mkdir -p deb/pool; cp "$from"/csi-registrar_*.deb deb/pool/`, "from="+built.Packages(t, version))
	}
	shell(t, dir, `cp "$ascii" key.asc
		cd deb; index=dists/stable/main/binary-$arch; mkdir -p $index
		for file in pool/*.deb; do
			dpkg-deb -f "$file"
			printf 'Filename: %s\nSize: %s\nSHA256: %s\n\n' "$file" "$(stat -c %s "$file")" "$(sha256sum <"$file" | cut -d ' ' -f 1)"
		done >$index/Packages
		cd dists/stable; index=main/binary-$arch/Packages
		printf 'Suite: stable\nCodename: stable\nArchitectures: %s\nComponents: main\nDate: %s\nSHA256:\n %s %s %s\n' \
			"$arch" "$(LC_ALL=C date -u '+%a, %d %b %Y %T UTC')" "$(sha256sum <$index | cut -d ' ' -f 1)" "$(stat -c %s $index)" $index >Release
		gpg --batch --quiet --clearsign --output InRelease Release`, "GNUPGHOME="+gnupg, "ascii="+ascii, "arch="+runtime.GOARCH)
	return dir
}
