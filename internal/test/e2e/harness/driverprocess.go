package harness

import (
	"syscall"
	"time"
)

// DriverProcess is a healthy driver in a process of its own, which can be killed, and stopped
// (SIGSTOP), so that it hangs with all its connections.
type DriverProcess struct {
	*process
	Name, Socket string
}

// StartDriverProcess starts a driver at the socket that NewDriver would use for the name, and waits
// until it listens. It does not configure the driver.
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

// Stop ends the driver with SIGTERM.
func (d *DriverProcess) Stop() { d.t.Helper(); d.end(syscall.SIGTERM, 10*time.Second) }

// Kill ends the driver with SIGKILL. Its socket file stays.
func (d *DriverProcess) Kill() { d.t.Helper(); d.end(syscall.SIGKILL, 10*time.Second) }

// Hang stops the process (SIGSTOP) until Resume.
func (d *DriverProcess) Hang() { d.signal(syscall.SIGSTOP) }

// Resume continues a stopped process.
func (d *DriverProcess) Resume() { d.signal(syscall.SIGCONT) }
