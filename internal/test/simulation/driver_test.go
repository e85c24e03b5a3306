package simulation

import (
	"context"
	"time"

	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/node/status"
)

// csiDriver is a CSI driver: a process that serves a socket (CSI specification, "Identity Service"
// and "NodeGetInfo"), with what internal/core/driver makes of it (driver.Asker).
type csiDriver struct {
	w          *world
	name       string
	socket     string
	state      string // up, down, starting, slow, hang, other (it has another name)
	id         status.Identity
	generation int           // of the process, and of the file at its path
	changed    chan struct{} // closed when the process ends or another state begins
	since      time.Time     // it is in this state
	noticed    time.Time     // when the daemon notices that, at the latest
	missed     time.Time     // when it came without a hint
	isOther    bool          // its process is another driver's, also while it hangs
	otherAt    time.Time     // it was another driver's
	clients    []*client
	unnoticed  bool // there are no hints
}

const slowBy = 3 * time.Second

// set replaces the driver's process: its clients see that the connection ends, unless it only
// hangs.
func (d *csiDriver) set(state string) {
	hanging := d.state != "down" && (state == "hang" || state == "slow")
	if state != "down" || d.state != "down" {
		d.since = time.Now()
		if !hanging || d.noticed.Before(d.since) {
			d.noticed = d.since
		}
	}
	if d.isOther {
		d.otherAt = time.Now()
	}
	d.isOther = state == "other" || hanging && d.isOther
	d.state = state
	if !hanging {
		d.generation++
		d.reset()
	}
}

// comes begins to serve. Without a hint, as at the limit of inotify watches, it is found when it is
// asked the next time.
func (d *csiDriver) comes(unnoticed bool) {
	unnoticed = unnoticed && d.state == "down"
	d.unnoticed = unnoticed
	d.set("up")
	if d.unnoticed = false; unnoticed {
		d.noticed, d.missed = d.since.Add(35*time.Second), d.since
	}
}

// reset breaks all connections.
func (d *csiDriver) reset() {
	close(d.changed)
	d.changed = make(chan struct{})
	for _, c := range d.clients {
		if !d.unnoticed {
			c.hint()
		}
	}
}

func (d *csiDriver) identity() status.Identity {
	id := d.id
	if d.state == "other" {
		id.Name = "other.example"
	}
	return id
}

// client is the daemon's side.
type client struct {
	d          *csiDriver
	p          *process
	timeout    time.Duration
	hints      chan struct{}
	connected  int // the generation that it has a connection to; 0: none
	ready      bool
	probe      bool // Probe is to be called, until it is answered
	generation int  // at the last Ready report
	starting   int  // the generation that answered the last Ask and was not ready; 0: none
	closed     bool
}

func (d *csiDriver) client(p *process, timeout time.Duration) driver.Asker {
	d.w.mu.Lock()
	defer d.w.mu.Unlock()
	c := &client{d: d, p: p, timeout: timeout, hints: make(chan struct{}, 1)}
	d.clients = append(d.clients, c)
	return c
}

func (c *client) hint() {
	select {
	case c.hints <- struct{}{}:
	default:
	}
}

func (c *client) Hints() <-chan struct{} { return c.hints }

func (c *client) Close() {
	c.d.w.mu.Lock()
	defer c.d.w.mu.Unlock()
	for i, o := range c.d.clients {
		if o == c {
			c.d.clients = append(c.d.clients[:i], c.d.clients[i+1:]...)
			break
		}
	}
	c.closed = true
}

func (c *client) Ask(ctx context.Context, why driver.Why, progress func(status.Report)) status.Report {
	c.d.w.mu.Lock()
	generation, starting := c.d.generation, c.d.state == "starting"
	c.d.w.mu.Unlock()
	if why == driver.Hinted && starting && c.starting == generation {
		return status.Report{}
	}
	c.probe = c.probe || why == driver.Probing
	return c.ask(ctx, progress)
}

func (c *client) ask(ctx context.Context, progress func(status.Report)) status.Report {
	d, w := c.d, c.d.w
	for {
		w.mu.Lock()
		state, id, generation := d.state, d.identity(), d.generation
		kept := c.ready && c.connected == generation
		if state != "down" {
			c.connected = generation
		} else {
			c.connected = 0
		}
		replaced := c.generation != 0 && c.generation != generation
		w.mu.Unlock()
		ready := func() status.Report {
			c.ready, c.probe, c.generation = true, false, generation
			return status.Report{Driver: status.Ready, Identity: id, Replaced: replaced}
		}
		// nothing is asked
		if kept && !c.probe && (state == "up" || state == "hang" || state == "slow") {
			return ready()
		}
		c.ready, c.starting = c.ready && c.probe, 0
		w.mu.Lock()
		c.p.tried("asks of " + d.name)
		w.mu.Unlock()
		wait := c.timeout
		switch state {
		case "up":
			return ready()
		case "down":
			return status.Report{Driver: status.Absent, Reason: "connection refused"}
		case "starting":
			c.starting = generation
			return status.Report{Driver: status.Starting, Reason: "it is not ready", Connection: uint64(generation)}
		case "other":
			return status.Report{Driver: status.Mismatch, Reason: "it is other.example", Connection: uint64(generation)}
		case "slow":
			wait = slowBy
		}
		progress(status.Report{Driver: status.Starting, Reason: "it takes its time"})
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return status.Report{Driver: status.Absent, Reason: "cancelled"}
		case <-c.hints:
			timer.Stop()
			continue
		case <-timer.C:
		}
		if state == "slow" {
			return ready()
		}
		return status.Report{Driver: status.Starting, Reason: "GetPluginInfo is not answered", Silent: true, Connection: uint64(generation)}
	}
}
