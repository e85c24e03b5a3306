package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"csi-registrar/internal/config"
)

// driver examines one driver and its registration.
func (x *exam) driver(ctx context.Context, d config.Driver) {
	c, who := x.reach(ctx, d)
	if c != nil {
		verdict := x.verdict(ctx, d)
		x.ask(ctx, d, c, who)
		c.Close()
		r := verdict()
		if d.Endpoint != d.Socket {
			x.endpoint(ctx, d)
		}
		x.judge(d, r)
	}
	x.registration(ctx, d)
}

// reach connects to the driver's socket, and says what is wrong if that cannot be.
func (x *exam) reach(ctx context.Context, d config.Driver) (*net.UnixConn, process) {
	info, err := os.Stat(d.Socket)
	f := Finding{Driver: d.Name, Step: StepSocket, Severity: Problem, explains: true}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		f.Is, f.Should = x.missing(d.Socket)
		f.Fix = []string{"start the driver; if it listens elsewhere, set socket in " + x.origin(d, "socket") + ", then: csi-registrar reload"}
	case err != nil:
		f.Is = fmt.Sprintf("%s cannot be looked at: %v", d.Socket, err)
		f.Should = "every folder on its path is a folder that root may enter"
	case info.Mode()&fs.ModeSocket == 0:
		f.Is = fmt.Sprintf("%s is no socket but a %s", d.Socket, kindOf(info.Mode()))
		f.Should = "the driver makes a socket there"
		f.Fix = []string{"rm -r " + shellQuote(d.Socket), "restart the driver"}
		if info.Mode().IsRegular() {
			f.Fix[0] = "rm " + shellQuote(d.Socket)
		}
	}
	if f.Is != "" {
		x.found(&f)
		return nil, process{}
	}
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()
	c, cred, err := dialAs(ctx, d.Socket)
	switch {
	case err == nil:
		who := process{pid: cred.PID, comm: "uid " + strconv.Itoa(int(cred.UID))}
		if p, ok := readProcess(x.proc(), cred.PID); ok && cred.PID > 0 {
			who = p
		}
		x.checked(d.Name, StepSocket, OK, fmt.Sprintf("%s, served by %s", d.Socket, who))
		return c, who
	case errors.Is(err, syscall.ECONNREFUSED):
		f.Is = "nobody listens on " + d.Socket + ": it was left behind by a driver that has ended"
		f.Should = "the driver runs and listens there"
		f.Fix = []string{"start the driver; if it does not replace the dead socket by itself: rm " + shellQuote(d.Socket)}
	case errors.Is(err, fs.ErrPermission):
		f.Severity, f.explains = Warning, false
		f.Is = fmt.Sprintf("%s may not be connected to by this user", d.Socket)
		f.Fix = []string{"sudo csi-registrar doctor"}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, syscall.EAGAIN):
		f.Is = fmt.Sprintf("%s takes no connection within %v: its queue is full, the driver hangs", d.Socket, d.Timeout)
		f.Should = "the driver accepts connections"
		f.Fix = []string{"restart the driver"}
	default:
		f.Is = fmt.Sprintf("%s cannot be connected to: %v", d.Socket, err)
		f.Should = "the driver listens there, on a stream socket"
		f.Fix = []string{"restart the driver"}
	}
	x.found(&f)
	return nil, process{}
}

// missing says how much of a path there is, and what is there instead.
func (x *exam) missing(file string) (is, should string) {
	should = "the driver runs and makes its socket there"
	dir := path.Dir(file)
	for dir != "/" {
		if _, err := os.Stat(dir); err == nil {
			break
		}
		dir = path.Dir(dir)
	}
	if dir != path.Dir(file) {
		return fmt.Sprintf("there is no %s: its folder does not exist, there is %s only", file, dir), should
	}
	var others []string
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.Type()&fs.ModeSocket != 0 && len(others) < 5 {
			others = append(others, e.Name())
		}
	}
	if len(others) > 0 {
		return fmt.Sprintf("there is no %s; other sockets in that folder: %s", file, strings.Join(others, ", ")), should
	}
	return "there is no " + file, should
}

func kindOf(mode fs.FileMode) string {
	switch {
	case mode.IsDir():
		return "folder"
	case mode.IsRegular():
		return "file"
	}
	return "device or pipe"
}

// origin tells where a key of the driver is written; where it is not, where its table is.
func (x *exam) origin(d config.Driver, key string) string {
	at := x.config.Origin(fmt.Sprintf("driver.%q.%s", d.Name, key))
	if at == "default" {
		at = x.config.Origin(fmt.Sprintf("driver.%q.socket", d.Name))
	}
	return at
}

// endpoint looks whether what the kubelet is told leads to the driver too.
func (x *exam) endpoint(ctx context.Context, d config.Driver) {
	f := Finding{Driver: d.Name, Step: StepEndpoint, Severity: Problem, explains: true,
		Should: "endpoint leads to the driver's socket, as the kubelet sees it",
		Fix:    []string{"set endpoint in " + x.origin(d, "endpoint") + ", or leave it out, then: csi-registrar reload"}}
	seen := d.Endpoint
	if x.kubelet != nil { // in its own view of the file system, if it has one
		view := filepath.Join(x.proc(), strconv.Itoa(x.kubelet.pid), "root", d.Endpoint)
		if _, err := os.Stat(view); err == nil {
			seen = view
		}
	}
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()
	info, err := os.Stat(seen)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		f.Is = "the kubelet is told the endpoint " + d.Endpoint + ", and there is no such file: it refuses"
		x.found(&f)
		return
	case err != nil || info.Mode()&fs.ModeSocket == 0:
		f.Is = fmt.Sprintf("the endpoint %s is no socket", d.Endpoint)
		x.found(&f)
		return
	}
	if mine, err := os.Stat(d.Socket); err == nil && os.SameFile(mine, info) {
		x.checked(d.Name, StepEndpoint, OK, d.Endpoint+" is the same socket")
		return
	}
	c, _, err := dialAs(ctx, seen)
	if err != nil {
		f.Is = fmt.Sprintf("the endpoint %s cannot be connected to: %v", d.Endpoint, err)
		x.found(&f)
		return
	}
	defer c.Close()
	name, _, err := pluginInfo(ctx, c)
	switch {
	case err != nil:
		f.Is = fmt.Sprintf("the endpoint %s does not answer GetPluginInfo: %v", d.Endpoint, err)
	case name != d.Name:
		f.Is = fmt.Sprintf("at the endpoint %s another driver answers: %s", d.Endpoint, cmp.Or(name, "one without a name"))
	default:
		x.checked(d.Name, StepEndpoint, OK, d.Endpoint+" answers with the same name")
		return
	}
	x.found(&f)
}
