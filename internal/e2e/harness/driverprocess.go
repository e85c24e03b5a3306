package harness

import (
	"syscall"
	"time"
)

// DriverProcess is a healthy driver in a process of its own, for what only a process has:
// it can be killed, and stopped (SIGSTOP) so that it hangs with all its connections.
type DriverProcess struct {
	*process
	Name, Socket string
}

// StartDriverProcess starts one at the socket that NewDriver of that name would have, and
// returns when it listens. It does not configure it.
func (n *Node) StartDriverProcess(name string) *DriverProcess {
	n.T.Helper()
	d := &DriverProcess{Name: name, Socket: n.Run + "/" + name + ".sock"}
	d.process = start(n.T, "driver "+name, reexec(n.T, "driver", name, d.Socket))
	Eventually(n.T, 10*time.Second, "driver "+name+" listens", func() string {
		if !Accepts(d.Socket) {
			return "nobody at " + d.Socket
		}
		return ""
	})
	return d
}

// Stop ends it with TERM.
func (d *DriverProcess) Stop() { d.t.Helper(); d.end(syscall.SIGTERM, 10*time.Second) }

// Kill ends it with KILL: its socket's name stays.
func (d *DriverProcess) Kill() { d.t.Helper(); d.end(syscall.SIGKILL, 10*time.Second) }

// Hang stops it (SIGSTOP); Resume lets it go on.
func (d *DriverProcess) Hang() { d.signal(syscall.SIGSTOP) }

// Resume lets a hanging one go on.
func (d *DriverProcess) Resume() { d.signal(syscall.SIGCONT) }
