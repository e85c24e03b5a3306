package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
)

// driver examines one driver and its registration.
func (x *diagnosis) driver(ctx context.Context, d config.Driver) {
	c, who := x.reach(ctx, d)
	if c != nil {
		x.ask(ctx, d, c, who)
		c.Close()
		if d.Endpoint != d.Socket {
			x.endpoint(ctx, d)
		}
	}
	if rootdir.Within(d.Socket, x.registry()) {
		x.checked(d.Name, "registrars", Skipped, "%s is below plugins_registry: the kubelet takes it for a registration socket, and calls GetInfo there forever; use another directory if the driver can",
			safetext.Word(d.Socket))
	}
	x.mounts(ctx, d, who)
	x.registration(ctx, d, who)
}

// dial connects to a socket and returns the credentials of the process that listens there.
func (x *diagnosis) dial(ctx context.Context, path string) (c *net.UnixConn, cred unixsock.Cred, err error) {
	c, err = look(ctx, x, path, func() (*net.UnixConn, error) {
		ctx, cancel := context.WithTimeout(ctx, socketTimeout)
		defer cancel()
		return unixsock.Dial(ctx, path)
	})
	if err == nil {
		cred, err = unixsock.PeerCred(c)
	}
	return c, cred, err
}

// reach connects to the driver's socket. It adds a finding if that fails, or if the socket is not
// trusted.
func (x *diagnosis) reach(ctx context.Context, d config.Driver) (*net.UnixConn, process) {
	shown := safetext.Word(d.Socket)
	problem := func(id ID, found, expected string, fix ...Fix) {
		x.finding(d.Name, "socket", id, found, expected, fix...)
	}
	at, err := x.stat(ctx, d.Socket)
	isSocket := err == nil && at.IsSocket()
	var c *net.UnixConn
	var cred unixsock.Cred
	if isSocket {
		if err := x.check(ctx, d.Socket, func() error { return d.SocketOwner.Path(d.Socket) }); err != nil {
			x.untrusted(ctx, d, err)
			return nil, process{}
		}
		c, cred, err = x.dial(ctx, d.Socket)
	}
	var last server
	if !isSocket || err != nil {
		last = x.serverOf(ctx, d.Name, process{})
	}
	switch {
	case isSocket && err == nil:
		who, ok := x.process(ctx, cred.PID)
		if !ok {
			who = process{pid: cred.PID, comm: fmt.Sprintf("uid=%d", cred.UID)}
		}
		x.checked(d.Name, "socket", OK, "%s, served by %s", shown, who)
		if err := d.SocketOwner.Listener(d.Socket, cred); err != nil {
			x.untrusted(ctx, d, err)
			c.Close()
			return nil, process{}
		}
		if d.SocketOwner == trust.Anybody {
			x.checked(d.Name, "trust", Skipped, `socket_owner = "any"`)
		} else {
			x.checked(d.Name, "trust", OK, "only %s can serve the socket", safetext.Word(string(d.SocketOwner)))
		}
		if again, fix := x.restarts(ctx, who, kubeletRound); again != "" {
			_, line := x.placeInUnit(ctx, who.unit, "csi-registrar supervise")
			if waits := superviseSocket.FindStringSubmatch(line); waits != nil && path.Clean(waits[1]) != d.Socket {
				again += "; its csi-registrar supervise waits at " + safetext.Word(waits[1]) + ", not at the driver's socket"
				fix = x.correctEndpoint(ctx, who.unit, waits[1], d.Socket)
			}
			s := x.serverOf(ctx, d.Name, who)
			problem("driver-unit-restarting", again, "it keeps running", slices.Concat(s.log(), fix, s.start())...)
		} else if strings.HasSuffix(who.unit, ".service") {
			x.enabled(ctx, d.Name, "socket", who.unit)
		}
		return c, who
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		x.missing(ctx, d, "there is no "+shown, last)
	case errors.Is(err, fs.ErrPermission):
		x.finding(d.Name, "socket", "not-root", "this user may not connect to "+shown, "", asRoot)
	case err != nil && !isSocket:
		where, fix := x.unreadable(ctx, d.Socket, err)
		problem("driver-socket-unreadable", fmt.Sprintf("%s cannot be examined: %v%s", shown, err, where),
			"root can enter every directory on its path, and the file system answers", fix...)
	case !isSocket && at.IsDir() && x.nearby(ctx, d) != "":
		x.missing(ctx, d, shown+" is a directory, not a socket", last)
	case !isSocket:
		problem("driver-socket-not-socket", fmt.Sprintf("%s is %s, not a socket", shown, at.Kind()),
			"the driver creates a socket there", append(x.remove(ctx, d.Socket, at), last.restart()...)...)
	case errors.Is(err, syscall.ECONNREFUSED):
		left := ": it was left behind by a driver that has ended" + last.ended
		if last.unit != "" && last.ended == "" {
			left = ", and " + last.unit + " runs: the file is not the one that it created"
		}
		problem("driver-socket-stale", "nobody listens on "+shown+left, "the driver runs and listens there",
			append(x.remove(ctx, d.Socket, at), last.restart()...)...)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, syscall.EAGAIN):
		problem("driver-not-accepting", fmt.Sprintf("%s accepts no connection within %v: its queue is full, the driver hangs", shown, socketTimeout),
			"the driver accepts connections", last.restart()...)
	default:
		problem("driver-connection-failed", fmt.Sprintf("connecting to %s failed: %v", shown, err), "the driver listens there, on a stream socket", last.restart()...)
	}
	return nil, process{}
}

// superviseSocket matches the socket at which supervise waits for the driver.
var superviseSocket = regexp.MustCompile(` supervise .*--?socket[= ]"?([^ "]+)`)

// endpoint checks that the kubelet reaches the driver by the endpoint that it is given.
func (x *diagnosis) endpoint(ctx context.Context, d config.Driver) {
	seen := d.Endpoint
	if x.kubelet != nil { // it may have its own mount namespace
		view := x.procPath(x.kubelet.pid, "root", d.Endpoint)
		if _, err := x.stat(ctx, view); err == nil {
			seen = view
		}
	}
	found := "the endpoint " + safetext.Word(d.Endpoint)
	at, err := x.stat(ctx, seen)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		found = "the kubelet is given " + found + ", which does not exist: it refuses the driver"
	case err != nil:
		found = fmt.Sprintf("%s cannot be examined: %v", found, err)
	case !at.IsSocket():
		found += " is " + at.Kind() + ", not a socket"
	case x.sameFile(ctx, seen, d.Socket):
		x.checked(d.Name, "endpoint", OK, "%s is the same socket", found)
		return
	default: // the driver may listen on both, or trace there; the daemon reports another name
		_, err := driver.LiveName(ctx, x.pool, d.SocketOwner, d.Endpoint)
		if elsewhere := d.Endpoint != seen && !x.sameFile(ctx, seen, d.Endpoint); err == nil || elsewhere {
			x.checked(d.Name, "endpoint", OK, "%s is another socket", found)
			return
		}
		found = fmt.Sprintf("the kubelet is given %s, another socket, which does not answer: %s", found, safetext.Quote(err.Error()))
	}
	x.finding(d.Name, "endpoint", "endpoint-unusable", found, "endpoint is a path to the driver's socket, as the kubelet sees it",
		x.setDriverKey(d.Name, "endpoint", safetext.Quote(d.Socket))...)
}

// topologyRefusal returns the fix for a topology value that the kubelet refuses, or would refuse,
// because the label of the Node has another value (kubelet v1.36, nodeinfomanager).
func (x *diagnosis) topologyRefusal(ctx context.Context, d config.Driver, st status.Driver) (expected string, fix []Fix) {
	keys := sortedKeys(st.Topology)
	named := slices.DeleteFunc(slices.Clone(keys), func(k string) bool { return !strings.Contains(st.KubeletError, k) })
	if len(named) > 0 {
		keys = named
	}
	if other, key := x.sharesTopology(st, keys); other != "" {
		return fmt.Sprintf("%s and %s report different values of the topology key %s: a Node has one label of that name", d.Name, other, safetext.Word(key)),
			[]Fix{note("if you removed the label, the kubelet would refuse %s instead", other),
				note("change the topology of one of the two drivers in its configuration, then run"), reregister(d)}
	}
	return "the labels of the Node agree with the topology of the driver: the kubelet refuses another value while the old label is there",
		x.relabel(ctx, d, keys, x.serverOf(ctx, d.Name, process{}))
}

// relabel corrects the driver, or removes the labels of topology keys from the Node and registers
// it again.
func (x *diagnosis) relabel(ctx context.Context, d config.Driver, keys []string, s server) []Fix {
	const wrong = "if the new topology is wrong, as after a change of the host name: "
	fix := []Fix{note(wrong + "correct the configuration of the driver, then")}
	name := x.kubeletFlag("hostname-override")
	at, line := x.placeInUnit(ctx, s.unit, "%H")
	if set := regexp.MustCompile(`(\w+=)%H`).FindStringSubmatch(line); set != nil {
		if last, _ := x.placeInUnit(ctx, s.unit, set[1]); last != at {
			fix, at = []Fix{note(wrong+"correct %s in %s, run systemctl daemon-reload, then", set[1], last)}, ""
		}
	}
	if i := strings.LastIndexByte(at, ':'); strings.HasPrefix(at, "/etc/") && isNodeName(name) {
		fix = []Fix{note(wrong + "the kubelet still has the earlier one"), run("sed", "-i", at[i+1:]+"s/%H/"+name+"/", at[:i]), run("systemctl", "daemon-reload")}
	} else if at != "" { // the host name
		fix = []Fix{note(wrong+"in %s write the earlier name in place of %%H, run systemctl daemon-reload, then", at)}
	}
	fix = append(fix, s.restart()...)
	fix = append(fix, note("if it is right: remove the label where kubectl works"))
	f := run("kubectl", "label", "node", x.nodeName())
	for _, k := range keys {
		if csiname.CheckLabelKey(k) == nil {
			f.Command.Args = append(f.Command.Args, k+"-")
		}
	}
	return append(fix, optional(f), note("when the label is gone, on this node:"), optional(run("csi-registrar", "reregister", "--force", d.Name)))
}

// nodeName returns the name that the kubelet chooses for the Node object unless a cloud provider
// chooses another.
func (x *diagnosis) nodeName() string {
	if name := x.kubeletFlag("hostname-override"); isNodeName(name) {
		return name
	}
	if name, err := os.Hostname(); err == nil && isNodeName(strings.ToLower(name)) {
		return strings.ToLower(name)
	}
	return "NODE"
}

// kubeletFlag returns the value of a flag of the kubelet; empty if it has none.
func (x *diagnosis) kubeletFlag(name string) string {
	if x.kubelet == nil {
		return ""
	}
	line, _ := readSome(x.procPath(x.kubelet.pid, "cmdline"), maxProcFile) // an error: it has ended
	args := strings.Split(string(line), "\x00")
	for i, arg := range args {
		flag, value, ok := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		if !ok && i+1 < len(args) {
			value = args[i+1]
		}
		if flag == name {
			return value
		}
	}
	return ""
}

// isNodeName reports whether name is valid for a Node: a DNS-1123 subdomain.
func isNodeName(name string) bool {
	return len(name) <= 253 && strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-.") == "" && strings.Trim(name, "-.") == name && name != ""
}

// sharesTopology returns another driver that reports another value of one of the topology keys, and
// that key.
func (x *diagnosis) sharesTopology(driver status.Driver, keys []string) (other, key string) {
	for _, st := range x.daemon.Drivers {
		for _, k := range keys {
			if value, ok := st.Topology[k]; ok && value != driver.Topology[k] && csiname.CheckName(st.Name) == nil {
				return st.Name, k
			}
		}
	}
	return "", ""
}
