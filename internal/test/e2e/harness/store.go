package harness

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/fake"
)

// Manager imitates systemd for a node's daemon, for what must be repeated often. The system tests
// use a real systemd.
type Manager struct {
	*fake.Manager
	node *Node
}

// Manager starts a descriptor store for the node's daemons.
func (n *Node) Manager() *Manager {
	n.T.Helper()
	m, err := fake.StartManager(n.Dir)
	if err != nil {
		n.T.Fatal(err)
	}
	n.T.Cleanup(func() {
		if err := m.Close(); err != nil {
			n.T.Error(err)
		}
	})
	return &Manager{m, n}
}

// StartDaemon starts the daemon as systemd does with the shipped unit: with --keep-sockets,
// $NOTIFY_SOCKET and the stored descriptors. It waits for READY=1.
func (m *Manager) StartDaemon(args ...string) *Daemon {
	n := m.node
	n.T.Helper()
	before := m.State().Ready
	cmd := m.Command(context.Background(), built.Registrar(n.T), append([]string{"run", "--keep-sockets", "--config-root", n.Etc}, args...)...)
	cmd.Env = slices.DeleteFunc(cmd.Env, func(kv string) bool {
		return strings.HasPrefix(kv, "WATCHDOG_") || strings.HasPrefix(kv, "JOURNAL_STREAM=") || strings.HasPrefix(kv, "INVOCATION_ID=") || strings.HasPrefix(kv, role+"=")
	})
	d := n.startDaemon(cmd)
	Eventually(n.T, 15*time.Second, "READY=1", func() string {
		if !d.running() {
			n.T.Fatalf("%s ended: %v", d.what, d.err)
		}
		if s := m.State(); s.Ready == before {
			return fmt.Sprintf("not sent yet; status %q", s.Status)
		}
		return ""
	})
	d.Ready(5 * time.Second)
	return d
}

// Restart ends the daemon with a signal and starts the next.
func (m *Manager) Restart(d *Daemon, by syscall.Signal) *Daemon {
	m.node.T.Helper()
	d.end(by, 10*time.Second)
	return m.StartDaemon()
}
