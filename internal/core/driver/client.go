// Package driver finds out whether a CSI driver is there and ready, what it reports, whether it is
// the same one as before, and whether it can be trusted.
package driver

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

const (
	// nodeInfoTimeout is the kubelet's timeout for NodeGetInfo (csiTimeout, kubelet v1.36).
	nodeInfoTimeout = 2 * time.Minute

	// maxSilence is how long a connection without an answer is kept for the next Ask. A new one
	// each second would fill the queue of a driver that does not accept.
	maxSilence = time.Minute

	maxReason = 1000 // characters
)

// Client is the client of one driver. It keeps at most one connection to it.
//
// Its fields belong to the goroutine that calls Ask, and then Close. State that changes in the
// background is in conn.
type Client struct {
	cfg   config.Connection
	log   *slog.Logger
	hints rate.Hinter

	socket, endpoint target
	lookLimit        time.Duration
	again            *time.Timer     // gives a hint where nothing else does; stopped during an Ask
	hinted           bool            // Ask received a hint, and gives it again when it returns
	seen             unixsock.FileID // of socket; zero: nothing is there
	seenSince        time.Time

	conn       *conn  // kept after an Ask
	dialed     uint64 // connections so far
	budget     budget
	last       status.Report   // of the last inquiry, without Replaced
	endpointID unixsock.FileID // the file at the endpoint then; zero: not visible
	reached    bool            // the driver has answered at the endpoint
	readyID    unixsock.FileID // the socket of the last Ready report
	server     status.Server   // of the last connection
}

// New returns a Client. Without cfg.Name it accepts the name of the first Ready report, and then no
// other. The endpoint is checked unless it is the path of the socket. hints are about both; Close
// also closes them.
func New(cfg config.Connection, log *slog.Logger, hints rate.Hinter, pool *worker.Pool) *Client {
	c := &Client{
		cfg: cfg, log: log, hints: hints,
		lookLimit: lookLimit,
		// The endpoint may be on another file system, which may hang while this one does not.
		socket:   target{cfg.Socket, pool.Slot(cfg.Socket, hints.Hint)},
		endpoint: target{cfg.Endpoint, pool.Slot(cfg.Endpoint, hints.Hint)},
	}
	c.again = time.AfterFunc(againMost, hints.Hint)
	c.again.Stop()
	return c
}

// Hints implements Asker: the connection broke, a file system answers again, or
// the hints of New received.
func (c *Client) Hints() <-chan struct{} { return c.hints.Hints() }

// Close implements Asker.
func (c *Client) Close() {
	c.again.Stop()
	c.hints.Close()
	c.drop()
}

// drop closes the kept connection.
func (c *Client) drop() {
	if c.conn != nil {
		c.conn.close()
		c.conn = nil
	}
}

// Ask implements Asker.
func (c *Client) Ask(ctx context.Context, why Why, progress func(status.Report)) status.Report {
	c.again.Stop()
	begun := time.Now()
	r := c.ask(ctx, why, progress)
	r.Reason, r.Server = safetext.Clean(r.Reason, maxReason), c.server
	if c.hinted {
		c.hinted = false
		c.hints.Hint()
	}
	c.log.Debug("asked the driver", "driver", c.cfg.Name, "driver_state", string(r.Driver), "reason", r.Reason, "took", time.Since(begun))
	return r
}

// finding is the reason why the driver is not Ready; zero: a step found none.
type finding struct {
	state  status.DriverState
	reason string
}

func (f finding) ok() bool { return f == finding{} }

func (c *Client) ask(ctx context.Context, why Why, progress func(status.Report)) status.Report {
	socket, endpoint, f := c.look(ctx)
	same := f.ok() && c.usable(socket) && c.endpointID == endpoint.FileID
	if same && why == Hinted && c.last.Driver == status.Starting && c.last.Connection == c.dialed && !c.last.Silent {
		return status.Report{}
	}
	if same && c.last.Driver == status.Ready {
		switch silent := c.conn.silentSince; {
		case why != Probing && silent.IsZero():
			return c.last
		case !c.conn.silent():
			return c.probe(ctx, endpoint)
		}
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
	c.conn.kept.Store(true) // from now on its end gives a hint
	if q.Driver == status.Ready {
		if c.conn.broken() { // since the last answer
			c.hints.Hint()
		}
		q.Replaced = c.readyID != unixsock.FileID{} && c.readyID != c.conn.file.FileID
		c.readyID, c.cfg.Name = c.conn.file.FileID, q.Identity.Name
	}
	return q.Report
}

// probe calls Probe over the kept connection of the last Ready report, and checks the endpoint.
func (c *Client) probe(ctx context.Context, endpoint unixsock.File) status.Report {
	q := inquiry{Client: c, ctx: ctx, Report: status.Report{Identity: c.last.Identity}}
	f := q.probe()
	if f.ok() {
		f = q.checkEndpoint(endpoint)
	}
	if f.ok() {
		return c.last
	}
	q.Driver, q.Reason, q.Connection = f.state, f.reason, c.dialed
	if !q.Silent {
		c.last = q.Report
	}
	return q.Report
}

// usable reports whether the kept connection can still be used.
func (c *Client) usable(socket unixsock.File) bool {
	return c.conn != nil && !c.conn.broken() && c.conn.file.FileID == socket.FileID
}

// connect makes a new connection unless the kept one can still be used.
func (c *Client) connect(ctx context.Context, socket unixsock.File) finding {
	if c.usable(socket) && !c.conn.silent() {
		c.conn.kept.Store(false) // this Ask reports its end
		return finding{}
	}
	c.drop()
	if c.budget.spend(0) {
		return flood // until the minute is over
	}
	t, f := c.dial(ctx, c.socket)
	if age := time.Since(c.seenSince); f.state == status.Absent && socket.IsSocket() && age < young {
		c.again.Reset(min(max(age, againFirst), againMost))
	}
	if c.conn = t; t != nil {
		c.server = t.server
	}
	c.dialed++
	return f
}

const maxVersion = 128 // characters of a vendor version; longer ones are cut

// validateInfo compares GetPluginInfo's answer with the configuration. An empty name is
// Starting: some drivers answer before they know who they are.
func validateInfo(cfg config.Connection, info *csi.GetPluginInfoResponse, id *status.Identity) finding {
	name := info.GetName()
	id.Version = safetext.Clean(info.GetVendorVersion(), maxVersion)
	reports := fmt.Sprintf("the driver at %s reports name %s", cfg.Socket, quote(name, csiname.MaxName+1))
	switch {
	case name == "":
		return finding{status.Starting, "the driver answers GetPluginInfo with an empty name: see its own log and flags"}
	case cfg.Name != "" && name != cfg.Name:
		return finding{status.Mismatch, fmt.Sprintf("%s, expected %q: csi-registrar doctor %s names the fix", reports, cfg.Name, cfg.Name)}
	}
	if err := csiname.CheckName(name); err != nil {
		return finding{status.Mismatch, fmt.Sprintf("%s: %s", reports, safetext.Clean(err.Error(), maxMessageShown))}
	}
	id.Name = name
	return finding{}
}

// validateNode records NodeGetInfo's answer. A driver whose answer the kubelet or the API server
// would refuse is Starting: it may give another answer soon.
func validateNode(info *csi.NodeGetInfoResponse, id *status.Identity) finding {
	for _, p := range CheckNode(info) {
		if !p.Accepted {
			return finding{status.Starting, fmt.Sprintf("the driver answers NodeGetInfo, but %s (expected: %s): see its own flags and log", p.Found, p.Expected)}
		}
	}
	id.NodeID, id.MaxVolumes, id.Topology = info.GetNodeId(), info.GetMaxVolumesPerNode(), maps.Clone(info.GetAccessibleTopology().GetSegments())
	return finding{}
}

// quote quotes a string of the driver, of which it keeps at most limit characters.
func quote(s string, limit int) string {
	if short := fmt.Sprintf("%.*s", limit, s); short != s {
		s = short + "…"
	}
	return safetext.Quote(s)
}
