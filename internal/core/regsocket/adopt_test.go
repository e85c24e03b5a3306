package regsocket

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/unixsock"
)

// left makes a node on which a first process has published the drivers, the kubelet has registered
// them, and the process has ended, gracefully or not at all (kill -9: nothing is called).
func left(t *testing.T, names ...string) (*world, *manager) {
	t.Helper()
	w, m := newWorld(t), newManager(t)
	o := withRun(w)
	o.Store, o.KeepSockets = m, true
	for _, name := range names {
		r, err := Open(w.root, o)
		if err != nil {
			t.Fatal(err)
		}
		s := socket(t, r, name)
		publish(t, s)
		k := dialAsKubelet(t, s.path)
		if _, err := k.getInfo(t); err != nil {
			t.Fatal(err)
		}
		k.notify(t, true, "")
		k.cc.Close()
		if err := s.Close(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		r.Close(t.Context())
	}
	return w, m
}

func TestAdopt(t *testing.T) {
	w, m := left(t, "a")
	before, _ := unixsock.Lstat(w.dir + "/a-reg.sock")
	// A kubelet that comes between the processes is answered by the next one.
	k := dialAsKubelet(t, w.dir+"/a-reg.sock")
	answer := make(chan error, 1)
	go func() { _, err := k.getInfo(t); answer <- err }()
	time.Sleep(20 * time.Millisecond) // let it connect; no matter if it has not

	r := w.open(with(m, true))
	s := socket(t, r, "a")
	if err := s.Adopt(t.Context(), m.pass(t, "registration-a")); err != nil {
		t.Fatal(err)
	}
	if err := <-answer; err != nil {
		t.Errorf("the kubelet between: %v", err)
	}
	l := look(t, s)
	if !l.Up || l.Place != status.Ours || !sameAnnouncement(l.Announced, announcement("a")) || !l.Notification.Registered || l.PublishedAt.IsZero() || l.DirRecreated {
		t.Errorf("adopted: %+v", l)
	}
	if after, _ := unixsock.Lstat(s.path); after != before {
		t.Error("another inode")
	}
	mustAnswer(t, s.path, announcement("a").Endpoint)
	dialAsKubelet(t, s.path).notify(t, false, "no more")
	if rec := recorded(r, "a"); rec.Notification.Error != "no more" || rec.Notification.Registered {
		t.Errorf("record: %+v", rec)
	}
	publish(t, s) // and it can be replaced
	if m.count("registration-a") != 1 {
		t.Error("two in the store")
	}
	if err := s.Withdraw(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(s.path); err == nil || m.count("registration-a") != 0 {
		t.Error("not withdrawn")
	}
	if strings.Contains(strings.Join(m.log, " "), "keep registration-a forget registration-a keep registration-a keep") {
		t.Errorf("store: %v", m.log)
	}
}

// A record is valid only for the listener that it describes. A listener without a record is closed,
// and its socket removed.
func TestRecordNotBelieved(t *testing.T) {
	for name, change := range map[string]func(*record){
		"another inode":  func(r *record) { r.Ino++ },
		"another device": func(r *record) { r.Dev++ },
		"reused inode":   func(r *record) { r.Born++ },
		"another path":   func(r *record) { r.Path += "x" },
		"another cookie": func(r *record) { r.Cookie++ },
		"no inode":       func(r *record) { r.FileID = unixsock.FileID{} },
		"another driver": func(r *record) { r.Announced.Identity.Name = "b" },
		"nonsense":       nil,
		"missing":        nil,
	} {
		t.Run(name, func(t *testing.T) {
			w, m := left(t, "a")
			r := w.open(with(m, true))
			switch {
			case change != nil:
				rec := recorded(r, "a")
				change(&rec)
				if err := r.o.Host.writeJSON(r.recordOf("a"), rec); err != nil {
					t.Fatal(err)
				}
			case name == "missing":
				os.Remove(r.recordOf("a"))
			default:
				os.WriteFile(r.recordOf("a"), []byte(`{"path": 7`), 0o600)
			}
			s := socket(t, r, "a")
			if err := s.Adopt(t.Context(), m.pass(t, "registration-a")); err != nil || !w.cannotAdopt() {
				t.Fatal("adopted")
			}
			if l := s.Look(); l.Up || l.Place != status.Missing || m.count("registration-a") != 0 || !isGone(r.recordOf("a")) {
				t.Errorf("%+v, record gone: %t", l, isGone(r.recordOf("a")))
			}
			publish(t, s)
			mustAnswer(t, s.path, announcement("a").Endpoint)
			if m.count("registration-a") != 1 {
				t.Error("not one in the store")
			}
		})
	}
}

// A listener that is not at its path is closed and forgotten, and the file at the path stays.
func TestAdoptNotProven(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, path string){
		"removed":          func(t *testing.T, path string) { os.Remove(path) },
		"another's":        func(t *testing.T, path string) { os.Remove(path); listen(t, path) },
		"a file":           func(t *testing.T, path string) { os.Remove(path); os.WriteFile(path, nil, 0o600) },
		"a full queue":     func(t *testing.T, path string) { os.Remove(path); fullQueue(t, path) },
		"a link to itself": func(t *testing.T, path string) { os.Rename(path, path+".x"); os.Symlink(path+".x", path) },
	} {
		t.Run(name, func(t *testing.T) {
			w, m := left(t, "a")
			r := w.open(with(m, true))
			s := socket(t, r, "a")
			change(t, s.path)
			before, _ := unixsock.Lstat(s.path)
			if err := s.Adopt(t.Context(), m.pass(t, "registration-a")); err != nil || !w.cannotAdopt() {
				t.Fatalf("adopted: %v", err)
			}
			if after, _ := unixsock.Lstat(s.path); after != before {
				t.Error("touched what is there")
			}
			if look(t, s).Up || m.count("registration-a") != 0 {
				t.Error("not forgotten")
			}
		})
	}
}

// A process that was killed between bind and the second write of the record left a socket that
// clients may know: it is not adopted, but removed, also if its path cannot be examined.
func TestAdoptWithoutAnInode(t *testing.T) {
	for name, lstat := range map[string]func(string) (unixsock.File, error){
		"path examined": unixsock.Lstat,
		"path unknown":  func(string) (unixsock.File, error) { return unixsock.File{}, unix.EIO },
	} {
		t.Run(name, func(t *testing.T) {
			w, m := left(t, "a")
			r := w.open(with(m, true), func(o *Options) { o.Host = newHost(); o.Host.Lstat = lstat })
			s := socket(t, r, "a")
			rec := recorded(r, "a")
			rec.FileID = unixsock.FileID{}
			if err := r.o.Host.writeJSON(r.recordOf("a"), rec); err != nil {
				t.Fatal(err)
			}
			err := s.Adopt(t.Context(), m.pass(t, "registration-a"))
			if unknown := errors.Is(err, unix.EIO); unknown != (name == "path unknown") || !w.cannotAdopt() {
				t.Errorf("adopted: %v", err)
			}
			if !isGone(s.path) || !isGone(r.recordOf("a")) || m.count("registration-a") != 0 {
				t.Errorf("path gone %t, record gone %t, in the store %d", isGone(s.path), isGone(r.recordOf("a")), m.count("registration-a"))
			}
		})
	}
}

// TestIsRegistration checks which paths of a record may be removed: ".." can lead anywhere behind a
// symbolic link.
func TestIsRegistration(t *testing.T) {
	for path, want := range map[string]bool{
		"/k/plugins_registry/a-reg.sock": true, "k/plugins_registry/a-reg.sock": false, "/k/plugins/a-reg.sock": false,
		"/k/plugins_registry/b-reg.sock": false, "/k/plugins_registry/x/../a-reg.sock": false, "/k/plugins_registry/x/a-reg.sock": false,
	} {
		if isRegistration(path, "a") != want {
			t.Error(path)
		}
	}
}

// Two listeners in the store were bound to the same path, when a process was killed between two
// publications: the cookie tells which one the record is of.
func TestAdoptOneOfTwo(t *testing.T) {
	for _, first := range []bool{true, false} {
		w := newWorld(t)
		m := newManager(t)
		r, s := w.published("a", with(m, true))
		other, _, err := newHost().Listen(t.Context(), s.path+".x", func(syscall.Conn) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		if err := s.Close(t.Context(), false); err != nil {
			t.Fatal(err)
		}
		files := append(m.pass(t, "registration-a"), fileOf(t, other))
		if first {
			slices.Reverse(files)
		}
		next := socket(t, r, "a")
		if err := next.Adopt(t.Context(), files); err != nil || look(t, next).Place != status.Ours || m.count("registration-a") != 1 {
			t.Errorf("first %t: %v, %+v, in the store: %d", first, err, next.Look(), m.count("registration-a"))
		}
		mustAnswer(t, next.path, announcement("a").Endpoint)
	}
}

func fileOf(t *testing.T, l Listener) *os.File {
	t.Helper()
	f, err := l.(*net.UnixListener).File()
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestAdoptWhatIsNoListener(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	s := socket(t, w.open(with(m, true)), "a")
	open := map[string]func() *os.File{
		"a file": func() *os.File { f, _ := os.Open("/dev/null"); return f },
		"a closed file": func() *os.File {
			f, _ := os.Open("/dev/null")
			f.Close()
			return f
		},
		"datagrams": func() *os.File {
			c, _ := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: w.root + "/d"})
			defer c.Close()
			f, _ := c.File()
			return f
		},
		"a connection": func() *os.File {
			l := listen(t, w.root+"/l")
			c, _ := net.Dial("unix", w.root+"/l")
			l.Close()
			defer c.Close()
			f, _ := c.(*net.UnixConn).File()
			return f
		},
		"TCP": func() *os.File {
			l, _ := net.Listen("tcp", "127.0.0.1:0")
			defer l.Close()
			f, _ := l.(*net.TCPListener).File()
			return f
		},
	}
	for name, f := range open {
		before := w.log.String()
		if err := s.Adopt(t.Context(), []*os.File{f()}); err != nil || !strings.Contains(w.log.String()[len(before):], "cannot adopt") {
			t.Errorf("%s was adopted", name)
		}
	}
	publish(t, s)
}

// Of two listeners with one name, in any order, the listener that matches the record is kept, also
// in the store.
func TestAdoptTwoOfOneName(t *testing.T) {
	for _, order := range []string{"good first", "good last", "twice the same"} {
		w, m := left(t, "a")
		bad := listen(t, w.root+"/other")
		m.add("registration-a", bad)
		files := m.pass(t, "registration-a")
		switch order {
		case "good last":
			slices.Reverse(files)
		case "twice the same":
			files[1].Close()
			again := m.pass(t, "registration-a")
			again[1].Close()
			files[1] = again[0]
		}
		s := socket(t, w.open(with(m, true)), "a")
		if err := s.Adopt(t.Context(), files); err != nil || w.cannotAdopt() == (order == "twice the same") {
			t.Errorf("%s: %v", order, err)
		}
		if l := look(t, s); !l.Notification.Registered || l.Place != status.Ours {
			t.Errorf("%+v", l)
		}
		if m.count("registration-a") != 1 {
			t.Errorf("%d in the store", m.count("registration-a"))
		}
		mustAnswer(t, s.path, announcement("a").Endpoint)
	}
}

// The queue filled up while nobody accepted: it is emptied, and the record still proves the
// listener.
func TestAdoptWithAFullQueue(t *testing.T) {
	w, m := left(t, "a")
	path := w.dir + "/a-reg.sock"
	var waiting []net.Conn
	defer func() {
		for _, c := range waiting {
			c.Close()
		}
	}()
	for {
		c, err := net.Dial("unix", path)
		if err != nil {
			break
		}
		waiting = append(waiting, c)
	}
	t.Logf("%d connections wait", len(waiting))
	s := socket(t, w.open(with(m, true)), "a")
	if err := s.Adopt(t.Context(), m.pass(t, "registration-a")); err != nil {
		t.Fatal(err)
	}
	// While the queue is full it cannot connect.
	eventually(t, "the kubelet is answered", func() bool {
		k := dialAsKubelet(t, path)
		defer k.cc.Close()
		info, err := k.getInfo(t)
		return err == nil && info.Endpoint == announcement("a").Endpoint
	})
}

func TestALeftoverIsWithdrawn(t *testing.T) {
	for name, c := range map[string]struct {
		root  string
		paths func(*world)
		gone  bool
	}{
		"same root_dir":    {paths: func(*world) {}, gone: true},
		"no record":        {paths: func(w *world) { os.RemoveAll(w.run) }, gone: true},
		"earlier root_dir": {root: "new", paths: func(*world) {}, gone: true},
		"not its path": {paths: func(w *world) {
			os.Remove(w.dir + "/a-reg.sock")
			listen(w.t, w.dir+"/a-reg.sock")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w, m := left(t, "a")
			c.paths(w)
			old := w.dir + "/a-reg.sock"
			w.root = filepath.Join(w.root, c.root)
			r := w.open(with(m, true))
			s := socket(t, r, "a")
			// Its error says what cannot be adopted.
			_ = s.Adopt(t.Context(), m.pass(t, "registration-a"))
			if err := errors.Join(s.Withdraw(t.Context()), s.Close(t.Context(), false)); err != nil {
				t.Fatal(err)
			}
			_, err := os.Lstat(old)
			if gone := errors.Is(err, os.ErrNotExist); gone != c.gone {
				t.Errorf("gone: %t", gone)
			}
			if m.count("registration-a") != 0 {
				t.Error("not forgotten")
			}
		})
	}
}

// The driver is still configured, but root_dir has changed: the old socket is removed.
func TestAdoptAfterRootDirChanged(t *testing.T) {
	w, m := left(t, "a")
	old := w.dir + "/a-reg.sock"
	w.root = filepath.Join(w.root, "new")
	if err := os.Mkdir(w.root, 0o755); err != nil {
		t.Fatal(err)
	}
	s := socket(t, w.open(with(m, true)), "a")
	if err := s.Adopt(t.Context(), m.pass(t, "registration-a")); err != nil || s.Look().Up {
		t.Fatalf("adopted, or %v", err)
	}
	if _, err := os.Lstat(old); err == nil {
		t.Error("the old one is still there")
	}
	publish(t, s)
}

func TestRemoveRecorded(t *testing.T) {
	w, _ := left(t, "a", "b", "c", "d")
	r := w.open()
	os.Remove(pathOf(r, "b"))
	listen(t, pathOf(r, "b")) // somebody else's by now
	rec := recorded(r, "c")
	os.WriteFile(w.root+"/precious", nil, 0o600)
	f, _ := unixsock.Lstat(w.root + "/precious")
	rec.Path, rec.FileID = w.root+"/precious", f.FileID
	if err := r.o.Host.writeJSON(r.recordOf("c"), rec); err != nil {
		t.Fatal(err)
	}
	os.WriteFile(r.recordOf("d"), []byte("{"), 0o600)

	removed, err := removeRecorded(w.run)
	if !slices.Equal(removed, []string{pathOf(r, "a")}) {
		t.Errorf("removed %v", removed)
	}
	if err == nil || !strings.Contains(err.Error(), "c.json") || !strings.Contains(err.Error(), "d.json") {
		t.Errorf("error: %v", err)
	}
	for _, path := range []string{pathOf(r, "b"), w.root + "/precious", pathOf(r, "d")} {
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("removed: %v", err)
		}
	}
	if removed, err := removeRecorded(w.root + "/nothing"); err != nil || removed != nil {
		t.Errorf("no directory: %v %v", removed, err)
	}
}

// A process that is killed between bind and the end of its record leaves one without the file. The
// socket is removed if no process serves it, also while the descriptor store has its listener.
func TestRemoveRecordedOfAKilledPublication(t *testing.T) {
	if os.Getenv(isolatedEnv) != "" {
		if err := unix.Listen(3, 1); err != nil {
			t.Fatal(err)
		}
		return
	}
	w := newWorld(t)
	r := w.open()
	deadSocket(t, pathOf(r, "bound"))
	listen(t, pathOf(r, "live")) // somebody else's
	os.WriteFile(pathOf(r, "file"), nil, 0o600)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	stored := os.NewFile(uintptr(fd), "stored")
	defer stored.Close()
	killed := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	killed.Env, killed.ExtraFiles = append(os.Environ(), isolatedEnv+"=1"), []*os.File{stored}
	err = unix.Bind(fd, &unix.SockaddrUnix{Name: pathOf(r, "listening")})
	if err := errors.Join(err, killed.Run()); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"bound", "live", "file", "listening", "nothing"} {
		if err := r.o.Host.writeJSON(r.recordOf(name), record{Path: pathOf(r, name)}); err != nil {
			t.Fatal(err)
		}
	}
	removed, err := removeRecorded(w.run)
	if want := []string{pathOf(r, "bound"), pathOf(r, "listening")}; err != nil || !slices.Equal(removed, want) {
		t.Errorf("removed %v, %v", removed, err)
	}
	for _, path := range []string{pathOf(r, "live"), pathOf(r, "file")} {
		if isGone(path) {
			t.Errorf("%s is gone", path)
		}
	}
}

// TestRecordsOfAHostileDaemon: records that name a path outside of a plugins_registry, or are not
// regular files, remove nothing and hang nothing.
func TestRecordsOfAHostileDaemon(t *testing.T) {
	w, _ := left(t, "a", "b", "c")
	r := w.open()
	victim := w.root + "/a-reg.sock"
	listen(t, victim)
	rec := recorded(r, "a")
	f, _ := unixsock.Lstat(victim)
	rec.Path, rec.FileID = victim, f.FileID
	if err := r.o.Host.writeJSON(r.recordOf("a"), rec); err != nil {
		t.Fatal(err)
	}
	kept := r.recordOf("b") + ".kept"
	if err := errors.Join(os.Rename(r.recordOf("b"), kept), os.Symlink(kept, r.recordOf("b")),
		os.Remove(r.recordOf("c")), unix.Mkfifo(r.recordOf("c"), 0o600)); err != nil {
		t.Fatal(err)
	}
	removed, err := removeRecorded(w.run)
	if len(removed) != 0 || err == nil {
		t.Errorf("removed %v, %v", removed, err)
	}
	for _, part := range []string{"a.json", "b.json", "c.json"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%v does not name %s", err, part)
		}
	}
	if _, err := os.Lstat(victim); err != nil {
		t.Error(err)
	}
}

// A daemon that has started meanwhile keeps what it created under the same names.
func TestRecordedAndMadeAgain(t *testing.T) {
	w, _ := left(t, "a", "b")
	left, err := Recorded(w.run)
	if err != nil {
		t.Fatal(err)
	}
	os.Rename(w.dir+"/a-reg.sock", w.dir+"/kept") // so that its number is not given again
	w.published("a")
	if removed, err := left.Remove(t.Context()); err != nil || !slices.Equal(removed, []string{w.dir + "/b-reg.sock"}) {
		t.Errorf("removed %v, %v", removed, err)
	}
}

// removeRecorded is what `cleanup --if-stopped` does.
func removeRecorded(runDir string) (removed []string, err error) {
	left, err := Recorded(runDir)
	removed, removeErr := left.Remove(context.Background())
	return removed, errors.Join(err, removeErr)
}

// An earlier process wrote its record under a wall clock that was ahead.
func TestTimesYetToComeAreOfTheAdoption(t *testing.T) {
	w, m := left(t, "a")
	r := w.open(with(m, true))
	rec := recorded(r, "a")
	ahead := time.Now().AddDate(1, 0, 0)
	rec.PublishedAt, rec.GetInfoAt, rec.Notification.At, rec.FirstAcceptedAt = ahead, ahead, ahead, ahead
	if err := r.o.Host.writeJSON(r.recordOf("a"), rec); err != nil {
		t.Fatal(err)
	}
	s := socket(t, r, "a")
	if err := s.Adopt(t.Context(), m.pass(t, "registration-a")); err != nil {
		t.Fatal(err)
	}
	l := look(t, s)
	for name, at := range map[string]time.Time{"published": l.PublishedAt, "asked": l.GetInfoAt, "notified": l.Notification.At, "accepted": l.FirstAcceptedAt} {
		if at.IsZero() || at.After(time.Now()) {
			t.Errorf("%s at %v", name, at)
		}
	}
}

// The kubelet's result is in the record before the kubelet is answered.
func TestWordIsWrittenBeforeTheAnswer(t *testing.T) {
	w := newWorld(t)
	r, s := w.published("a")
	k := dialAsKubelet(t, s.path)
	for i := range 50 {
		ok := i%2 == 0
		k.notify(t, ok, "because")
		if rec := recorded(r, "a"); rec.Notification.Registered != ok {
			t.Fatalf("call %d: record says %+v", i, rec.Notification)
		}
	}
}

// A restarted kubelet confirms again, and then the daemon restarts: the first confirmation still
// shows how long the registration took.
func TestFirstYesIsRemembered(t *testing.T) {
	w, m := left(t, "a")
	r := w.open(with(m, true))
	first := recorded(r, "a").Notification.At.Round(0)
	s := socket(t, r, "a")
	if err := s.Adopt(t.Context(), m.pass(t, "registration-a")); err != nil {
		t.Fatal(err)
	}
	k := dialAsKubelet(t, s.path)
	for _, ok := range []bool{true, false, true} {
		k.notify(t, ok, "because")
		if rec := recorded(r, "a"); first.IsZero() || !rec.FirstAcceptedAt.Round(0).Equal(first) || !rec.Notification.At.After(first) {
			t.Errorf("yes %t: first %v, record %+v", ok, first, rec)
		}
	}
	if l := look(t, s); !l.FirstAcceptedAt.Round(0).Equal(first) {
		t.Errorf("Look: %+v", l)
	}
	// After republishing there is no result yet.
	publish(t, s)
	if rec := recorded(r, "a"); !rec.FirstAcceptedAt.IsZero() {
		t.Errorf("republished: %+v", rec)
	}
}

// The kubelet is answered although the record cannot be written.
func TestRecordCannotBeWritten(t *testing.T) {
	w := newWorld(t)
	if err := os.WriteFile(w.run, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, s := w.published("a")
	dialAsKubelet(t, s.path).notify(t, true, "")
	if !look(t, s).Notification.Registered || !strings.Contains(w.log.String(), "cannot write") {
		t.Errorf("%+v\n%s", look(t, s), w.log)
	}
}

// A record that could not be written while /run was full is written when there is room again, so
// that the next process knows that the kubelet confirmed.
func TestRecordIsWrittenLater(t *testing.T) {
	for _, when := range []string{"looking", "closing", "after another change"} {
		t.Run(when, func(t *testing.T) {
			w := newWorld(t)
			m := newManager(t)
			if err := os.WriteFile(w.run, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			r, s := w.published("a", with(m, true))
			if when == "after another change" {
				publish(t, s)
			}
			dialAsKubelet(t, s.path).notify(t, true, "")
			look(t, s) // writes no record
			os.Remove(w.run)
			if when == "looking" { // as at the next hint, or slow look; then it is killed
				if look(t, s); !recorded(r, "a").Notification.Registered {
					t.Error("not written")
				}
			}
			if err := s.Close(t.Context(), false); err != nil {
				t.Fatal(err)
			}
			next := socket(t, w.open(with(m, true)), "a")
			if err := next.Adopt(t.Context(), m.pass(t, "registration-a")); err != nil {
				t.Fatal(err)
			}
			if l := look(t, next); !sameAnnouncement(l.Announced, announcement("a")) || !l.Notification.Registered {
				t.Errorf("the next process: %+v", l)
			}
		})
	}
}

// A record that could never be written is missing when the process ends.
func TestRecordIsNeverWritten(t *testing.T) {
	w := newWorld(t)
	if err := os.WriteFile(w.run, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	m := newManager(t)
	_, s := w.published("a", with(m, true))
	if err := s.Close(t.Context(), false); err != nil {
		t.Error(err)
	}
	if n := strings.Count(w.log.String(), "level=WARN"); n != 1 || !strings.Contains(w.log.String(), "cannot write the record") {
		t.Errorf("%d warnings:\n%s", n, w.log)
	}
	// The record of a withdrawn socket is no longer written.
	_, s = w.published("b")
	if err := s.Withdraw(t.Context()); err != nil || look(t, s).Up {
		t.Errorf("withdrawn where the record cannot be removed: %v", err)
	}
	os.Remove(w.run)
	look(t, s) // tries again what could not be written
	if _, err := os.Lstat(s.r.recordOf("b")); err == nil {
		t.Error("written for nothing")
	}
}

// A file system reuses the inode number of a removed socket: the new file is not ours.
func TestRemoveRecordedWithAReusedInode(t *testing.T) {
	w, m := left(t, "a")
	path := w.dir + "/a-reg.sock"
	before, err := unixsock.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	m.drop("registration-a") // nothing holds the inode any more
	os.Remove(path)
	listen(t, path)
	after, err := unixsock.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("same number: %t, births known: %t", before.Ino == after.Ino, before.Born != 0)
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_BTIME, &st); err != nil {
		t.Fatal(err)
	}
	if before.Ino == after.Ino && st.Mask&unix.STATX_BTIME == 0 {
		return // nothing can tell them apart here
	}
	if removed, err := removeRecorded(w.run); err != nil || removed != nil {
		t.Errorf("%v, %v", removed, err)
	}
}
