package registrar

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
)

// How long the last state lasted, and how long the registration took, are right when the wall
// clock was set in between. It does not run in virtual time, which has no monotonic part.
func TestDurationsWhenTheWallClockIsSet(t *testing.T) {
	for name, ahead := range map[string]time.Duration{"an hour back": -time.Hour, "a year forward": 365 * 24 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			w, log := newWorld(), &bytes.Buffer{}
			w.hints, w.shints = make(chan struct{}, 1), make(chan struct{}, 1)
			var got status.Driver
			r := New(base, driver.Observe(w), fakeSocket{w}, slog.New(slog.NewTextHandler(log, nil)), func(s status.Driver) { got = s })
			defer r.driver.Close()
			published := time.Now()
			sock := status.Socket{Path: "/reg/foo-reg.sock", Place: status.Ours, Up: true, Publication: status.Publication{PublishedAt: published}}
			r.updateStatus(sock, published)
			accepted := fake.WithWallClock(published.Add(700*time.Millisecond), ahead)
			sock.FirstAcceptedAt, sock.Notification = accepted, status.Notification{At: accepted, Registered: true}
			r.updateStatus(sock, accepted)
			if got.State != string(status.Registered) || got.Took != 700*time.Millisecond || !strings.Contains(log.String(), "after=700ms") {
				t.Errorf("%s, took %s\n%s", got.State, got.Took, log)
			}
			later := accepted.Add(time.Minute)
			for what, at := range map[string]time.Time{"since": got.Since, "registered": got.RegisteredAt} {
				if later.Sub(at) != time.Minute || fake.WithWallClock(later, -ahead).Sub(at) != time.Minute {
					t.Errorf("%s: %s, at %s", what, at, later)
				}
			}
		})
	}
}
