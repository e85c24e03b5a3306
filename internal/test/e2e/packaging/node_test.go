// Package packaging installs the real packages into real Debian systems, booted in containers, in
// which the kubelet's own plugin manager counts what it sees.
package packaging

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"csi-registrar/internal/test/e2e/system/nspawn"
)

const (
	driver = "sample.csi.csi-registrar.dev"
	socket = "/var/lib/kubelet/plugins_registry/" + driver + "-reg.sock"
	limit  = 2 * time.Minute
)

// Two versions, to go from one to the other: the first one, and this tree.
const older, newer = "0.1.0", "0.1.99"

// first is the commit of version 0.1.0, for clones without its tag. With a change of the record
// each driver is registered once more in either direction.
const first = "025693f361fa9831b18b69cc70940887b78724a1"

// checkOut puts the source of version older into dir: the tagged commit, or first if there is no
// tag. In a tree without history, this tree is used.
func checkOut(root, dir string) error {
	script := `cd "$0" && commit=$(git rev-parse --verify --quiet "refs/tags/v$2^{commit}" || git rev-parse --verify --quiet "$3^{commit}") &&
		git clone --quiet --shared --no-checkout "$0" "$1" && cd "$1" && git checkout --quiet "$commit" && git tag "v$2"`
	if _, err := os.Stat(filepath.Join(root, ".git")); err != nil && os.Getenv("CI") != "true" {
		script = `mkdir "$1" && cd "$0" && cp -r * "$1"`
	}
	if out, err := exec.Command("sh", "-c", script, root, dir, older, first).CombinedOutput(); err != nil {
		return fmt.Errorf("cannot check out version %s, tag v%s or commit %s; is this a shallow clone? %w\n%s", older, older, first, err, out)
	}
	return nil
}

// packages returns the directory of the packages that all tests install. They are built once.
var packages = sync.OnceValues(func() (string, error) {
	root, err := filepath.Abs("../../../..")
	if err != nil {
		return "", err
	}
	dist, err := os.MkdirTemp("", "packages")
	if err != nil {
		return "", err
	}
	run := func(dir, name string, env []string, args ...string) error {
		cmd := exec.Command(name, args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), env...)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s %q: %w\n%s", name, args, err, out)
		}
		return nil
	}
	sources := map[string]string{older: filepath.Join(dist, "source"), newer: root}
	if err := checkOut(root, sources[older]); err != nil {
		return dist, err
	}
	for version, source := range sources {
		one := filepath.Join(dist, "one") // scripts/packages removes other versions
		if err := run(source, "scripts/packages", []string{"DIST=" + one, "VERSION=" + version, "ARCHS=" + runtime.GOARCH}); err != nil {
			return dist, err
		}
		if err := run(one, "sh", nil, "-c", "mv *.deb *.rpm .."); err != nil {
			return dist, err
		}
	}
	if given := os.Getenv("CSI_E2E_KUBELET"); given != "" {
		return dist, run(root, "cp", nil, given, dist+"/kubelet")
	}
	return dist, run(filepath.Join(root, "internal/test/e2e"), "go", []string{"CGO_ENABLED=0"},
		"build", "-ldflags=-s -w", "-o", dist+"/kubelet", "./cmd/kubelet")
})

// made is true if packages has made a directory, which TestMain removes.
var made atomic.Bool

func TestMain(m *testing.M) {
	code := m.Run()
	if made.Load() {
		if dist, _ := packages(); dist != "" {
			os.RemoveAll(dist)
		}
	}
	os.Exit(code)
}

// node is a machine with a kubelet that starts at boot.
type node struct {
	*nspawn.Machine
	t    *testing.T
	dist string
}

func newNode(t *testing.T, suite string) *node {
	t.Helper()
	t.Parallel()
	nspawn.Root(t, suite) // skips before anything is built
	made.Store(true)
	dist, err := packages()
	if err != nil {
		t.Fatal(err)
	}
	n := &node{nspawn.New(t, suite), t, dist}
	n.copyIn(filepath.Join(dist, "kubelet"), "/opt/kubelet", 0o755)
	n.Write("/usr/lib/systemd/system/kubelet.service", `[Service]
ExecStart=/opt/kubelet --root /var/lib/kubelet --handler record
StandardOutput=append:/opt/events
StandardError=null
`)
	return n
}

func (n *node) copyIn(from, to string, mode os.FileMode) {
	n.t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		n.t.Fatal(err)
	}
	n.WriteMode(to, string(b), mode)
}

// file puts a package on the disk and returns its path there.
func (n *node) file(format, name, version string) string {
	n.t.Helper()
	pattern := fmt.Sprintf("%s?%s?*.%s", name, version, format)
	found, err := filepath.Glob(filepath.Join(n.dist, pattern))
	if err != nil || len(found) != 1 {
		n.t.Fatalf("%s: %q %v", pattern, found, err)
	}
	path := "/opt/" + filepath.Base(found[0])
	if _, err := os.Stat(n.Disk + path); err != nil {
		n.copyIn(found[0], path, 0o644)
	}
	return path
}

// kubelet starts the kubelet.
func (n *node) kubelet() { n.Run("systemctl", "start", "kubelet.service") }

// saw counts the kubelet's events of the driver.
func (n *node) saw() (registered, deregistered int) { return count(n.Read("/opt/events")) }

// count counts the events of the driver that a kubelet printed.
func count(events string) (registered, deregistered int) {
	for line := range strings.Lines(events) {
		var e struct{ Event, Driver, Error string }
		if json.Unmarshal([]byte(line), &e) == nil && e.Driver == driver && e.Error == "" {
			switch e.Event {
			case "register":
				registered++
			case "deregister":
				deregistered++
			}
		}
	}
	return registered, deregistered
}

// eventually waits until the events of the kubelet have these counts.
func (n *node) eventually(registered, deregistered int) {
	n.t.Helper()
	n.Machine.Eventually(limit, fmt.Sprintf("%d registrations, %d ends of one", registered, deregistered), func() error {
		if r, d := n.saw(); r != registered || d != deregistered {
			return fmt.Errorf("the kubelet saw %d and %d", r, d)
		}
		return nil
	})
}

// process returns the daemon's PID and the inode number of the registration socket.
func (n *node) process() (pid string, inode string) {
	n.t.Helper()
	pid = strings.TrimSpace(n.Run("systemctl", "show", "--property=MainPID", "--value", "csi-registrar.service"))
	return pid, strings.TrimSpace(n.Run("stat", "-c", "%i", socket))
}

// unnoticed changes the version, and checks that the daemon was replaced, but not the registration.
func (n *node) unnoticed(version string, change func()) {
	n.t.Helper()
	pid, inode := n.process()
	r, d := n.saw()
	change()
	n.Run("csi-registrar", "wait", "--timeout", "55s", driver)
	pid2, inode2 := n.process()
	if pid2 == pid || pid2 == "0" {
		n.t.Errorf("the daemon is still process %s", pid)
	}
	if inode2 != inode {
		n.t.Errorf("the registration socket was recreated")
	}
	if out := n.Run("csi-registrar", "version"); !strings.Contains(out, version) {
		n.t.Errorf("the version is %q, want %s", out, version)
	}
	// The kubelet's loop takes 1 s, so it would have seen a change by now.
	time.Sleep(1500 * time.Millisecond)
	r2, d2 := n.saw()
	n.t.Logf("to %s: inode %s, then %s; %d registrations, then %d; %d deregistrations, then %d", version, inode, inode2, r, r2, d, d2)
	if r2 != r || d2 != d {
		n.t.Errorf("the kubelet saw %d registrations and %d ends of one, want %d and %d as before", r2, d2, r, d)
	}
}

// ours lists files with our name that do not belong to another package.
func (n *node) ours() []string {
	n.t.Helper()
	out := n.Run("find", "/etc", "/usr", "/var", "/run", "-xdev", "(", "-name", "*csi-registrar*", "-o", "-name", "*csi-sample*", ")")
	out += n.Run("find", "/run", "-name", "*csi-registrar*")
	return slices.DeleteFunc(strings.Fields(out), func(path string) bool {
		// Without paths that the kubelet cleans up, and those of systemd and dpkg.
		return strings.HasPrefix(path, "/var/lib/kubelet/") || strings.HasPrefix(path, "/run/systemd/") ||
			strings.HasPrefix(path, "/var/lib/systemd/") && !strings.HasPrefix(path, "/var/lib/systemd/deb-")
	})
}
