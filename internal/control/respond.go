package control

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"
	"unicode"
	"unicode/utf8"
)

// writeJSON answers with a document. That the client has gone is no error of ours, so
// what Write says is not looked at.
func writeJSON(w http.ResponseWriter, code int, v any) {
	doc, err := marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	header(w, "application/json", len(doc))
	w.WriteHeader(code)
	_, _ = w.Write(doc)
}

func writeText(w http.ResponseWriter, code int, s string) {
	header(w, "text/plain; charset=utf-8", len(s))
	w.WriteHeader(code)
	_, _ = w.Write([]byte(s))
}

func header(w http.ResponseWriter, kind string, length int) {
	h := w.Header()
	h.Set("Content-Type", kind)
	h.Set("Content-Length", strconv.Itoa(length))
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
}

// lift lets a call take longer than the server's limits. An error would mean a connection
// without deadlines, which has no limits to lift.
func lift(w http.ResponseWriter, d time.Duration) {
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Time{}) // it would end the request's context
	_ = rc.SetWriteDeadline(time.Now().Add(d))
}

// marshal makes one line of JSON that is safe on a terminal: what a driver says is in
// there as it was said, so all that cannot be seen is written as an escape. For a JSON
// reader it is the same document.
func marshal(v any) ([]byte, error) {
	doc, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("cannot encode the answer: %w", err)
	}
	out := make([]byte, 0, len(doc)+1)
	for len(doc) > 0 {
		r, n := utf8.DecodeRune(doc)
		if r < utf8.RuneSelf && r != 0x7f || unicode.IsPrint(r) {
			out = append(out, doc[:n]...)
		} else if r <= 0xffff {
			out = fmt.Appendf(out, `\u%04x`, r)
		} else {
			r -= 0x10000 // a surrogate pair, as JSON wants it
			out = fmt.Appendf(out, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		}
		doc = doc[n:]
	}
	return append(out, '\n'), nil
}
