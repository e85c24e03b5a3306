package regsocket

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/process"
)

// The times of a record are ages by the monotonic clock, so setting the wall clock changes no
// comparison with them.
func TestRecordHasAges(t *testing.T) {
	host, path := newHost(), filepath.Join(t.TempDir(), "a.json")
	now := time.Now()
	for name, c := range map[string]struct{ at, want time.Time }{
		"an hour ago":                 {now.Add(-time.Hour), now.Add(-time.Hour)},
		"the clock was an hour ahead": {now.Add(time.Hour), now},
		"never":                       {},
	} {
		rec := record{Publication: status.Publication{PublishedAt: c.at, GetInfoAt: c.at, FirstAcceptedAt: c.at, Notification: status.Notification{At: c.at}}}
		if err := host.writeJSON(path, rec); err != nil {
			t.Fatal(err)
		}
		rec, err := host.readRecord(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range []time.Time{rec.PublishedAt, rec.GetInfoAt, rec.FirstAcceptedAt, rec.Notification.At} {
			monotonic := strings.Contains(at.String(), " m=")
			if c.want.IsZero() != at.IsZero() || monotonic == at.IsZero() || at.Sub(c.want).Abs() > time.Minute {
				t.Errorf("%s: %s, want about %s", name, at, c.want)
			}
		}
	}
}

// The record of the kubelet is the same.
func TestRecordOfTheKubeletHasAges(t *testing.T) {
	dir := t.TempDir()
	p := NewProcess(slog.New(slog.DiscardHandler), dir, func(status.Kubelet) {})
	now := time.Now()
	p.last.Kubelet = status.Kubelet{PID: os.Getpid(), ConfirmedAt: now.Add(-time.Hour), EndedAt: now.Add(-time.Minute)}
	p.last.Started = process.StartTime("/proc", os.Getpid())
	p.save()
	next := NewProcess(p.log, dir, p.observe)
	if err := next.Adopt(); err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	rec := next.last
	for at, age := range map[time.Time]time.Duration{rec.ConfirmedAt: time.Hour, rec.EndedAt: time.Minute} {
		if !strings.Contains(at.String(), " m=") || (now.Sub(at)-age).Abs() > 100*time.Millisecond {
			t.Errorf("%s, want %s ago", at, age)
		}
	}
}

// A record has one writer at a time, also when a socket is published in place of one that the
// kubelet is calling.
func TestRecordHasOneWriter(t *testing.T) {
	w := newWorld(t)
	host := newHost()
	var s *Socket
	writes, write := 0, host.WriteFile
	host.WriteFile = func(path string, data []byte, mode os.FileMode) error {
		writes++
		if s.saving.TryLock() {
			s.saving.Unlock()
			t.Error("the record is written without the lock")
		}
		return write(path, data, mode)
	}
	s = socket(t, w.open(func(o *Options) { o.Host = host }), "a")
	publish(t, s)
	publish(t, s)
	if writes != 4 {
		t.Errorf("%d writes", writes)
	}
}
