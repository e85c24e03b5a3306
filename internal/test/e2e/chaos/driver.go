package chaos

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"csi-registrar/internal/test/fake"
)

// flaw is a permanent fault of a driver, which never becomes ready.
type flaw string

const (
	sound       flaw = ""
	otherName   flaw = "other name"
	neverReady  flaw = "never ready"
	failingNode flaw = "NodeGetInfo fails"
)

// Driver is a fake driver and its state. Only the goroutine that carries out the steps calls its
// methods; the world's lock guards the fields that others read.
type Driver struct {
	*fake.Driver
	name  string
	dir   string // its own, for the socket and another name of it
	alias string // a link to the socket
	flaw  flaw

	// The answers from the next start on: lie if it is not nil, else truth.
	truth fake.Answers
	lie   *fake.Answers

	everWell bool // it has been sound, so it may have been ready

	role     role
	hangable bool           // its directory is on the file system that hangs at times
	hung     []*fake.Driver // earlier processes, which still hang; their sockets have no name

	// The driver's configuration.
	conf conf
}

// role says which part of the test controls a driver.
type role string

const (
	disturbed role = ""         // the plan
	flapping  role = "flapping" // only flap
	measured  role = "measured" // only measure: the driver itself has no faults
)

type conf struct {
	present, enabled, broken, byAlias, withdraw bool
}

func newDriver(short, run string, f flaw) *Driver {
	name, dir := short+".chaos.example", filepath.Join(run, short)
	d := &Driver{
		name: name, dir: dir, alias: filepath.Join(dir, "alias.sock"), flaw: f,
		truth: fake.Answers{Name: name, Version: "1.0", NodeID: "node-" + name, Topology: map[string]string{"topology." + name + "/zone": "z1"}},
		conf:  conf{present: true, enabled: true},
	}
	if f == otherName {
		d.truth.Name = "other." + name
	}
	d.Driver = d.process(filepath.Join(dir, "csi.sock"))
	return d
}

// process returns a new process of the driver, not started.
func (d *Driver) process(socket string) *fake.Driver {
	answers := d.truth
	answers.NotReady = d.flaw == neverReady
	if d.flaw == failingNode {
		answers.Fail = map[string]error{fake.NodeGetInfo: status.Error(codes.Internal, "not today")}
	}
	return fake.NewDriver(socket, answers, grpc.ConnectionTimeout(maxSilence))
}

// table returns the driver's configuration file.
func (d *Driver) table() string {
	text := fmt.Sprintf("[driver.%q]\nsocket = %q\ntimeout = \"1s\"\nenabled = %t\n", d.name, d.Socket, d.conf.enabled)
	if d.conf.byAlias {
		text += fmt.Sprintf("endpoint = %q\n", d.alias)
	}
	if d.conf.withdraw {
		text += "when_driver_is_gone = \"withdraw\"\nwithdraw_after = \"1s\"\n"
	}
	if d.conf.broken {
		text += "soket = 7\n"
	}
	return text
}

// maxSilence is how long a server waits for the first bytes on a connection. Stopping the server
// waits for that too, and a frozen daemon sends nothing.
const maxSilence = time.Second

// start starts the driver with a new socket. It does nothing if the driver runs.
func (d *Driver) start() error {
	if d.Running() {
		return nil
	}
	if err := os.MkdirAll(d.dir, 0o755); err != nil {
		return err
	}
	if err := gone(os.Remove(d.alias)); err != nil {
		return err
	}
	if err := os.Symlink(d.Socket, d.alias); err != nil {
		return err
	}
	_, err := d.serve()
	return err
}

// serve starts a process with the current answers.
func (d *Driver) serve() (listening time.Time, err error) {
	said := d.truth
	if d.lie != nil {
		said = *d.lie
	}
	d.Set(func(a *fake.Answers) {
		a.Name, a.NodeID, a.MaxVolumes, a.Topology = said.Name, said.NodeID, said.MaxVolumes, maps.Clone(said.Topology)
	})
	if d.flaw == sound {
		d.everWell = true
	}
	return d.Start()
}

// replace starts a new process at the path of one that hangs in NodeGetInfo and keeps running.
func (d *Driver) replace() error {
	if !d.Running() {
		return nil
	}
	d.hangIn(fake.NodeGetInfo)
	path := d.Socket
	d.hung = append(d.hung, d.Driver)
	d.Driver = d.process(path + ".new")
	_, err := d.serve()
	if err == nil {
		err = os.Rename(d.Socket, path)
	}
	d.Socket = path
	return err
}

// stop stops the driver. A killed driver leaves its socket behind.
func (d *Driver) stop(killed bool) error {
	for _, h := range d.hung {
		h.Kill()
	}
	d.hung = nil
	d.unhang()
	if killed {
		d.Kill()
		return nil
	}
	return d.Stop()
}

func (d *Driver) unhang() { d.Set(func(a *fake.Answers) { a.Hang = nil }) }

func (d *Driver) hangIn(method string) {
	d.Set(func(a *fake.Answers) { a.Hang = map[string]bool{method: true} })
}

func (d *Driver) setReady(ready bool) {
	d.Set(func(a *fake.Answers) { a.NotReady = !ready || d.flaw == neverReady })
}

// lying returns a copy of the truth, to be changed.
func (d *Driver) lying() *fake.Answers {
	lie := d.truth
	lie.Topology = maps.Clone(lie.Topology)
	return &lie
}

// gone ignores the error that a file does not exist.
func gone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
