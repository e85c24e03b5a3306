package regsocket

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/node/pluginreg"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/unixsock"
)

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
			err := s.Publish(t.Context(), announcement("a"))
			if !c.conflict {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			wantConflict(t, err, fmt.Sprintf("%q by process %d", w.dir+"/"+c.path, os.Getpid()))
		})
	}
}

func TestAnotherThroughALink(t *testing.T) {
	w := newWorld(t)
	serveSidecar(t, w.root+"/elsewhere.sock", registerapi.CSIPlugin, "a")
	os.Symlink(w.root+"/elsewhere.sock", w.dir+"/z.sock")
	r := w.open()
	wantConflict(t, socket(t, r, "a").Publish(t.Context(), announcement("a")), "/z.sock")
}

// othersOf is others for a publication.
func othersOf(t *testing.T, r *Registry, driver string) []foreignSocket {
	found, _ := r.others(t.Context(), driver, surveyWait)
	return found
}

// forgetSurvey makes the next publication ask again, as if a second had passed.
func forgetSurvey(r *Registry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.survey = nil
}

// All publications within a second share one survey; later ones ask again.
func TestOthersAreAskedOnceASecond(t *testing.T) {
	w := newWorld(t)
	path := w.dir + "/z.sock"
	r := w.open()
	s := socket(t, r, "a")
	t.Run("while it serves", func(t *testing.T) {
		sc := serveSidecar(t, path, registerapi.CSIPlugin, "a")
		begun := time.Now()
		for range 3 {
			wantConflict(t, s.Publish(t.Context(), announcement("a")), "/z.sock")
		}
		n, took := len(sc.asked), time.Since(begun)
		if n != 1 && took < surveyFor {
			t.Errorf("asked %d times in %s", n, took)
		}
		if time.Sleep(time.Second); s.Publish(t.Context(), announcement("a")) == nil || len(sc.asked) != n+1 {
			t.Errorf("after a second asked %d times, before %d", len(sc.asked), n)
		}
	})
	forgetSurvey(r)
	publish(t, s) // its file is still there, and stale
	if err := s.Withdraw(t.Context()); err != nil {
		t.Fatal(err)
	}
	os.Remove(path)
	serveSidecar(t, path, registerapi.CSIPlugin, "a") // another socket at the same path
	forgetSurvey(r)
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
	if d := time.Since(begin); d < 300*time.Millisecond || d >= time.Second {
		t.Errorf("waited %v", d)
	}
	wantConflict(t, b.Publish(t.Context(), announcement("b")), "/z.sock")
}

// More sockets than are asked at a time: all are asked, and the survey ends.
func TestManyOthers(t *testing.T) {
	w := newWorld(t)
	var all []*sidecar
	for i := range maxQueries + 6 {
		all = append(all, serveSidecar(t, fmt.Sprintf("%s/x%d.sock", w.dir, i), registerapi.CSIPlugin, "x"))
	}
	r := w.open()
	othersOf(t, r, "x")
	sv := r.survey // another one would begin a second later
	select {
	case <-sv.done:
	case <-time.After(20 * time.Second):
		t.Fatal("the survey does not end")
	}
	for i, sc := range all {
		if len(sc.asked) != 1 {
			t.Errorf("number %d was asked %d times", i, len(sc.asked))
		}
	}
	known := 0
	for _, f := range sv.found {
		if f.driver == "x" {
			known++
		}
	}
	if known != len(all) {
		t.Errorf("%d of %d are known", known, len(all))
	}
}

// A registrar that comes later at another path is asked only when the kubelet has refused, once.
func TestAnotherIsNamedAfterARefusal(t *testing.T) {
	w := newWorld(t)
	r, s := w.published("a")
	sc := serveSidecar(t, w.dir+"/z.sock", registerapi.CSIPlugin, "a")
	serveSidecar(t, w.dir+"/y.sock", registerapi.CSIPlugin, "y")
	forgetSurvey(r)
	k := dialAsKubelet(t, s.path)
	k.notify(t, true, "")
	if got := look(t, s).AlsoServed; got != "" || len(sc.asked) > 0 {
		t.Errorf("while it is registered: %q, asked %d times", got, len(sc.asked))
	}
	for n := 1; n <= 2; n++ {
		k.notify(t, false, "already registered")
		for range 3 {
			got := look(t, s).AlsoServed
			if !strings.Contains(got, fmt.Sprintf(`"%s/z.sock" by process %d`, w.dir, os.Getpid())) || strings.Contains(got, "y.sock") {
				t.Errorf("also served: %q", got)
			}
			forgetSurvey(r)
		}
		if len(sc.asked) != n {
			t.Errorf("asked %d times after %d refusals", len(sc.asked), n)
		}
	}
}

// A socket that was found at a path is not another registrar's if the path has become ours since.
func TestOthersThatBecameOurs(t *testing.T) {
	w := newWorld(t)
	r, err := Open(w.root, withRun(w))
	if err != nil {
		t.Fatal(err)
	}
	serveSidecar(t, w.dir+"/a-reg.sock", registerapi.CSIPlugin, "a")
	if n := len(othersOf(t, r, "a")); n != 1 {
		t.Errorf("%d found", n)
	}
	s := socket(t, r, "a")
	if n := len(othersOf(t, r, "a")); n != 0 {
		t.Errorf("%d found when the path is ours", n)
	}
	if err := s.Close(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	r.Close(t.Context())
}

// Nothing asks or looks at other sockets while nothing is published.
func TestOthersAreLeftAlone(t *testing.T) {
	w := newWorld(t)
	r, s := w.published("a")
	forgetSurvey(r)
	sc := serveSidecar(t, w.dir+"/z.sock", registerapi.CSIPlugin, "z")
	look(t, s)
	if len(sc.asked) > 0 || r.survey != nil {
		t.Error("asked")
	}
}

// A socket that a registrar binds and does not listen on yet is no conflict.
func TestAnotherThatDoesNotListenYet(t *testing.T) {
	w := newWorld(t)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: w.dir + "/z.sock"}); err != nil {
		t.Fatal(err)
	}
	w.published("a")
}

// A file system may not answer at the Check after a refusal. A later Check names the other
// registrar: they go on until all file systems have answered.
func TestARefusalIsExplainedLate(t *testing.T) {
	const many = -1
	for _, c := range []struct {
		name  string
		hangs string // whose file system does not answer for a minute
		fails string // the directory that cannot be read once
		slow  string // which socket's process takes its time
		mute  string // which socket's process does not answer
		asked int    // how often z.sock was
	}{
		{name: "at once", asked: 1},
		{name: "the directory hangs", hangs: "/reg", asked: 1},
		{name: "the directory cannot be read", fails: "/reg", asked: 1},
		{name: "its socket hangs", hangs: "/reg/z.sock", asked: 1},
		{name: "a link hangs", hangs: "/reg/link.sock", asked: many},
		{name: "it is slow", slow: "/reg/z.sock", asked: 1},
		{name: "another one is mute", mute: "/reg/mute.sock", asked: 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				host, answers, asked := newHost(), time.Now().Add(time.Minute), 0
				wait := func(path string) {
					if path == c.hangs {
						time.Sleep(time.Until(answers))
					}
				}
				file := func(path string) (unixsock.File, error) {
					return unixsock.File{FileID: unixsock.FileID{Ino: uint64(len(path))}, Mode: unix.S_IFSOCK}, nil
				}
				host.Lstat, host.Stat = file, file
				fails := c.fails
				host.Sockets = func(dir string) ([]string, error) {
					wait(dir)
					if dir == fails {
						fails = ""
						return nil, syscall.EIO
					}
					return []string{"/reg/link.sock", "/reg/mute.sock", "/reg/z.sock"}, nil
				}
				host.GetInfo = func(ctx context.Context, path string) (pluginreg.Info, unixsock.Cred, error) {
					switch wait(path); path {
					case c.mute:
						<-ctx.Done()
					case c.slow:
						time.Sleep(surveyWait + time.Millisecond)
					}
					if ctx.Err() != nil {
						return pluginreg.Info{}, unixsock.Cred{}, ctx.Err()
					}
					if path != "/reg/z.sock" {
						return pluginreg.Info{Type: registerapi.CSIPlugin, Name: "b"}, unixsock.Cred{}, nil
					}
					asked++
					return pluginreg.Info{Type: registerapi.CSIPlugin, Name: "a"}, unixsock.Cred{PID: 7}, nil
				}
				o := options()
				o.Dir, o.Host = "/reg", host
				r, err := Open("", o)
				if err != nil {
					t.Fatal(err)
				}
				defer r.Close(context.Background())
				s := socket(t, r, "a")
				p := newListener(s, nil, record{})
				p.Notification = status.Notification{At: time.Now(), Error: "already registered"}
				s.current.Store(p)
				look(t, s)
				hinted := 0
				for end := time.After(time.Hour); end != nil; {
					select {
					case <-s.Hints():
						hinted++
						look(t, s)
					case <-end:
						end = nil
					}
				}
				if got := s.Look().AlsoServed; !strings.Contains(got, `"/reg/z.sock" by process 7`) {
					t.Errorf("also served: %q", got)
				}
				least, most := 0, 0
				switch {
				case c.hangs != "":
					least, most = 4, 10
				case c.fails != "":
					least, most = 1, 1
				}
				if hinted < least || hinted > most || asked != c.asked && !(c.asked == many && asked > 3) || asked > 10 {
					t.Errorf("%d hints, asked %d times", hinted, asked)
				}
			})
		})
	}
}
