package cli

import (
	"testing"
	"time"

	"csi-registrar/internal/fake"
)

// After a long wait the daemon's socket is noticed by inotify, not by the slow retries.
func TestWaitIsWokenByTheSocket(t *testing.T) {
	fake.CheckLeaks(t)
	root := fake.ShortDir(t)
	t.Chdir(root)
	s, ended := newSession(), make(chan int, 1)
	go func() { ended <- s.run(t.Context(), "wait", "--config-root", ".") }()
	time.Sleep(1200 * time.Millisecond) // the pause between two attempts has grown to a second
	start := time.Now()
	newFake(driverIn("a.csi.example", "registered", hour)).serve(t, root)
	if code := <-ended; code != 0 {
		t.Errorf("%d %s", code, s.stderr)
	}
	if took := time.Since(start); took > 800*time.Millisecond {
		t.Errorf("it took %s", took)
	}
}
