package cli

import (
	"testing"
	"time"

	"csi-registrar/internal/test/fake"
)

// The pause between two attempts does not grow with the time for which the daemon is down.
func TestWaitConnectsSoonAfterALongTime(t *testing.T) {
	fake.CheckLeaks(t)
	root := fake.ShortDir(t)
	t.Chdir(root)
	s, ended := newSession(), make(chan int, 1)
	go func() { ended <- s.run(t.Context(), "wait", "--config-root", ".") }()
	time.Sleep(1200 * time.Millisecond)
	start := time.Now()
	newFake(driverIn("a.csi.example", "registered", hour)).serve(t, root)
	if code := <-ended; code != 0 {
		t.Errorf("%d %s", code, s.stderr)
	}
	if took := time.Since(start); took > 800*time.Millisecond {
		t.Errorf("it took %s", took)
	}
}
