package control

import (
	"context"
	"net/http"
	"sync"
	"time"

	"csi-registrar/internal/status"
)

// How much may be done at once. Requests for health have no limit but that of
// the connections: they are answered from memory.
const (
	maxStreams = 1024 // on the control socket: a `wait` for each driver of a large node
	maxTraces  = 64
	// requests for metrics; one that is not read holds its place until publicTimeout
	maxScrapes    = 16
	maxProbes     = 64 // requests that make a driver answer: a refused one may restart its pod
	gateWait      = 500 * time.Millisecond
	metricsMaxAge = time.Second
	metricsRate   = 40 << 20 // bytes of metrics in a second; those of 1,000 drivers are 2 MB
)

// gate lets few requests in at once.
type gate chan struct{}

func newGate(most int) gate { return make(gate, most) }

// enter waits for a place, for at most limit or until ctx is done, and reports whether it got one.
// The caller leaves then.
func (g gate) enter(ctx context.Context, limit time.Duration) bool {
	select {
	case g <- struct{}{}:
		return true
	default:
	}
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case g <- struct{}{}:
		return true
	case <-late.C:
	case <-ctx.Done():
	}
	return false
}

func (g gate) leave() { <-g }

// limit has few requests served at once. The others wait for a moment in the order in which they
// came, and are then refused.
func (g gate) limit(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !g.enter(r.Context(), gateWait) {
			refuse(w)
			return
		}
		defer g.leave()
		h(w, r)
	}
}

func refuse(w http.ResponseWriter) {
	w.Header().Set("Retry-After", "1")
	writeText(w, http.StatusServiceUnavailable, "too many requests at once\n")
}

// rendering is what all who ask within a second get.
type rendering struct {
	mu   sync.Mutex
	at   time.Time
	text []byte
}

// get renders if the last rendering is too old; the others wait for it. size is a little more than
// the last one had.
func (r *rendering) get(render func(size int) []byte) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := time.Now(); r.text == nil || now.Sub(r.at) >= metricsMaxAge {
		r.text, r.at = render(len(r.text)+len(r.text)/32), now
	}
	return r.text
}

// snapshot is what all who ask get until the status changes: the document, and what is made of it.
type snapshot[T any] struct {
	render func(status.Document) (T, error)

	mu       sync.Mutex
	changed  <-chan struct{} // closed when the status has changed; nil: there is no document
	doc      status.Document
	rendered T
}

// get returns the document, its rendering, and a channel that is closed when the status changes.
func (s *snapshot[T]) get(b Backend) (doc status.Document, rendered T, changed <-chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed != nil {
		select {
		case <-s.changed:
		default:
			return s.doc, s.rendered, s.changed, nil
		}
	}
	changed = b.Changed() // before Status, so that no change is missed
	doc = b.Status()
	if rendered, err = s.render(doc); err == nil {
		s.doc, s.rendered, s.changed = doc, rendered, changed
	}
	return doc, rendered, changed, err
}
