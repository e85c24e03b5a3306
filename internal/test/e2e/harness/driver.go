package harness

import (
	"os"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"csi-registrar/internal/test/fake"
)

// Driver is a fake driver on a node. Its errors fail the test.
type Driver struct {
	*fake.Driver
	t    testing.TB
	Name string // its configured name; its answer may differ
}

// AddDriver returns a driver that is configured, with extra lines in its table, but not started.
func (n *Node) AddDriver(name string, extra ...string) *Driver {
	n.T.Helper()
	d := n.NewDriver(name)
	n.Configure(name, d.Socket, extra...)
	return d
}

// NewDriver returns a driver that is neither started nor configured.
func (n *Node) NewDriver(name string) *Driver {
	return n.DriverAt(name, n.Run+"/"+name+".sock")
}

// DriverAt is NewDriver with another socket path and options for the server.
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

// Start starts the driver and returns the time at which it began to listen.
func (d *Driver) Start() time.Time {
	d.t.Helper()
	at, err := d.Driver.Start()
	d.must(err)
	return at
}

// Listen listens but never accepts: connections succeed, calls get no answer.
func (d *Driver) Listen() { d.t.Helper(); d.must(d.Driver.Listen()) }

// HangUp listens and closes each connection at once.
func (d *Driver) HangUp() { d.t.Helper(); d.must(d.Driver.HangUp()) }

// Serve makes a driver that only listens or hangs up serve, on the same socket.
func (d *Driver) Serve() { d.t.Helper(); d.must(d.Driver.Serve()) }

// Stop stops the driver, which removes its socket.
func (d *Driver) Stop() { d.t.Helper(); d.must(d.Driver.Stop()) }

// driverMain runs a driver as a process of its own, in the role "driver". Its arguments are the
// name and the socket. At SIGTERM it removes its socket.
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
