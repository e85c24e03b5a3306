package kubelet

import (
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

func TestRivals(t *testing.T) {
	for _, c := range []struct {
		name     string
		path     string
		kind     string
		driver   string
		conflict bool
	}{
		{"same name", "z.sock", registerapi.CSIPlugin, "a", true},
		{"in a subfolder", "sub/z.sock", registerapi.CSIPlugin, "a", true},
		{"another name", "z.sock", registerapi.CSIPlugin, "b", false},
		{"another kind", "z.sock", registerapi.DRAPlugin, "a", false},
		{"dot name", ".z.sock", registerapi.CSIPlugin, "a", false},
		{"dot folder", ".sub/z.sock", registerapi.CSIPlugin, "a", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			os.Mkdir(w.dir+"/sub", 0o755)
			os.Mkdir(w.dir+"/.sub", 0o755)
			serveSidecar(t, w.dir+"/"+c.path, c.kind, c.driver)
			s := socket(t, w.open(), "a")
			err := s.Publish(t.Context(), announcement("a"))
			if !c.conflict {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			wantConflict(t, err, fmt.Sprintf("%s/%s by process %d", w.dir, c.path, os.Getpid()))
			w.wantNoTemporary()
		})
	}
}

func TestARivalThroughALink(t *testing.T) {
	w := newWorld(t)
	serveSidecar(t, w.root+"/elsewhere.sock", registerapi.CSIPlugin, "a")
	os.Symlink(w.root+"/elsewhere.sock", w.dir+"/z.sock")
	s := socket(t, w.open(), "a")
	wantConflict(t, s.Publish(t.Context(), announcement("a")), "/z.sock")
}

func TestARivalIsAskedOnceAndFreeWhenItEnds(t *testing.T) {
	w := newWorld(t)
	path := w.dir + "/z.sock"
	s := socket(t, w.open(), "a")
	var sc *sidecar
	t.Run("while it serves", func(t *testing.T) {
		sc = serveSidecar(t, path, registerapi.CSIPlugin, "a")
		for range 3 {
			wantConflict(t, s.Publish(t.Context(), announcement("a")), "/z.sock")
		}
		if n := len(sc.asked); n != 1 {
			t.Errorf("asked %d times", n)
		}
	})
	publish(t, s) // its file is still there, and dead
	if err := s.Withdraw(t.Context()); err != nil {
		t.Fatal(err)
	}
	os.Remove(path)
	serveSidecar(t, path, registerapi.CSIPlugin, "a") // another socket at the same path
	wantConflict(t, s.Publish(t.Context(), announcement("a")), "/z.sock")
}

// Others that hang are waited for once, together, for a third of a second; nobody who
// publishes in the next 30 s waits again.
func TestHangingRivals(t *testing.T) {
	w := newWorld(t)
	for i := range 5 {
		serveSidecar(t, fmt.Sprintf("%s/hang%d.sock", w.dir, i), registerapi.CSIPlugin, "a", func(s *sidecar) { s.hang = make(chan struct{}) })
		listen(t, fmt.Sprintf("%s/mute%d.sock", w.dir, i))
	}
	serveSidecar(t, w.dir+"/z.sock", registerapi.CSIPlugin, "b")
	r := w.open()
	a, b := socket(t, r, "a"), socket(t, r, "b")
	begin := time.Now()
	publish(t, a)
	if d := time.Since(begin); d > 2*scanTime {
		t.Errorf("waited %v", d)
	}
	begin = time.Now()
	wantConflict(t, b.Publish(t.Context(), announcement("b")), "/z.sock")
	if d := time.Since(begin); d > scanTime/2 {
		t.Errorf("waited again, %v", d)
	}
}

// Many who publish at the same time share few scans.
func TestScansAreShared(t *testing.T) {
	w := newWorld(t)
	hang := make(chan struct{})
	sc := serveSidecar(t, w.dir+"/z.sock", registerapi.CSIPlugin, "z", func(s *sidecar) { s.hang = hang })
	r := w.open()
	r.rivals.wait = 10 * time.Second
	var wg sync.WaitGroup
	wg.Go(func() { publish(t, socket(t, r, "first")) })
	<-sc.asked // its scan runs
	for i := range 100 {
		wg.Go(func() { publish(t, socket(t, r, fmt.Sprintf("d%d", i))) })
	}
	eventually(t, "the others wait for the next one", func() bool {
		r.rivals.mu.Lock()
		defer r.rivals.mu.Unlock()
		return r.rivals.next != nil
	})
	first := r.rivals.last
	close(hang)
	wg.Wait()
	if first == r.rivals.last {
		t.Error("they were served by a scan that had begun before")
	}
	if n := len(sc.asked); n > 1 {
		t.Errorf("asked %d times more", n)
	}
}
