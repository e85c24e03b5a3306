package control

import (
	"net/http"
	"time"

	"csi-registrar/internal/sys/rate"
)

// documentTimeout limits how long a client may take to read one document of a stream.
const documentTimeout = 10 * time.Second

// status answers with the document; with ?watch it sends another one, each in one line, whenever
// something has changed, until the client disconnects or the daemon ends. A client that reads
// slowly misses some documents, but never the last one.
func (a api) status(w http.ResponseWriter, r *http.Request) {
	if !r.URL.Query().Has("watch") {
		writeJSON(w, http.StatusOK, a.Status())
		return
	}
	if !a.streams.enter(r.Context(), 0) {
		writeJSON(w, http.StatusServiceUnavailable, failure{"too many clients are watching the status"})
		return
	}
	defer a.streams.leave()
	setHeader(w, "application/x-ndjson")
	for {
		started := time.Now()
		doc, changed := a.watched.get(a.Backend)
		extendDeadlines(w, documentTimeout)
		if _, err := w.Write(doc); err != nil {
			return
		}
		if r.Method == http.MethodHead || http.NewResponseController(w).Flush() != nil {
			return
		}
		// A thousand drivers that change at once would keep a core busy with documents that nobody
		// reads: all streams together use at most a tenth of its time.
		pause := min(9*time.Since(started)*time.Duration(len(a.streams)), time.Second)
		select {
		case <-r.Context().Done():
			return
		case <-changed:
		}
		if !rate.Pause(r.Context(), pause) {
			return
		}
	}
}
