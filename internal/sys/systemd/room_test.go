package systemd

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/test/fake"
)

// TestSingleRequestIsConfirmed checks that one message alone is confirmed, too.
func TestSingleRequestIsConfirmed(t *testing.T) {
	_, n := startManager(t)
	s, _ := runStore(t, n, StoreOptions{})
	done, err := s.enqueue("a", -1)
	if err != nil {
		t.Fatal(err)
	}
	s.wake <- struct{}{}
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Error("it is not confirmed")
	}
}

// TestReadyWaitsForRoom checks that READY=1 is not lost because the manager's queue is full.
func TestReadyWaitsForRoom(t *testing.T) {
	path := filepath.Join(fake.ShortDir(t), "slow")
	slow, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	if err := slow.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	n := newNotifier(t, path)
	if err := fake.FillDatagrams(path); err != nil {
		t.Fatal(err)
	}
	sent := make(chan error, 1)
	go func() { sent <- n.Ready() }()
	select {
	case err := <-sent:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(100 * time.Millisecond): // an error would come at once
	}
	message := make([]byte, 1<<16)
	for {
		size, err := slow.Read(message)
		if err != nil {
			t.Fatal(err)
		}
		if string(message[:size]) == "READY=1" {
			break
		}
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
}

// TestLongestName checks that a name of a descriptor can have 255 characters, as for systemd.
func TestLongestName(t *testing.T) {
	s := NewStore(NewNotifier(func(string) string { return "/nowhere" }), StoreOptions{Log: slog.New(slog.DiscardHandler)})
	defer s.notify.Close()
	defer s.end()
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // waits for nobody
	l := listen(t, filepath.Join(fake.ShortDir(t), "s"))
	for length, ok := range map[int]bool{255: true, 256: false} {
		if err := s.Keep(ctx, strings.Repeat("x", length), l); (err == nil) != ok {
			t.Errorf("%d characters: %v", length, err)
		}
	}
}
