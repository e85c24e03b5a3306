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
	"strings"
	"syscall"

	"csi-registrar/internal/config"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/unixsock"
)

// driver examines one driver and its registration.
func (x *exam) driver(ctx context.Context, d config.Driver) {
	if c, who := x.reach(ctx, d); c != nil {
		x.ask(ctx, d, c, who)
		c.Close()
		if d.Endpoint != d.Socket {
			x.endpoint(ctx, d)
		}
	}
	x.registration(ctx, d)
}

// dial connects to a socket of somebody else's and returns who listens there.
func (x *exam) dial(ctx context.Context, path string) (*net.UnixConn, unixsock.Cred, error) {
	type result struct {
		c    *net.UnixConn
		cred unixsock.Cred
	}
	r, err := lookOr(ctx, x, path, func() (r result, err error) {
		ctx, cancel := context.WithTimeout(ctx, socketTimeout)
		defer cancel()
		if r.c, err = unixsock.Dial(ctx, path); err == nil {
			r.cred, err = unixsock.PeerCred(r.c)
		}
		return r, err
	}, func(r result) {
		if r.c != nil {
			r.c.Close()
		}
	})
	return r.c, r.cred, err
}

// reach connects to the driver's socket, and says what is wrong if that cannot be, or if it
// is not to be trusted.
func (x *exam) reach(ctx context.Context, d config.Driver) (*net.UnixConn, process) {
	shown := safetext.Word(d.Socket)
	restart := text("restart the driver")
	f := Finding{Driver: d.Name, Step: StepSocket, Severity: Problem, explains: true}
	at, err := x.stat(ctx, d.Socket)
	var c *net.UnixConn
	var cred unixsock.Cred
	isSocket := err == nil && at.IsSocket()
	if isSocket && !x.trusted(ctx, d, nil) {
		return nil, process{}
	}
	if isSocket {
		c, cred, err = x.dial(ctx, d.Socket)
	}
	switch {
	case isSocket && err == nil:
		who, ok := x.process(ctx, cred.PID)
		if !ok {
			who = process{pid: cred.PID, comm: fmt.Sprintf("uid=%d", cred.UID)}
		}
		x.checked(d.Name, StepSocket, OK, "%s, served by %s", shown, who)
		if !x.trusted(ctx, d, &cred) {
			c.Close()
			return nil, process{}
		}
		if d.SocketOwner == config.OwnerAny {
			x.checked(d.Name, StepTrust, Skipped, `socket_owner = "any"`)
		} else {
			x.checked(d.Name, StepTrust, OK, "only %s can be behind the socket", safetext.Word(d.SocketOwner))
		}
		return c, who
	case errors.Is(err, fs.ErrNotExist):
		f.Found, f.Expected = x.missing(ctx, d.Socket), "the driver runs and makes its socket there"
		f.Fix = []Fix{text("start the driver; if it listens elsewhere, set socket in %s", x.origin(d, "socket")), reload}
	case errors.Is(err, fs.ErrPermission):
		f.Severity, f.explains = Warning, false
		f.Found = "this user may not connect to " + shown
		f.Fix = []Fix{run("sudo", "csi-registrar", "doctor")}
	case !isSocket && err != nil:
		f.Found = fmt.Sprintf("%s cannot be looked at: %v", shown, err)
		f.Expected = "every directory on its path is one that root may enter, on a file system that answers"
	case !isSocket:
		f.Found, f.Expected = fmt.Sprintf("%s is %s, not a socket", shown, at.Kind()), "the driver makes a socket there"
		f.Fix = []Fix{remove(d.Socket, at), restart}
	case errors.Is(err, syscall.ECONNREFUSED):
		f.Found = "nobody listens on " + shown + ": it was left behind by a driver that has ended"
		f.Expected = "the driver runs and listens there"
		f.Fix = []Fix{text("start the driver; if it does not replace the stale socket by itself, remove that first:"), remove(d.Socket, at)}
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, syscall.EAGAIN):
		f.Found = fmt.Sprintf("%s accepts no connection within %v: its queue is full, the driver hangs", shown, socketTimeout)
		f.Expected = "the driver accepts connections"
		f.Fix = []Fix{restart}
	default:
		f.Found, f.Expected = fmt.Sprintf("connecting to %s failed: %v", shown, err), "the driver listens there, on a stream socket"
		f.Fix = []Fix{restart}
	}
	x.found(f)
	return nil, process{}
}

// remove removes a file that is in the way.
func remove(file string, at unixsock.File) Fix {
	if at.IsDir() {
		return run("rm", "-r", file)
	}
	return run("rm", file)
}

// missing says how much of a path there is, and what is there instead.
func (x *exam) missing(ctx context.Context, file string) string {
	shown, parent := safetext.Word(file), path.Dir(file)
	dir := parent
	for dir != "/" {
		if _, err := x.stat(ctx, dir); err == nil {
			break
		}
		dir = path.Dir(dir)
	}
	if dir != parent {
		return fmt.Sprintf("there is no %s: its directory does not exist, there is only %s", shown, safetext.Word(dir))
	}
	var others []string
	entries, _ := look(ctx, x, dir, func() ([]os.DirEntry, error) {
		d, err := os.Open(dir)
		if err != nil {
			return nil, err
		}
		defer d.Close()
		return d.ReadDir(1000)
	})
	for _, e := range entries {
		if e.Type()&fs.ModeSocket != 0 && len(others) < 5 {
			others = append(others, safetext.Word(e.Name()))
		}
	}
	if len(others) > 0 {
		return fmt.Sprintf("there is no %s; other sockets in that directory: %s", shown, strings.Join(others, ", "))
	}
	return "there is no " + shown
}

// endpoint looks whether what the kubelet is told leads to the driver too.
func (x *exam) endpoint(ctx context.Context, d config.Driver) {
	shown := safetext.Word(d.Endpoint)
	f := Finding{Driver: d.Name, Step: StepEndpoint, Severity: Problem, explains: true,
		Expected: "endpoint is a path to the driver's socket, as the kubelet sees it",
		Fix:      []Fix{text("set endpoint in %s, or leave it out", x.origin(d, "endpoint")), reload}}
	seen := d.Endpoint
	if x.kubelet != nil { // in its own view of the file system, if it has one
		view := x.seenBy(x.kubelet, d.Endpoint)
		if _, err := x.stat(ctx, view); err == nil {
			seen = view
		}
	}
	at, err := x.stat(ctx, seen)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		f.Found = "the kubelet is told the endpoint " + shown + ", and there is no such file: it refuses"
	case err != nil:
		f.Found = fmt.Sprintf("the endpoint %s cannot be looked at: %v", shown, err)
	case !at.IsSocket():
		f.Found = fmt.Sprintf("the endpoint %s is %s, not a socket", shown, at.Kind())
	case x.sameFile(ctx, seen, d.Socket):
		x.checked(d.Name, StepEndpoint, OK, "%s is the same socket", shown)
		return
	default:
		name, err := x.nameAt(ctx, seen, d.Timeout)
		switch {
		case err != nil:
			f.Found = fmt.Sprintf("the endpoint %s does not answer GetPluginInfo: %s", shown, safetext.Quote(err.Error()))
		case name != d.Name:
			f.Found = fmt.Sprintf("at the endpoint %s another driver answers: %s", shown, cmp.Or(quoteName(name), "one without a name"))
		default:
			x.checked(d.Name, StepEndpoint, OK, "%s answers with the same name", shown)
			return
		}
	}
	x.found(f)
}

// quoteName quotes a name that a stranger gave; empty stays empty.
func quoteName(name string) string {
	if name == "" {
		return ""
	}
	return safetext.Quote(name)
}
