package control

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// writeJSON answers with a document.
func writeJSON(w http.ResponseWriter, code int, v any) {
	write(w, code, "application/json", Marshal(v))
}

const plainText = "text/plain; charset=utf-8"

func writeText(w http.ResponseWriter, code int, s string) {
	write(w, code, plainText, []byte(s))
}

func write(w http.ResponseWriter, code int, contentType string, body []byte) {
	setHeader(w, contentType)
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(code)
	_, _ = w.Write(body) // fails only when the client has gone
}

func setHeader(w http.ResponseWriter, contentType string) {
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
}

// extendDeadlines lets a request take longer than the server's limits. An error means that the
// connection has no deadlines, and so no limits.
func extendDeadlines(w http.ResponseWriter, d time.Duration) {
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Time{}) // the deadline would end the request's context
	_ = rc.SetWriteDeadline(time.Now().Add(d))
}

// Marshal returns one line of JSON that is safe on a terminal: documents contain text of drivers,
// so every invisible character is escaped. It panics if the type of v has no JSON form.
func Marshal(v any) []byte {
	doc, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	out := make([]byte, 0, len(doc)+1)
	for _, r := range string(doc) {
		if unicode.IsPrint(r) { // there is no line break: json.Marshal escapes it
			out = utf8.AppendRune(out, r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			out = fmt.Appendf(out, `\u%04x`, unit)
		}
	}
	return append(out, '\n')
}
