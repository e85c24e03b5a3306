// Package driver talks to a CSI driver: is it there, who is it, is it still the same, and
// may it be trusted.
package driver

import (
	"cmp"
	"context"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
)

const (
	defaultTimeout = 5 * time.Second

	// nodeInfoTimeout is the kubelet's own for NodeGetInfo (csiTimeout, kubelet v1.36): a
	// driver that is too slow for us is too slow for it.
	nodeInfoTimeout = 2 * time.Minute

	// maxSilence is how long a connection on which nothing is ever answered is kept for the
	// next round. A new one each second would fill the queue of a driver that does not accept.
	maxSilence = time.Minute

	maxReason = 1000 // characters
)

// Config says where a driver is and what is expected of it.
type Config struct {
	Name     string        // what GetPluginInfo must answer; empty: any name that is valid
	Socket   string        // where the driver listens
	Endpoint string        // what the kubelet is told; empty: Socket
	Timeout  time.Duration // for GetPluginInfo and for Probe; zero: 5 s
	// Owner is the user, by name or number, who besides root and our own may own the socket
	// and the folders on the way; empty: root. "any" turns these checks off.
	Owner string
	// AnyEndpoint leaves out every check of Endpoint, as node-driver-registrar does: with its
	// flags it is a path of the host, and what is there within our own view is no word on it.
	AnyEndpoint bool
}

// Hints is where hints come from and go to (satisfied by fswatch.Subscription). The
// Client puts in that a connection broke, so that it needs no goroutine to merge two
// channels.
type Hints interface {
	Hints() <-chan struct{} // capacity one
	Hint()
	Close()
}

// Client asks one driver. It holds at most one connection to it.
type Client struct {
	cfg   Config
	log   *slog.Logger
	hints Hints
	trust trust

	again *time.Timer // Ask's and Close's: hints later, where nothing else will

	up      atomic.Bool
	resting sync.WaitGroup // goroutines that watch a connection at rest

	mu   sync.Mutex // guards the following; not held while somebody waits
	talk *talk      // kept from a round that did not end Ready
	rest *link      // kept from one that did, or that found another driver
	// What was found at Endpoint, if that is another path than Socket.
	endpoint place
	// The socket's file at the last Ready report, and whether it was another before.
	file     place
	replaced bool
}

// New returns a client. It closes hints when it is closed; they should tell of the paths
// of cfg.Socket and cfg.Endpoint. nil: only broken connections are hinted.
func New(cfg Config, log *slog.Logger, hints Hints) *Client {
	cfg.Timeout = cmp.Or(cfg.Timeout, defaultTimeout)
	if cfg.Endpoint == "" || cfg.AnyEndpoint {
		cfg.Endpoint = cfg.Socket
	}
	if hints == nil {
		hints = make(box, 1)
	}
	c := &Client{cfg: cfg, log: log, hints: hints, trust: trust{owner: cmp.Or(cfg.Owner, "root")}}
	c.again = time.AfterFunc(lookAgain, hints.Hint)
	c.again.Stop()
	return c
}

// Hints receives when the connection broke, and what the source given to New tells.
func (c *Client) Hints() <-chan struct{} { return c.hints.Hints() }

// Up tells that the driver is connected and its last Probe was ready.
func (c *Client) Up() bool { return c.up.Load() }

// Stale tells that the last Ready report may no longer hold: the connection broke, another
// socket is at the path, or somebody else may now put one there. It takes a few lstat.
func (c *Client) Stale() bool {
	c.mu.Lock()
	rest, endpoint := c.rest, c.endpoint
	c.mu.Unlock()
	if rest == nil || rest.broken.Load() {
		return true
	}
	if at, _, err := look(c.cfg.Socket); err != nil || at != rest.at {
		return true
	}
	if c.cfg.Endpoint != c.cfg.Socket {
		if at, _, _ := look(c.cfg.Endpoint); at != endpoint {
			return true
		}
	}
	return c.distrust().driver != ""
}

// Replaced tells, after an Ask that was Ready, that the socket is another file than at the
// Ready before: the driver was away, however quickly it came back.
func (c *Client) Replaced() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.replaced
}

// Close ends the kept connection and the hints. No Ask may be running.
func (c *Client) Close() error {
	c.again.Stop()
	c.hints.Close()
	c.drop()
	c.resting.Wait()
	c.up.Store(false)
	return nil
}

// drop ends what is kept.
func (c *Client) drop() {
	c.mu.Lock()
	talk, rest := c.talk, c.rest
	c.talk, c.rest, c.endpoint = nil, nil, place{}
	c.mu.Unlock()
	if talk != nil {
		talk.close()
	}
	if rest != nil {
		rest.end()
	}
}

// Ask finds out how the driver is. It returns when there is a verdict or ctx is done; at
// most one runs at a time. A report that is Ready leaves a connection at rest behind,
// whose breaking is hinted.
func (c *Client) Ask(ctx context.Context) status.Report {
	begun := time.Now()
	c.again.Stop()
	t, v := c.connect(ctx)
	r := status.Report{Driver: v.driver, Reason: v.reason}
	if t != nil {
		r = c.inquire(ctx, t)
	} else {
		c.up.Store(false)
	}
	r.Reason = safetext.Clean(r.Reason, maxReason)
	c.log.Debug("asked the driver", "driver_state", string(r.Driver), "reason", r.Reason, "took", time.Since(begun))
	return r
}

// verdict is a step's word on the driver; the zero verdict has nothing against it.
type verdict struct {
	driver status.DriverState
	reason string
}

// connect returns the kept connection if it is still good, else a new one, else why not.
func (c *Client) connect(ctx context.Context) (*talk, verdict) {
	c.mu.Lock()
	t := c.talk
	c.talk = nil
	c.mu.Unlock()
	c.drop()
	if t != nil {
		t.link.armed.Store(false) // this round will tell of its end
		at, _, err := look(c.cfg.Socket)
		if err == nil && at == t.link.at && !t.link.broken.Load() && t.silence() < maxSilence {
			if v := c.distrust(); v.driver != "" {
				t.close()
				return nil, v
			}
			return t, verdict{}
		}
		t.close()
	}
	l, v := dial(ctx, c.cfg.Socket)
	if l == nil {
		if _, mode, changed, err := stat(c.cfg.Socket); err == nil && mode == os.ModeSocket && time.Since(changed).Abs() < young {
			c.again.Reset(lookAgain) // listen makes no event
		}
		return nil, v
	}
	if v := cmp.Or(c.distrust(), c.trust.listener(c.cfg.Socket, l.peer)); v.driver != "" {
		l.end()
		return nil, v
	}
	l.onBreak = c.broke
	t, err := newTalk(l)
	if err != nil {
		return nil, verdict{status.Starting, err.Error()}
	}
	return t, verdict{}
}

// distrust checks the way to the socket and to the endpoint.
func (c *Client) distrust() verdict {
	v := c.trust.path(c.cfg.Socket)
	if v.driver == "" && c.cfg.Endpoint != c.cfg.Socket {
		v = c.trust.path(c.cfg.Endpoint)
	}
	return v
}

// broke is called when the other end ended a kept connection.
func (c *Client) broke() {
	c.up.Store(false)
	c.hints.Hint()
}

// keep keeps the connection: at rest if the driver's answers are final until something
// changes, as it is if it will be asked again in a second.
func (c *Client) keep(t *talk, endpoint place, d status.DriverState, up bool) {
	if d == status.Starting {
		t.link.armed.Store(true)
		if t.link.broken.Load() {
			t.close()
			c.up.Store(false)
			return
		}
		c.mu.Lock()
		c.talk = t
		c.mu.Unlock()
		c.up.Store(up)
		return
	}
	c.mu.Lock()
	c.rest, c.endpoint = t.link, endpoint
	if d == status.Ready {
		c.replaced = c.file != place{} && !c.file.same(t.link.at)
		c.file = t.link.at
	}
	c.mu.Unlock()
	c.up.Store(up)
	c.resting.Go(func() {
		t.rest()       // not waited for: the registration need not
		t.link.watch() // if it broke meanwhile, this finds out at once, and hints
	})
}

// box is Hints with no source but ourselves.
type box chan struct{}

func (b box) Hints() <-chan struct{} { return b }
func (b box) Close()                 {}

func (b box) Hint() {
	select {
	case b <- struct{}{}:
	default:
	}
}
