package control

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
)

func do(h http.Handler, method, target string) (int, string, http.Header) {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(method, target, nil))
	return w.Code, w.Body.String(), w.Header()
}

func TestHealthz(t *testing.T) {
	b := newDaemon()
	if code, body, _ := do(Handler(b), "GET", "/healthz"); code != 200 || body != "ok\n" {
		t.Errorf("a healthy daemon: %d %q", code, body)
	}
	b.aliveErr = errors.New("the agent does not answer\x1b[2J")
	if code, body, _ := do(Handler(b), "GET", "/healthz"); code != 503 || body != "the agent does not answer\\x1b[2J\n" {
		t.Errorf("a stuck daemon: %d %q", code, body)
	}
}

func TestLivez(t *testing.T) {
	off := absentDriver("off.csi.example")
	off.State = status.Disabled
	d := newDaemon(absentDriver("a.csi.example"), absentDriver("b.csi.example"), off)
	for target, want := range map[string]int{
		"/livez/a.csi.example": 200, "/livez/b.csi.example": 200, "/livez/off.csi.example": 404, "/livez/unknown": 404, "/livez": 404,
	} {
		if code, body, _ := do(PublicHandler(d), "GET", target); code != want {
			t.Errorf("%s: %d %s, want %d", target, code, body, want)
		}
	}
	d.liveErr = errors.New("the driver does not answer")
	if code, body, _ := do(PublicHandler(d), "GET", "/livez/b.csi.example"); code != 500 || body != "the driver does not answer\n" {
		t.Errorf("%d %q", code, body)
	}

	// /readyz/DRIVER?live needs both: registered and live.
	registered := absentDriver("b.csi.example")
	registered.State, registered.Registration = string(status.Registered), status.Registered
	d = newDaemon(registered, absentDriver("a.csi.example"))
	for target, want := range map[string]int{"/readyz/b.csi.example?live": 200, "/readyz/a.csi.example?live": 503} {
		if code, body, _ := do(PublicHandler(d), "GET", target); code != want {
			t.Errorf("%s: %d %s, want %d", target, code, body, want)
		}
	}
	d.liveErr = errors.New("the driver does not answer")
	for target, want := range map[string]int{"/readyz/b.csi.example?live": 503, "/readyz/b.csi.example": 200} {
		if code, body, _ := do(PublicHandler(d), "GET", target); code != want {
			t.Errorf("%s of a driver that is down: %d %s, want %d", target, code, body, want)
		}
	}
}

func TestReadyz(t *testing.T) {
	disabled := status.Driver{Name: "off.csi.example", State: status.Disabled, Reason: "disabled in the configuration"}
	absent := absentDriver("b.csi.example")
	absent.Reason = "gone\u202e\n" + strings.Repeat("x", 5000)
	b := newDaemon(registeredDriver("a.csi.example"), disabled)
	h := Handler(b)

	want := "a.csi.example: registered\noff.csi.example: disabled: disabled in the configuration\nok\n"
	if code, body, _ := do(h, "GET", "/readyz"); code != 200 || body != want {
		t.Errorf("all registered: %d %q", code, body)
	}

	b.set(func(s *status.Document) {
		s.Drivers = append(s.Drivers, absent)
		s.ConfigError = "/etc/csi-registrar/config.toml:3: first\n/etc/csi-registrar/config.toml:7: second"
	})
	code, body, _ := do(h, "GET", "/readyz")
	if code != 503 || !strings.HasPrefix(body, "configuration: /etc/csi-registrar/config.toml:3: first\nconfiguration: /etc/csi-registrar/config.toml:7: second\na.csi.example: registered\n") ||
		!strings.Contains(body, `b.csi.example: absent: gone\u202e\nxxx`) || !strings.HasSuffix(body, "x…\nnot ready\n") {
		t.Errorf("one absent, two errors: %d %q", code, body)
	}

	for target, want := range map[string]int{
		"/readyz/a.csi.example": 200, "/readyz/b.csi.example": 503, "/readyz/off.csi.example": 503, "/readyz/unknown": 404, "/readyz/": 404,
	} {
		if code, body, _ := do(h, "GET", target); code != want {
			t.Errorf("%s: %d %q, want %d", target, code, body, want)
		}
	}
}

// A driver that another registrar serves is ready, although it is in conflict, until what that one
// answered is too old.
func TestReadyzServedByAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conflict := absentDriver("b.csi.example")
		conflict.State, conflict.Driver, conflict.Registration = string(status.Conflict), status.Ready, status.Conflict
		served := conflict
		served.ServedBy = status.ServedBy{PID: 7, Since: at(0), AskedAt: at(20)}
		b := newDaemon(registeredDriver("a.csi.example"), conflict)
		handlers := map[string]http.Handler{"control socket": Handler(b), "public": PublicHandler(b)}
		check := func(when string, want int) {
			for name, h := range handlers {
				for _, target := range []string{"/readyz", "/readyz/b.csi.example", "/readyz/b.csi.example?live"} {
					if code, body, _ := do(h, "GET", target); code != want {
						t.Errorf("%s, %s: %s: %d %q, want %d", when, name, target, code, body, want)
					}
				}
				if code, body, _ := do(h, "GET", "/readyz"); !strings.Contains(body, "b.csi.example: conflict") {
					t.Errorf("%s, %s: %d %q", when, name, code, body)
				}
			}
		}
		check("in conflict", 503)
		b.set(func(s *status.Document) { s.Drivers = []status.Driver{s.Drivers[0], served} })
		check("served", 200)
		// The answer becomes too old, which is no change of the status.
		b.mu.Lock()
		b.status.Drivers = []status.Driver{b.status.Drivers[0], conflict}
		b.mu.Unlock()
		time.Sleep(maxAge + 1)
		check("too old", 503)
	})
}

// A table or file that was never in force is not ready; this affects no other driver.
func TestReadyzInvalid(t *testing.T) {
	invalid := status.Driver{Name: "new.csi.example", State: status.Invalid, Driver: status.Absent, Registration: status.None, Reason: "x.toml:2: sokt is not known"}
	for name, change := range map[string]func(*status.Document){
		"table": func(s *status.Document) { s.Drivers = append(s.Drivers, invalid) },
		"file":  func(s *status.Document) { s.InvalidFiles = []safetext.Claim{"/etc/csi-registrar/conf.d/x.toml"} },
	} {
		b := newDaemon(registeredDriver("a.csi.example"))
		b.set(change)
		for target, want := range map[string]int{"/readyz": 503, "/readyz/a.csi.example": 200} {
			for _, h := range []http.Handler{Handler(b), PublicHandler(b)} {
				if code, body, _ := do(h, "GET", target); code != want {
					t.Errorf("%s: %s: %d %q, want %d", name, target, code, body, want)
				}
			}
		}
	}
	b := newDaemon(invalid)
	for target, want := range map[string]int{"/readyz/new.csi.example": 503, "/livez/new.csi.example": 404} {
		if code, body, _ := do(Handler(b), "GET", target); code != want {
			t.Errorf("%s: %d %q, want %d", target, code, body, want)
		}
	}
	_, body, _ := do(Handler(b), "GET", "/metrics")
	if !strings.Contains(body, `csi_registrar_driver_state{driver="new.csi.example",state="invalid"} 1`) || strings.Contains(body, `csi_registrar_driver_up{`) {
		t.Errorf("metrics:\n%s", body)
	}
}

// Text of a driver or the kubelet may contain credentials: only root may see it.
func TestPublicPagesShowNoReasons(t *testing.T) {
	const secret = "hunter2"
	d := absentDriver("b.csi.example")
	d.Reason, d.KubeletError, d.NodeID = "login failed: user=x password="+secret, secret, secret
	b := newDaemon(d)
	b.status.ConfigError = "config.toml:3: " + secret
	for _, target := range []string{"/healthz", "/readyz", "/readyz/b.csi.example", "/metrics"} {
		if _, body, _ := do(PublicHandler(b), "GET", target); strings.Contains(body, secret) {
			t.Errorf("%s shows it: %s", target, body)
		}
	}
	if _, body, _ := do(PublicHandler(b), "GET", "/readyz"); body != "configuration: it has errors\nb.csi.example: absent\nnot ready\n" {
		t.Errorf("/readyz: %q", body)
	}
	if _, body, _ := do(Handler(b), "GET", "/readyz/b.csi.example"); !strings.Contains(body, secret) {
		t.Errorf("on the control socket: %q", body)
	}
}

func TestReload(t *testing.T) {
	b := newDaemon()
	h := Handler(b)
	for target, want := range map[string]string{"/v1/reload": `{"notes":["force false"]}`, "/v1/reload?force=true": `{"notes":["force true"]}`} {
		if code, body, _ := do(h, "POST", target); code != 200 || body != want+"\n" {
			t.Errorf("%s: %d %q", target, code, body)
		}
	}
	b.reloadErr = errors.New("a.toml:1: wrong\nb.toml:2: wrong")
	if code, body, _ := do(h, "POST", "/v1/reload"); code != 422 || body != `{"error":"a.toml:1: wrong\nb.toml:2: wrong"}`+"\n" {
		t.Errorf("two errors: %d %q", code, body)
	}
	for _, b.reloadErr = range []error{context.Canceled, context.DeadlineExceeded} {
		if code, _, _ := do(h, "POST", "/v1/reload"); code != 503 {
			t.Errorf("%v: %d", b.reloadErr, code)
		}
	}
	if code, _, _ := do(h, "GET", "/v1/reload"); code != 405 {
		t.Errorf("a GET changes something: %d", code)
	}
}

// TestChangesWhileTheDaemonEnds checks that an error after the end of the daemon, which may be any,
// is no answer about the configuration or the driver.
func TestChangesWhileTheDaemonEnds(t *testing.T) {
	b := newDaemon(registeredDriver("a.csi.example"))
	b.reloadErr, b.regErr = errors.New("another process starts"), errors.New("its registrar has ended")
	ctx, end := context.WithCancelCause(t.Context())
	end(b.reloadErr)
	for _, target := range []string{"/v1/reload", "/v1/drivers/a.csi.example/reregister"} {
		w := httptest.NewRecorder()
		if Handler(b).ServeHTTP(w, httptest.NewRequestWithContext(ctx, "POST", target, nil)); w.Code != 503 {
			t.Errorf("%s: %d %s", target, w.Code, w.Body)
		}
	}
}

func TestReregister(t *testing.T) {
	b := newDaemon(registeredDriver("a.csi.example"), status.Driver{Name: "off.csi.example", State: status.Disabled})
	h := Handler(b)
	for target, want := range map[string]int{
		"/v1/drivers/a.csi.example/reregister":   200,
		"/v1/drivers/off.csi.example/reregister": 409,
		"/v1/drivers/unknown/reregister":         404,
		"/v1/drivers/a%2Fb/reregister":           404,
	} {
		if code, body, _ := do(h, "POST", target); code != want {
			t.Errorf("%s: %d %q, want %d", target, code, body, want)
		}
	}
	if len(b.asked) != 1 || b.asked[0] != "a.csi.example" {
		t.Errorf("the daemon was asked for %q", b.asked)
	}
	if code, _, _ := do(h, "POST", "/v1/drivers/a.csi.example/reregister?force=true"); code != 200 || b.asked[len(b.asked)-1] != "a.csi.example by force" {
		t.Errorf("by force: %d, %q", code, b.asked)
	}
	b.regErr = errors.New("the driver is absent")
	if code, body, _ := do(h, "POST", "/v1/drivers/a.csi.example/reregister"); code != 409 || !strings.Contains(body, "absent") {
		t.Errorf("a driver that is not ready: %d %q", code, body)
	}
}

// The public part serves health, readiness and metrics, and changes nothing.
func TestPublicHandler(t *testing.T) {
	b := newDaemon(registeredDriver("a.csi.example"))
	h := PublicHandler(b)
	for _, c := range []struct {
		method, target string
		code           int
	}{
		{"GET", "/healthz", 200}, {"HEAD", "/healthz", 200}, {"POST", "/healthz", 405},
		{"GET", "/readyz", 200}, {"GET", "/readyz/a.csi.example", 200}, {"DELETE", "/readyz", 405},
		{"GET", "/metrics", 200}, {"HEAD", "/metrics", 200}, {"PUT", "/metrics", 405},
		{"GET", "/", 404}, {"GET", "/v1/status", 404}, {"POST", "/v1/reload", 404}, {"POST", "/v1/drivers/a.csi.example/reregister", 404},
		{"GET", "/debug/pprof/", 404}, {"GET", "/debug/pprof/heap", 404}, {"GET", "/debug/pprof/profile", 404},
		{"CONNECT", "/metrics", 405}, {"GET", "/healthz/../v1/status", 307},
	} {
		if code, _, _ := do(h, c.method, c.target); code != c.code {
			t.Errorf("%s %s: %d, want %d", c.method, c.target, code, c.code)
		}
	}
	if len(b.asked) != 0 {
		t.Error("something was changed")
	}
}

func TestProfiles(t *testing.T) {
	h := Handler(newDaemon())
	if code, body, _ := do(h, "GET", "/debug/pprof/"); code != 200 || !strings.Contains(body, "goroutine?debug=1") {
		t.Errorf("index: %d %q", code, body)
	}
	if code, body, _ := do(h, "GET", "/debug/pprof/goroutine?debug=2"); code != 200 || !strings.Contains(body, "TestProfiles") {
		t.Errorf("goroutines: %d %q", code, body)
	}
	for _, target := range []string{"heap", "profile?seconds=1"} {
		if code, body, _ := do(h, "GET", "/debug/pprof/"+target); code != 200 || !strings.HasPrefix(body, "\x1f\x8b") {
			t.Errorf("%s: %d %q", target, code, body)
		}
	}
	for target, want := range map[string]int{"GET /debug/pprof/nothing": 404, "POST /debug/pprof/symbol": 405} {
		method, path, _ := strings.Cut(target, " ")
		if code, _, _ := do(h, method, path); code != want {
			t.Errorf("%s: %d, want %d", target, code, want)
		}
	}
}

// A document is one line without characters that move a cursor or reorder text. The strings of the
// driver are unchanged when it is decoded.
func TestStatusDocumentIsHarmless(t *testing.T) {
	hostile := "a\x1b[2J\u009b31m\u202eb\x7f\x00\nc\u2028\U000e0001é日本"
	d := registeredDriver("a.csi.example")
	d.NodeID, d.Topology, d.Reason = hostile, map[string]string{hostile: hostile}, hostile
	_, body, _ := do(Handler(newDaemon(d)), "GET", "/v1/status")
	for _, r := range strings.TrimSuffix(body, "\n") {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 || r == '\u202e' || r == '\u2028' || r == '\U000e0001' {
			t.Errorf("the document has %U", r)
		}
	}
	var s status.Document
	if err := json.Unmarshal([]byte(body), &s); err != nil {
		t.Fatal(err)
	}
	if s.Drivers[0].NodeID != hostile || s.Drivers[0].Topology[hostile] != hostile {
		t.Errorf("decoded as %q", s.Drivers[0].NodeID)
	}
}

// FuzzHandler: no request causes a panic, or a server error except where the API reports one.
func FuzzHandler(f *testing.F) {
	for _, seed := range []struct{ method, target, body string }{
		{"GET", "/v1/status", ""}, {"GET", "/v1/status?watch", ""}, {"HEAD", "/v1/status?watch", ""}, {"POST", "/v1/reload", "{}"},
		{"POST", "/v1/drivers/a.csi.example/reregister", ""}, {"POST", "/v1/drivers/b.csi.example/reregister", ""}, {"POST", "/v1/drivers/%2e%2e%2f/reregister", "x"},
		{"GET", "/healthz", ""}, {"GET", "/readyz", ""}, {"GET", "/readyz/b.csi.example", ""}, {"GET", "/readyz/%00", ""}, {"GET", "/metrics", ""},
		{"GET", "/debug/pprof/", ""}, {"GET", "/debug/pprof/profile?seconds=1", ""}, {"GET", "/debug/pprof/heap?debug=1", ""},
		{"OPTIONS", "*", ""}, {"GET", "//metrics/../v1/status", ""}, {"GET", "/v1/status?%zz;watch", ""},
	} {
		f.Add(seed.method, seed.target, seed.body)
	}
	gone, leave := context.WithCancel(context.Background())
	leave() // so that streams end at once
	f.Fuzz(func(t *testing.T, method, target, body string) {
		b := newDaemon(registeredDriver("a.csi.example"), absentDriver("b.csi.example"))
		req, err := http.NewRequestWithContext(gone, method, "http://x/", strings.NewReader(body))
		if err != nil {
			t.Skip()
		}
		raw := method + " " + target + " HTTP/1.1\r\nHost: x\r\n\r\n"
		if parsed, err := http.ReadRequest(bufio.NewReader(strings.NewReader(raw))); err == nil {
			req.URL, req.RequestURI, req.Host = parsed.URL, parsed.RequestURI, parsed.Host
		} else {
			t.Skip()
		}
		for _, h := range []http.Handler{Handler(b), PublicHandler(b)} {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, req)
			expected := w.Code == 503 && strings.HasPrefix(req.URL.Path, "/readyz") || w.Code == 503 && req.URL.Path == "/healthz" ||
				strings.HasPrefix(req.URL.Path, "/debug/pprof/") // the client of a profile has gone
			if w.Code >= 500 && !expected {
				t.Errorf("%s %s: %d %s", method, target, w.Code, w.Body)
			}
			if _, err := io.Copy(io.Discard, w.Body); err != nil {
				t.Error(err)
			}
		}
		if len(b.asked) > 1 || len(b.asked) == 1 && (method != "POST" || req.URL.Path != "/v1/drivers/"+b.asked[0]+"/reregister") {
			t.Errorf("%s %s registered %q again", method, target, b.asked)
		}
	})
}
