// Package trace records the calls between a Kubernetes node and a CSI driver: a proxy that
// copies bytes both ways, and decodes a copy of them.
//
// One goroutine decodes what all connections copied, in the order in which the bytes passed.
// It owns the record: nothing here is locked, and an answer is always seen after its question
// and before whatever its caller asks next.
package trace

import (
	"hash/maphash"
	"path"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
)

const (
	maxCalls       = 1024            // that run at once
	maxConnections = 256             // that are decoded at once
	maxEvents      = 256             // that wait to be written
	maxRemembered  = 4096            // volumes and requests that the rules remember
	showRunning    = 5 * time.Second // after it a call is shown that has not ended
)

// Options say what is recorded.
type Options struct {
	Method string   // a pattern of path.Match for the method without its service; empty: all
	Show   []string // keys whose values are shown; ErrorText: the texts of errors, without secrets
}

// Recorder makes the record of one trace.
type Recorder struct {
	options Options
	events  chan Call
	queue   chan chunk
	now     func() time.Time // when bytes pass

	waiting      atomic.Int64 // bytes in the queue
	losses       atomic.Int64 // times that bytes or calls were lost
	missed       atomic.Int64 // a time.Duration
	dialFailures atomic.Int64
	dialError    atomic.Pointer[error] // the last one

	// Of the goroutine that decodes.
	held       int // bytes of messages that are being received
	decoders   int
	running    map[*call]bool
	attempts   map[uint64]int
	rules      rules
	errors     *errorTexts
	lossesSeen int64
	leftOut    LeftOut
	methods    map[string]*methodStats
}

// NewRecorder makes a recorder with an empty record. The pattern has to be valid.
func NewRecorder(o Options) *Recorder {
	return &Recorder{options: o, events: make(chan Call, maxEvents), now: time.Now, running: map[*call]bool{},
		attempts: map[uint64]int{}, methods: map[string]*methodStats{}, rules: rules{seed: maphash.MakeSeed()}, errors: newErrorTexts(o.Show)}
}

// Calls yields each call when it ends, and once before if it takes longer than 5 s. A receiver that
// is too slow misses some, which are counted as left out.
func (r *Recorder) Calls() <-chan Call { return r.events }

// Close ends Calls. Serve must have returned.
func (r *Recorder) Close() { close(r.events) }

// start begins a new stretch of the record.
func (r *Recorder) start() chan chunk {
	r.queue = make(chan chunk, maxChunks)
	r.rules.forget()
	return r.queue
}

// dialFailed notes that the driver could not be reached.
func (r *Recorder) dialFailed(err error) {
	r.dialError.Store(&err)
	r.dialFailures.Add(1)
}

// Missed notes that calls were not forwarded here for this long in all.
func (r *Recorder) Missed(total time.Duration) {
	r.missed.Store(int64(total))
	r.losses.Add(1)
}

// decode makes the record of what is in the queue, until it is closed.
func (r *Recorder) decode() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case c, more := <-r.queue:
			if !more {
				return
			}
			r.take(c)
		case now := <-tick.C:
			r.showRunning(now)
		}
	}
}

// take decodes a chunk.
func (r *Recorder) take(c chunk) {
	if seen := r.losses.Load(); seen != r.lossesSeen { // from now on something is unknown
		r.lossesSeen = seen
		r.rules.forget()
		r.errors.forget()
	}
	conn := c.conn
	if conn.decoder == nil && !conn.closed && !c.end {
		if r.decoders < maxConnections {
			r.decoders++
			conn.decoder = newDecoder(conn)
		} else {
			r.giveUp(conn, c.at)
		}
	}
	switch {
	case conn.closed: // left out
	case c.end && conn.lost.Load():
		r.giveUp(conn, c.at)
	case c.end:
		r.closeConnection(conn, Disconnected, c.at)
	case conn.decoder.write(c.dir, c.data, c.at) != nil:
		r.giveUp(conn, c.at)
	}
	n := int64(len(c.data))
	r.waiting.Add(-n)
	conn.waiting.Add(-n)
}

// giveUp leaves the rest of a connection out of the record.
func (r *Recorder) giveUp(c *connection, at time.Time) {
	c.lost.Store(true)
	r.leftOut.Connections++
	r.rules.forget()
	r.errors.forget()
	r.closeConnection(c, Lost, at)
}

func (r *Recorder) closeConnection(c *connection, end End, at time.Time) {
	c.closed = true
	if c.decoder != nil {
		c.decoder.close(end, at)
		c.decoder = nil
		r.decoders--
	}
}

// open notes that a call has begun.
func (r *Recorder) open(c *call) { r.running[c] = true }

// ask takes the request of a call.
func (r *Recorder) ask(c *call, request *message) {
	c.setRequest(request, r.options.Show, r.errors, r.rules.seed)
	if len(r.attempts) >= maxRemembered {
		clear(r.attempts)
	}
	c.Attempt = 1
	if c.id != 0 {
		r.attempts[c.id]++
		c.Attempt = r.attempts[c.id]
	}
	r.rules.asked(c, r.running)
}

// answer ends a call.
func (r *Recorder) answer(c *call, response *message, o outcome) {
	delete(r.running, c)
	message := c.setOutcome(response, o, r.options.Show, r.errors)
	if c.End == Answered && o.code == codes.OK {
		delete(r.attempts, c.id)
	}
	r.rules.ended(c, message, o, r.running)
	if !r.matches(c) {
		return
	}
	r.count(c)
	r.emit(c.Call)
}

func (r *Recorder) matches(c *call) bool {
	if r.options.Method == "" {
		return true
	}
	ok, err := path.Match(r.options.Method, c.Name())
	return ok && err == nil // the pattern was checked
}

func (r *Recorder) emit(c Call) {
	select {
	case r.events <- c:
	default:
		r.leftOut.Calls++
	}
}

// showRunning shows calls that take long.
func (r *Recorder) showRunning(now time.Time) {
	for c := range r.running {
		if !c.shown && now.Sub(c.began) >= showRunning && r.matches(c) {
			c.shown = true
			running := c.Call
			running.End, running.Findings = Running, nil // they are shown once
			running.DurationMS = float64(now.Sub(c.began).Milliseconds())
			r.emit(running)
		}
	}
}
