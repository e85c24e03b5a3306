package control

import (
	"context"
	"net/http"
	"sync"
	"time"

	"csi-registrar/internal/node/status"
)

// Limits for concurrent requests. Requests for health are limited only by the connections: they are
// answered from memory.
const (
	maxStreams = 1024 // on the control socket: a `wait` for each driver of a large node
	// requests for metrics; one whose client does not read takes its place until publicTimeout
	maxScrapes  = 16
	maxProbes   = 64 // requests that query a driver: a refused one may restart its pod
	gateWait    = 500 * time.Millisecond
	maxAge      = time.Second // of a snapshot
	metricsRate = 40 << 20    // bytes of metrics in a second; those of 1,000 drivers are 2 MB
)

// gate limits the number of concurrent requests.
type gate chan struct{}

func newGate(most int) gate { return make(gate, most) }

// enter waits for a place, for at most limit or until ctx is done, and reports whether it got one.
// If so, the caller must call leave.
func (g gate) enter(ctx context.Context, limit time.Duration) bool {
	select {
	case g <- struct{}{}:
		return true
	default:
	}
	select {
	case g <- struct{}{}:
		return true
	case <-time.After(limit):
	case <-ctx.Done():
	}
	return false
}

func (g gate) leave() { <-g }

// limit limits the number of requests that h serves at once. The others wait for a moment in the
// order in which they came, and are then refused.
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

// snapshot is a rendering of the status, which all requests share until the status changes, and for
// at most maxAge: what depends on the time changes without it.
type snapshot[T any] struct {
	render func(status.Document) T

	mu       sync.Mutex
	at       time.Time
	changed  <-chan struct{} // closed when the status has changed; nil: nothing is rendered
	rendered T
}

// get returns the rendering, and a channel that is closed when the status changes.
func (s *snapshot[T]) get(b Backend) (rendered T, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changed != nil && time.Since(s.at) < maxAge {
		select {
		case <-s.changed:
		default:
			return s.rendered, s.changed
		}
	}
	changed = b.Changed() // before Status, so that no change is missed
	s.rendered = s.render(b.Status())
	s.at, s.changed = time.Now(), changed // not before: render may panic
	return s.rendered, s.changed
}
