package control

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
)

// Many `wait` commands do not block other commands.
func TestStreamsLeaveRoomForOtherRequests(t *testing.T) {
	fake.CheckLeaks(t)
	path, _ := served(t, newDaemon(absentDriver("a.csi.example")))
	ctx, cancel := context.WithCancel(t.Context())
	var streams, opened sync.WaitGroup
	defer streams.Wait()
	defer cancel()
	for range 200 {
		opened.Add(1)
		streams.Go(func() {
			once := sync.OnceFunc(opened.Done)
			defer once()
			for _, err := range NewClient(path).Watch(ctx) {
				if err != nil {
					t.Error(err)
				}
				once()
			}
		})
	}
	opened.Wait()
	begun := time.Now()
	if _, err := NewClient(path).Reload(t.Context(), false); err != nil {
		t.Error(err)
	}
	if _, err := NewClient(path).Status(t.Context()); err != nil {
		t.Error(err)
	}
	if took := time.Since(begun); took > 5*time.Second {
		t.Errorf("two commands took %s", took)
	}
}

// Requests share a text until the status changes, and for a second at most.
func TestScrapesShareAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newDaemon(absentDriver("a.csi.example"))
		h := PublicHandler(b)
		up := func() bool {
			_, body, _ := do(h, "GET", "/metrics")
			return strings.Contains(body, `csi_registrar_driver_up{driver="a.csi.example"} 1`)
		}
		if up() {
			t.Error("an absent driver is up")
		}
		b.mu.Lock() // without the hint of a change
		b.status.Drivers = []status.Driver{registeredDriver("a.csi.example")}
		b.mu.Unlock()
		if up() {
			t.Error("the text was made twice within a second")
		}
		time.Sleep(maxAge)
		if !up() {
			t.Error("the change is missing a second later")
		}
		b.set(func(s *status.Document) { s.Drivers = []status.Driver{absentDriver("a.csi.example")} })
		if up() {
			t.Error("the text is that of before the change")
		}
	})
}

// A connection to the public port serves one request.
func TestPublicConnectionsAreNotKept(t *testing.T) {
	fake.CheckLeaks(t)
	c, err := net.Dial("tcp", servedPublic(t, newDaemon(), "127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, strings.Repeat("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 2)); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	answers, err := io.ReadAll(c)
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() || bytes.Count(answers, []byte("HTTP/1.1 ")) != 1 {
		t.Errorf("%v, %q", err, answers)
	}
}

// changesDuringStatus is a Backend whose status changes right after it was read for the first time.
type changesDuringStatus struct {
	Backend
	version string
	changed chan struct{}
}

func (b *changesDuringStatus) Changed() <-chan struct{} { return b.changed }

func (b *changesDuringStatus) Status() status.Document {
	d := status.Document{Version: b.version}
	if b.version == "1" {
		b.version = "2"
		close(b.changed)
		b.changed = make(chan struct{})
	}
	return d
}

// A change while the status is rendered makes the next request render it again.
func TestSnapshotChangeDuringStatus(t *testing.T) {
	b := &changesDuringStatus{version: "1", changed: make(chan struct{})}
	s := &snapshot[string]{render: func(d status.Document) string { return d.Version }}
	for _, want := range []string{"1", "2", "2"} {
		if got, _ := s.get(b); got != want {
			t.Errorf("version %s, want %s", got, want)
		}
	}
}
