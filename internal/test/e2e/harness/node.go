package harness

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/node/rootdir"
)

// Node is the node of one test: its directories and processes.
type Node struct {
	T    testing.TB
	Dir  string // contains everything; short, because a socket path has at most 107 bytes
	Root string // the kubelet's root_dir
	Etc  string // csi-registrar's --config-root
	Run  string // where drivers listen

	daemons, kubelets int // started so far
}

// New makes a node. It skips the test where that is impossible; under CI=true that is a failure.
func New(t testing.TB) *Node {
	t.Helper()
	return NewIn(t, "/tmp") // short, wherever TMPDIR points
}

// NewIn makes a node below another directory than /tmp. Changes in any directory above its sockets
// wake the daemon, and /tmp is busy.
func NewIn(t testing.TB, parent string) *Node {
	t.Helper()
	if os.Getuid() != 0 {
		Skip(t, "it needs root: files of the configuration, sockets of drivers and the kubelet are root's")
	}
	dir := shortDir(t, parent)
	n := &Node{T: t, Dir: dir, Root: filepath.Join(dir, "k"), Etc: filepath.Join(dir, "r"), Run: filepath.Join(dir, "d")}
	for _, d := range []string{n.Root, n.Registry(), n.Etc, n.Run} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// Registered first, so it runs last, when every daemon, kubelet and driver has ended.
	t.Cleanup(func() {
		n.leftBehind()
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("cannot remove the test's directory: %v", err)
		}
	})
	n.Write("config.toml", n.mainConfig())
	return n
}

// shortDir makes a directory with the shortest possible name: below it, the path of the
// registration socket of a driver with a name of 63 characters must fit into 107 bytes.
func shortDir(t testing.TB, parent string) string {
	t.Helper()
	for range 100 {
		dir := filepath.Join(parent, fmt.Sprintf("e%05x", rand.N(1<<20)))
		if err := os.Mkdir(dir, 0o755); err == nil {
			return dir
		} else if !errors.Is(err, fs.ErrExist) {
			t.Fatal(err)
		}
	}
	t.Fatalf("cannot make a directory in %s", parent)
	return ""
}

// Beside returns the same node with a configuration of its own, for a second daemon: the kubelet
// and the drivers are the same.
func (n *Node) Beside() *Node {
	n.T.Helper()
	two := &Node{T: n.T, Dir: n.Dir, Root: n.Root, Etc: filepath.Join(n.Dir, "r2"), Run: n.Run}
	two.Write("config.toml", n.mainConfig())
	return two
}

func (n *Node) mainConfig() string {
	return fmt.Sprintf("[kubelet]\nroot_dir = %q\n[log]\nlevel = \"debug\"\nformat = \"text\"\n", n.Root)
}

// Skip skips a test with a reason; under CI=true a skip is a failure.
func Skip(t testing.TB, reason string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("would be skipped, and CI=true: %s", reason)
	}
	t.Skip(reason)
}

// Registry returns the directory of the registration sockets.
func (n *Node) Registry() string { return rootdir.PluginsRegistry(n.Root) }

// RegSocket returns the path of a driver's registration socket.
func (n *Node) RegSocket(driver string) string {
	return filepath.Join(n.Registry(), rootdir.SocketName(driver))
}

// ConfigFile returns the path of a file below /etc/csi-registrar of the node.
func (n *Node) ConfigFile(name string) string {
	return filepath.Join(n.Etc, "etc", "csi-registrar", name)
}

// Write writes a file below /etc/csi-registrar: config.toml or conf.d/NAME.toml.
func (n *Node) Write(name, text string) {
	n.T.Helper()
	path := n.ConfigFile(name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		n.T.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		n.T.Fatal(err)
	}
}

// Configure writes the drop-in of a driver; extra lines are added to its table.
func (n *Node) Configure(name, socket string, extra ...string) {
	n.T.Helper()
	n.Write("conf.d/50-"+name+".toml", Table(name, socket, extra...))
}

// Table returns the configuration of one driver.
func Table(name, socket string, extra ...string) string {
	return fmt.Sprintf("[driver.%q]\nsocket = %q\n%s\n", name, socket, strings.Join(extra, "\n"))
}

// Inode returns the inode number of a path. It fails the test if there is no file.
func (n *Node) Inode(path string) uint64 {
	n.T.Helper()
	ino, err := inode(path)
	if err != nil {
		n.T.Fatal(err)
	}
	return ino
}

// Sockets lists the entries of plugins_registry, with those whose names begin with a dot.
func (n *Node) Sockets() []string {
	entries, err := os.ReadDir(n.Registry())
	if err != nil && !os.IsNotExist(err) {
		n.T.Error(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// WaitSockets waits until plugins_registry has that many entries.
func (n *Node) WaitSockets(count int) {
	n.T.Helper()
	Eventually(n.T, 20*time.Second, fmt.Sprintf("%d entries in plugins_registry", count), func() string {
		if got := n.Sockets(); len(got) != count {
			return fmt.Sprintf("%q", got)
		}
		return ""
	})
}

// leftBehind fails the test if there are dot names below the kubelet's root.
func (n *Node) leftBehind() {
	err := filepath.WalkDir(n.Root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if strings.HasPrefix(d.Name(), ".") {
			n.T.Errorf("left behind: %s", path)
		}
		return nil
	})
	if err != nil && !os.IsNotExist(err) {
		n.T.Error(err)
	}
}

// Eventually waits for a condition that has no event (a file, a status). It checks every 5 ms.
// missing returns what is missing, or "" if nothing is.
func Eventually(t testing.TB, limit time.Duration, what string, missing func() string) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.Now().Add(limit)
	for {
		why := missing()
		if why == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v: %s", what, limit, why)
		}
		<-tick.C
	}
}

// Never watches a condition for a while and fails as soon as it holds.
func Never(t testing.TB, span time.Duration, what string, wrong func() string) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	end := time.After(span)
	for {
		if why := wrong(); why != "" {
			t.Fatalf("%s: %s", what, why)
		}
		select {
		case <-tick.C:
		case <-end:
			return
		}
	}
}
