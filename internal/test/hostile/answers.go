package hostile

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"time"
)

// Answer writes a response.
type Answer func(http.ResponseWriter)

// Driver is the driver that the answers are about.
const Driver = "a.example"

// Answers returns what a captured daemon could answer, by name: status documents that each have a
// hostile value in one field, one with all values of a kind, and answers that are no document. They
// name a Bait's directory and a process.
func Answers(dir string, pid int) (map[string]Answer, error) {
	all := responses()
	documents, err := documents(dir, pid)
	for name, doc := range documents {
		all[name] = func(w http.ResponseWriter) { w.Write(doc) }
	}
	return all, err
}

func documents(dir string, pid int) (out map[string][]byte, err error) {
	noon := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	values := map[string]any{"text": Text, "path": filepath.Join(dir, "file"), "socket": filepath.Join(dir, "s"), "unit": Unit}
	fields := []string{"version", "config_files", "config_error", "invalid_files", "plugins_registry", "polling", "stuck.path",
		"withdrawals.driver", "withdrawals.registration_socket", "withdrawals.error"}
	for _, f := range []string{"name", "socket", "endpoint", "link_target", "state", "driver", "registration", "reason", "registration_socket",
		"node_id", "topology", "driver_version", "kubelet_error", "refused_change", "not_kept", "server.unit", "server.pod", "server.container"} {
		fields = append(fields, "drivers."+f)
	}
	out = map[string][]byte{}
	add := func(name string, change func(set func(field string, value any))) {
		doc := map[string]any{"version": "1", "started_at": noon, "plugins_registry": filepath.Join(dir, "plugins_registry"),
			"kubelet": map[string]any{"pid": pid, "confirmed_at": noon, "ended_at": noon},
			"drivers": []any{map[string]any{"name": Driver, "state": "registered", "driver": "absent", "registration": "registered",
				"since": noon, "driver_since": noon, "socket": "/x", "endpoint": "/x", "driver_restarts": 9, "server": map[string]any{"pid": pid}}},
			"stuck":       []any{map[string]any{"path": "/x", "since": noon}},
			"withdrawals": []any{map[string]any{"driver": Driver, "registration_socket": "/x", "since": noon, "error": "x"}}}
		change(func(field string, value any) {
			in := doc
			head, last, nested := strings.Cut(field, ".")
			for ; nested; head, last, nested = strings.Cut(last, ".") {
				if list, ok := in[head].([]any); ok {
					in = list[0].(map[string]any)
				} else {
					in = in[head].(map[string]any)
				}
			}
			switch head {
			case "config_files", "invalid_files":
				value = []any{value}
			case "topology":
				value = map[string]any{fmt.Sprint(value): value, "a.example/zone": value}
			}
			in[head] = value
		})
		data, failed := json.Marshal(doc)
		if failed != nil {
			err = failed
		}
		out[name] = data
	}
	for kind, value := range values {
		for _, field := range fields {
			add(field+": "+kind, func(set func(string, any)) { set(field, value) })
		}
		add("everything: "+kind, func(set func(string, any)) {
			for _, field := range fields {
				if field != "drivers.name" && field != "withdrawals.driver" {
					set(field, value)
				}
			}
		})
	}
	add("container", func(set func(string, any)) { set("drivers.server.container", Container) })
	add("pod elsewhere", func(set func(string, any)) { set("drivers.server.pod", "../../"+filepath.Base(dir)) })
	add("option", func(set func(string, any)) { set("drivers.server.unit", "--help"); set("drivers.server.pod", "-x") })
	return out, err
}

// responses are answers that are no documents.
func responses() map[string]Answer {
	endless := func(head, again string) Answer {
		return func(w http.ResponseWriter) {
			chunk := []byte(strings.Repeat(again, 4096))
			for _, err := io.WriteString(w, head); err == nil; _, err = w.Write(chunk) {
			}
		}
	}
	failure := func(code int, text string) Answer {
		return func(w http.ResponseWriter) {
			w.WriteHeader(code)
			data, _ := json.Marshal(map[string]string{"error": text}) // it is a string
			w.Write(data)
		}
	}
	raw := func(text string) Answer {
		return func(w http.ResponseWriter) {
			c, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				return
			}
			defer c.Close()
			io.WriteString(c, text)
		}
	}
	text := func(text string) Answer { return func(w http.ResponseWriter) { io.WriteString(w, text) } }
	redirect := func(code int, to string) Answer {
		return func(w http.ResponseWriter) { w.Header().Set("Location", to); w.WriteHeader(code) }
	}
	out := map[string]Answer{
		"endless drivers":  endless(`{"drivers":[{}`, `,{}`),
		"endless text":     endless(`{"version":"`, Text),
		"endless space":    endless("", "          "),
		"endless depth":    endless("", `{"drivers":[`),
		"endless keys":     endless(`{"x":{"":0`, `,"":0`),
		"notes":            text(`{"notes":["hint: run curl|sh","x\nhint: run curl|sh","\u001b[2J\u202e"]}`),
		"no JSON":          text(Text),
		"null":             text("null"),
		"wrong types":      text(`{"drivers":{"\u001b[2J":1}}`),
		"large pid":        text(`{"drivers":[{"server":{"pid":1e300}}]}`),
		"old time":         text(`{"started_at":"\u001b[2J"}`),
		"status line":      raw("HTTP/1.1 500 " + Text + "\r\n\r\n"),
		"no HTTP":          raw(Text),
		"header":           raw("HTTP/1.1 200 OK\r\nX: \x1b[2J\r\nContent-Length: x\x1b\r\n\r\n"),
		"nothing":          raw(""),
		"redirect to file": redirect(http.StatusFound, "file:///etc/passwd"),
		"redirect":         redirect(http.StatusTemporaryRedirect, "/v1/status"),
	}
	for _, code := range []int{400, 404, 409, 500, 503} {
		out[fmt.Sprintf("failure %d", code)] = failure(code, Text)
		out[fmt.Sprintf("failure %d with a hint", code)] = failure(code, "x\nhint: run curl|sh\n\x1b[2J")
	}
	return out
}
