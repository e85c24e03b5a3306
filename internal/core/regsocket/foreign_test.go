package kubelet

import (
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/node/status"
)

// scan finds other registrars, however long that takes. It asks those again that did not answer
// within a second, because the machine may be slow.
func scan(r *Registry) {
	for again := 5; again > 0; again-- {
		<-r.foreign.request()
		if !forgetSilence(r) {
			return
		}
	}
}

// forgetSilence makes sockets that did not answer due again, and reports whether there are any.
func forgetSilence(r *Registry) (found bool) {
	r.foreign.mu.Lock()
	defer r.foreign.mu.Unlock()
	for path, a := range r.foreign.found {
		if !a.silentSince.IsZero() {
			found = true
			a.silentSince = a.silentSince.Add(-scanAgain)
			r.foreign.found[path] = a
		}
	}
	return found
}

func TestForeignSockets(t *testing.T) {
	for _, c := range []struct {
		name     string
		path     string
		kind     string
		driver   string
		conflict bool
	}{
		{"same name", "z.sock", registerapi.CSIPlugin, "a", true},
		{"in a subdirectory", "sub/z.sock", registerapi.CSIPlugin, "a", true},
		{"another name", "z.sock", registerapi.CSIPlugin, "b", false},
		{"another kind", "z.sock", registerapi.DRAPlugin, "a", false},
		{"dot name", ".z.sock", registerapi.CSIPlugin, "a", false},
		{"in a dot directory", ".sub/z.sock", registerapi.CSIPlugin, "a", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			os.Mkdir(w.dir+"/sub", 0o755)
			os.Mkdir(w.dir+"/.sub", 0o755)
			serveSidecar(t, w.dir+"/"+c.path, c.kind, c.driver)
			r := w.open()
			s := socket(t, r, "a")
			scan(r)
			err := s.Publish(t.Context(), announcement("a"))
			if !c.conflict {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			wantConflict(t, err, fmt.Sprintf("%q by process %d", w.dir+"/"+c.path, os.Getpid()))
			w.wantNoTemporary()
		})
	}
}

func TestAnotherThroughALink(t *testing.T) {
	w := newWorld(t)
	serveSidecar(t, w.root+"/elsewhere.sock", registerapi.CSIPlugin, "a")
	os.Symlink(w.root+"/elsewhere.sock", w.dir+"/z.sock")
	r := w.open()
	scan(r)
	wantConflict(t, socket(t, r, "a").Publish(t.Context(), announcement("a")), "/z.sock")
}

func TestAnotherIsAskedOnceAndNoConflictWhenItEnds(t *testing.T) {
	w := newWorld(t)
	path := w.dir + "/z.sock"
	r := w.open()
	s := socket(t, r, "a")
	var sc *sidecar
	t.Run("while it serves", func(t *testing.T) {
		sc = serveSidecar(t, path, registerapi.CSIPlugin, "a")
		scan(r)
		for range 3 {
			wantConflict(t, s.Publish(t.Context(), announcement("a")), "/z.sock")
		}
		if n := len(sc.asked); n != 1 {
			t.Errorf("asked %d times", n)
		}
	})
	scan(r)
	publish(t, s) // its file is still there, and stale
	if err := s.Withdraw(t.Context()); err != nil {
		t.Fatal(err)
	}
	os.Remove(path)
	serveSidecar(t, path, registerapi.CSIPlugin, "a") // another socket at the same path
	scan(r)
	wantConflict(t, s.Publish(t.Context(), announcement("a")), "/z.sock")
}

// A publication waits a third of a second for all sockets that hang together; those that answered
// are known by then.
func TestOthersThatHang(t *testing.T) {
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
	if d := time.Since(begin); d < scanWait || d >= askTime {
		t.Errorf("waited %v", d)
	}
	eventually(t, "the one that answers is known", func() bool { return len(r.foreign.serving("b")) == 1 })
	wantConflict(t, b.Publish(t.Context(), announcement("b")), "/z.sock")
}

// Many publications at the same time share a few scans, and none gets a scan that began before it.
func TestScansAreShared(t *testing.T) {
	w := newWorld(t)
	hang := make(chan struct{})
	sc := serveSidecar(t, w.dir+"/z.sock", registerapi.CSIPlugin, "z", func(s *sidecar) { s.hang = hang })
	r := w.open()
	first := r.foreign.request()
	<-sc.asked // its scan runs
	var late []<-chan struct{}
	for range 100 {
		late = append(late, r.foreign.request())
	}
	serveSidecar(t, w.dir+"/y.sock", registerapi.CSIPlugin, "y")
	close(hang)
	<-first
	for _, done := range late {
		<-done
	}
	if len(r.foreign.serving("z")) != 1 || len(r.foreign.serving("y")) != 1 {
		t.Error("not all are found by the second scan")
	}
	if n := len(sc.asked); n > 0 {
		t.Errorf("asked %d times more", n)
	}
}

// hinted waits for a hint of the Socket.
func hinted(t *testing.T, s *Socket) {
	t.Helper()
	select {
	case <-s.Hints():
	case <-time.After(5 * time.Second):
		t.Fatal("no hint")
	}
}

// After publishing it is no longer a conflict, so status shows it.
func TestARegistrarThatComesLaterIsShownUntilItGoes(t *testing.T) {
	if !isolate(t, nil) {
		return
	}
	w := newWorld(t)
	r, s := w.published("a")
	t.Run("while it serves", func(t *testing.T) {
		serveSidecar(t, w.dir+"/z.sock", registerapi.CSIPlugin, "a")
		serveSidecar(t, w.dir+"/y.sock", registerapi.CSIPlugin, "y")
		r.entries.Hint()
		hinted(t, s)
		if got := s.Look().AlsoServed; !strings.Contains(got, fmt.Sprintf(`"%s/z.sock" by process %d`, w.dir, os.Getpid())) || strings.Contains(got, "y.sock") {
			t.Errorf("also served: %q", got)
		}
	})
	// When it is killed, it leaves a stale socket.
	r.entries.Hint()
	hinted(t, s)
	if got := s.Look().AlsoServed; got != "" {
		t.Errorf("also served: %q", got)
	}
}

// bind comes before listen, and only bind causes a hint: a socket that refused is asked again, but
// not by each publication.
func TestAnotherThatListensLateIsFound(t *testing.T) {
	w := newWorld(t)
	r, s := w.published("a")
	path := w.dir + "/z.sock"
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
	<-r.foreign.request()
	if !r.foreign.mayChange() {
		t.Error("not to be asked again")
	}
	if err := unix.Listen(fd, 5); err != nil {
		t.Fatal(err)
	}
	listener, err := net.FileListener(f)
	if err != nil {
		t.Fatal(err)
	}
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	sc := &sidecar{info: &registerapi.PluginInfo{Type: registerapi.CSIPlugin, Name: "a"}, asked: make(chan struct{}, 100)}
	serve(t, listener, sc)
	<-r.foreign.request()
	if len(sc.asked) != 0 {
		t.Error("asked again at once")
	}
	forgetSilence(r) // as if that time had passed
	scan(r)
	if s.Look().AlsoServed == "" || !r.foreign.mayChange() {
		t.Errorf("not found, or not to be looked at again: %+v", r.foreign.serving("a"))
	}
}

// A socket that can only change with a hint is not asked without one: nothing wakes an idle daemon.
func TestOthersThatAnswerAreLeftAlone(t *testing.T) {
	w := newWorld(t)
	serveSidecar(t, w.dir+"/z.sock", registerapi.CSIPlugin, "z")
	serveSidecar(t, w.dir+"/dra.sock", registerapi.DRAPlugin, "a")
	r, _ := w.published("a")
	scan(r)
	if len(r.foreign.serving("z")) != 1 || r.foreign.mayChange() {
		t.Errorf("%+v", r.foreign.found)
	}
}

// An answer that is later than a publication waits, but within the kubelet's second.
func TestAnotherThatAnswersLateIsFoundLate(t *testing.T) {
	w := newWorld(t)
	answer := make(chan struct{})
	serveSidecar(t, w.dir+"/z.sock", registerapi.CSIPlugin, "a", func(s *sidecar) { s.hang = answer })
	r, s := w.published("a")
	if got := s.Look().AlsoServed; got != "" {
		t.Errorf("known already: %q", got)
	}
	close(answer)
	hinted(t, s)
	if s.Look().AlsoServed == "" {
		t.Error("not found")
	}
	scan(r)
	wantConflict(t, s.Publish(t.Context(), announcement("a")), "/z.sock")
	wantPlace(t, s, status.Ours)
}
