package harness

import (
	"os"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"csi-registrar/internal/fake"
)

// Driver is a fake driver of a node. Its errors fail the test.
type Driver struct {
	*fake.Driver
	t    testing.TB
	Name string // what it is configured as; its answer may differ
}

// AddDriver makes a driver that is not started yet and configures it, with extra lines in
// its table.
func (n *Node) AddDriver(name string, extra ...string) *Driver {
	n.T.Helper()
	d := n.NewDriver(name)
	n.Configure(name, d.Socket, extra...)
	return d
}

// NewDriver makes a driver that is neither started nor configured.
func (n *Node) NewDriver(name string) *Driver {
	return n.DriverAt(name, n.Run+"/"+name+".sock")
}

// DriverAt makes a driver that will listen at a path. The options are for its server.
func (n *Node) DriverAt(name, socket string, options ...grpc.ServerOption) *Driver {
	d := &Driver{fake.NewDriver(socket, fake.Healthy(name), options...), n.T, name}
	n.T.Cleanup(d.Kill)
	return d
}

func (d *Driver) must(err error) {
	d.t.Helper()
	if err != nil {
		d.t.Fatalf("driver %s: %v", d.Name, err)
	}
}

// Start serves, and returns the time when listening began.
func (d *Driver) Start() time.Time {
	d.t.Helper()
	at, err := d.Driver.Start()
	d.must(err)
	return at
}

// Listen binds and listens, and never accepts: connections succeed, calls get no answer.
func (d *Driver) Listen() { d.t.Helper(); d.must(d.Driver.Listen()) }

// HangUp listens and closes each connection as soon as it comes.
func (d *Driver) HangUp() { d.t.Helper(); d.must(d.Driver.HangUp()) }

// Serve makes a driver serve that only listens or hangs up, on the same socket.
func (d *Driver) Serve() { d.t.Helper(); d.must(d.Driver.Serve()) }

// Stop ends the driver as a good one ends: its socket is removed.
func (d *Driver) Stop() { d.t.Helper(); d.must(d.Driver.Stop()) }

// driverMain is the driver as a process of its own, in the role "driver": its arguments
// are the name and the socket. It ends by TERM, its socket with it, or by KILL.
func driverMain(args []string) int {
	if len(args) != 2 {
		return 2
	}
	d := fake.NewDriver(args[1], fake.Healthy(args[0]))
	if _, err := d.Start(); err != nil {
		os.Stderr.WriteString(err.Error() + "\n")
		return 1
	}
	term := make(chan os.Signal, 1)
	notify(term, syscall.SIGTERM)
	<-term
	if err := d.Stop(); err != nil {
		return 1
	}
	return 0
}
