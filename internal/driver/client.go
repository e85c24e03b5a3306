// Package driver talks to a CSI driver: is it there, who is it, is it still the same, and
// may it be trusted.
package driver

import (
	"cmp"
	"context"
	"log/slog"
	"time"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
	"csi-registrar/internal/trust"
	"csi-registrar/internal/unixsock"
	"csi-registrar/internal/worker"
)

const (
	defaultTimeout = 5 * time.Second

	// nodeInfoTimeout is the kubelet's own for NodeGetInfo (csiTimeout, kubelet v1.36): a
	// driver that is too slow for us is too slow for it.
	nodeInfoTimeout = 2 * time.Minute

	// maxSilence is how long a connection on which nothing is ever answered is kept for the
	// next Ask. A new one each second would fill the queue of a driver that does not accept.
	maxSilence = time.Minute

	// maxRestarts is how often one Ask starts over because the socket was replaced.
	maxRestarts = 3

	maxReason = 1000 // characters
)

// Config says where a driver is and what is expected of it.
type Config struct {
	Name     string        // what GetPluginInfo must answer; empty: any name that is valid
	Socket   string        // where the driver listens
	Endpoint string        // what the kubelet is told; empty: Socket
	Timeout  time.Duration // for GetPluginInfo and for Probe; zero: 5 s
	// Owner is the user, by name or number, who besides root and our own may own the socket
	// and the directories on the way; empty: root. "any" turns these checks off.
	Owner string
	// AnyEndpoint leaves out every check of Endpoint, as node-driver-registrar does: with its
	// flags it is a path of the host, and what is there within our own view says nothing about it.
	AnyEndpoint bool
}

// Hints is where hints come from and go to (satisfied by fswatch.Subscription). The Client
// adds its own: one channel then serves all that its user waits for.
type Hints interface {
	Hints() <-chan struct{} // capacity one
	Hint()                  // never blocks, also after Close
	Close()
}

// Options are what a Client needs; all are required.
type Options struct {
	Log   *slog.Logger
	Hints Hints // they should tell of changes of Config.Socket and Config.Endpoint
	Pool  *worker.Pool
}

// Client asks one driver. It holds at most one connection to it.
//
// Its fields are those of the goroutine that calls Ask, and Close after it; what the
// connection notes in the background is in conn.
type Client struct {
	cfg   Config
	log   *slog.Logger
	hints Hints
	owner trust.SocketOwner

	socket, endpoint target
	lookLimit        time.Duration
	again            *time.Timer // hints later, where nothing else will; stopped while asking
	hinted           bool        // Ask received a hint, which it gives back
	seen             sighting    // at socket

	conn       *conn // kept between two Asks
	budget     budget
	last       status.Report   // of the last Ask, without Replaced
	endpointID unixsock.FileID // what it found there; zero: nothing to be seen
	readyID    unixsock.FileID // the socket of the last Ready report
}

// New returns a client. It closes o.Hints when it is closed.
func New(cfg Config, o Options) *Client {
	cfg.Timeout = cmp.Or(cfg.Timeout, defaultTimeout)
	if cfg.Endpoint == "" || cfg.AnyEndpoint {
		cfg.Endpoint = cfg.Socket
	}
	c := &Client{
		cfg: cfg, log: o.Log, hints: o.Hints,
		owner:     trust.SocketOwner(cmp.Or(cfg.Owner, "root")),
		lookLimit: lookLimit,
		// The endpoint may be on another file system, which may be dead while this one is not.
		socket:   target{cfg.Socket, o.Pool.Slot(cfg.Socket, o.Hints.Hint)},
		endpoint: target{cfg.Endpoint, o.Pool.Slot(cfg.Endpoint, o.Hints.Hint)},
	}
	c.again = time.AfterFunc(lookAgain, o.Hints.Hint)
	c.again.Stop()
	return c
}

// Hints receives when it is worth asking: the connection broke, a file system answers again,
// and what Options.Hints tells. Nobody else may receive from it while Ask runs.
func (c *Client) Hints() <-chan struct{} { return c.hints.Hints() }

// Close ends the kept connection and the hints. No Ask may be running.
func (c *Client) Close() error {
	c.again.Stop()
	c.hints.Close()
	c.drop()
	return nil
}

// drop closes the kept connection.
func (c *Client) drop() {
	if c.conn != nil {
		c.conn.close()
		c.conn = nil
	}
}

// Ask finds out how the driver is. It returns when that is known or ctx is done; at most one
// runs at a time. While the connection of a Ready report is good, and the same trusted socket
// is at the path, it returns that report again without asking the driver anything.
//
// progress, if not nil, is called when the driver has not answered a call for a second. It
// must not block.
func (c *Client) Ask(ctx context.Context, progress func(status.Report)) status.Report {
	c.again.Stop()
	begun := time.Now()
	var r status.Report
	for range 1 + maxRestarts {
		if r = c.ask(ctx, progress); r.Reason != replaced.reason {
			break
		}
	}
	r.Reason = safetext.Clean(r.Reason, maxReason)
	if c.hinted {
		c.hinted = false
		c.hints.Hint()
	}
	c.log.Debug("asked the driver", "driver_state", string(r.Driver), "reason", r.Reason, "took", time.Since(begun))
	return r
}

// finding is what a step has against the driver; the zero finding is nothing.
type finding struct {
	state  status.DriverState
	reason string
}

func (f finding) ok() bool { return f == finding{} }

func (c *Client) ask(ctx context.Context, progress func(status.Report)) status.Report {
	socket, endpoint, f := c.look(ctx)
	if f.ok() && c.usable(socket) && c.last.Driver == status.Ready && c.endpointID == endpoint.FileID {
		return c.last
	}
	if f.ok() {
		f = c.connect(ctx, socket)
	}
	if !f.ok() {
		if f.state != status.Starting {
			c.drop()
		}
		return status.Report{Driver: f.state, Reason: f.reason}
	}
	q := inquiry{Client: c, ctx: ctx, progress: progress}
	if f = q.run(endpoint); f.ok() {
		f.state = status.Ready
	}
	q.Driver, q.Reason = f.state, f.reason
	c.last, c.endpointID = q.Report, endpoint.FileID
	c.conn.kept.Store(true) // from now on its end is hinted
	if q.Driver == status.Ready {
		if c.conn.broken() { // since the last answer
			c.hints.Hint()
		}
		q.Replaced = c.readyID != unixsock.FileID{} && c.readyID != c.conn.file.FileID
		c.readyID = c.conn.file.FileID
	}
	return q.Report
}

// usable reports whether the kept connection can be used further.
func (c *Client) usable(socket unixsock.File) bool {
	return c.conn != nil && !c.conn.broken() && c.conn.file.FileID == socket.FileID
}

// connect makes a new connection unless the kept one is still good.
func (c *Client) connect(ctx context.Context, socket unixsock.File) finding {
	if c.usable(socket) && time.Since(c.conn.answered) < maxSilence {
		c.conn.kept.Store(false) // this Ask reports its end
		return finding{}
	}
	c.drop()
	if c.budget.spend(0) {
		return flood // until its minute is over
	}
	t, f := c.dial(ctx, c.socket)
	if f.state == status.Absent && socket.IsSocket() && c.seen.youngerThan(young) {
		c.again.Reset(lookAgain) // listen makes no event
	}
	c.conn = t
	return f
}
