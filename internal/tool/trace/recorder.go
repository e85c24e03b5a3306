// Package trace records the calls between a Kubernetes node and a CSI driver: a proxy that
// copies bytes both ways, and decodes a copy of them.
//
// Each piece is decoded before it is passed on, one at a time: an answer is always seen after its
// question and before whatever its caller asks next.
package trace

import (
	"sync"
	"time"

	"google.golang.org/grpc/codes"
)

const (
	maxCalls      = 1024            // that run at once
	maxEvents     = 256             // that wait to be written
	maxRemembered = 4096            // calls of which the attempts are counted
	showRunning   = 5 * time.Second // after it a call is shown that has not ended
)

// Recorder makes the record of one trace.
type Recorder struct {
	show   []string // keys whose values are shown
	events chan Call
	now    func() time.Time // when bytes pass

	mu       sync.Mutex // guards the following, and the fields of connections
	held     int        // bytes of messages that are being received
	running  map[*call]bool
	attempts map[string]int
	methods  map[string]*methodStats

	notDecoded   int // connections
	notWritten   int // calls that were decoded
	dialFailures int
	dialError    error // the last one
}

// NewRecorder returns a recorder with an empty record, for one call of Serve. show are the keys
// whose values are shown; ErrorText stands for the texts of errors.
func NewRecorder(show []string) *Recorder {
	return &Recorder{show: show, events: make(chan Call, maxEvents), now: time.Now, running: map[*call]bool{},
		attempts: map[string]int{}, methods: map[string]*methodStats{}}
}

// Calls yields each call when it ends, and once before if it takes longer than 5 s. A receiver that
// is too slow misses some, which are counted as left out.
func (r *Recorder) Calls() <-chan Call { return r.events }

// Close ends Calls. Serve must have returned.
func (r *Recorder) Close() { close(r.events) }

// dialFailed notes that the driver could not be reached.
func (r *Recorder) dialFailed(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dialError = err
	r.dialFailures++
}

// take decodes bytes of a connection.
func (r *Recorder) take(c *connection, dir direction, data []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c.copied = time.Now()
	if at := r.now(); c.decoder != nil && c.decoder.write(dir, data, at) != nil {
		r.notDecoded++
		c.decoder.close(Lost, at)
		c.decoder = nil
	}
}

// end ends a connection.
func (r *Recorder) end(c *connection) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c.decoder != nil {
		c.decoder.close(Disconnected, r.now())
	}
}

// ask takes the request of a call as far as it will ever be there, once.
func (r *Recorder) ask(c *call) {
	if c.asked {
		return
	}
	c.setRequest(r.show)
	if len(r.attempts) >= maxRemembered {
		clear(r.attempts)
	}
	c.Attempt = 1
	if c.id != "" {
		r.attempts[c.id]++
		c.Attempt = r.attempts[c.id]
	}
}

// answer ends a call.
func (r *Recorder) answer(c *call, end End, at time.Time) {
	delete(r.running, c)
	c.setOutcome(end, at, r.show)
	if c.End == Answered && c.status == codes.OK {
		delete(r.attempts, c.id)
	}
	r.count(c)
	r.emit(c.Call)
}

func (r *Recorder) emit(c Call) {
	select {
	case r.events <- c:
	default:
		r.notWritten++
	}
}

// showRunning shows calls that take long, once.
func (r *Recorder) showRunning(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.running {
		if !c.shown && now.Sub(c.began) >= showRunning {
			c.shown = true
			running := c.Call
			running.End = Running
			running.DurationMS = float64(now.Sub(c.began).Milliseconds())
			r.emit(running)
		}
	}
}
