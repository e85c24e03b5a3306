package regsocket

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/unixsock"
)

// A file at the path stays as it is, and the error names it.
func TestNothingIsReplaced(t *testing.T) {
	cases := []struct {
		name   string
		put    func(t *testing.T, path string)
		holder string
	}{
		{"file", func(t *testing.T, path string) { os.WriteFile(path, []byte("x"), 0o644) }, "a regular file"},
		{"directory", func(t *testing.T, path string) { os.Mkdir(path, 0o755) }, "a directory"},
		{"link to nothing", func(t *testing.T, path string) { os.Symlink("/nonexistent", path) }, "a symbolic link"},
		{"link to a dead socket", func(t *testing.T, path string) {
			deadSocket(t, path+".target")
			os.Symlink(path+".target", path)
		}, "a symbolic link"},
		{"pipe", func(t *testing.T, path string) { unix.Mkfifo(path, 0o600) }, "a special file"},
		{"live socket", func(t *testing.T, path string) { listen(t, path) }, fmt.Sprintf("process %d (uid %d)", os.Getpid(), os.Geteuid())},
		{"live socket of datagrams", func(t *testing.T, path string) {
			c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: path})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
		}, "cannot be probed"},
		{"live socket with a full queue", func(t *testing.T, path string) { fullQueue(t, path) }, "process"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			s := socket(t, w.open(), "a")
			c.put(t, s.path)
			before, err := unixsock.Lstat(s.path)
			if err != nil {
				t.Fatal(err)
			}
			wantPlace(t, s, status.Foreign)
			wantConflict(t, s.Publish(t.Context(), announcement("a")), c.holder)
			if after, err := unixsock.Lstat(s.path); err != nil || after != before {
				t.Errorf("touched: %+v, %v", after, err)
			}
			// Once it is gone, publishing succeeds.
			os.Remove(s.path)
			publish(t, s)
			mustAnswer(t, s.path, announcement("a").Endpoint)
		})
	}
}

// fullQueue makes a socket that listens and answers EAGAIN.
func fullQueue(t *testing.T, path string) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
}

func TestADeadSocketIsTakenOver(t *testing.T) {
	w := newWorld(t)
	s := socket(t, w.open(), "a")
	begin := time.Now()
	deadSocket(t, s.path)
	publish(t, s)
	if d := time.Since(begin); d < staleFor-tick {
		t.Errorf("it was only %v old", d)
	}
	mustAnswer(t, s.path, announcement("a").Endpoint)
}

// staleFor is the age of a stale socket (unixsock); file systems count in ticks.
const (
	staleFor = 250 * time.Millisecond
	tick     = 10 * time.Millisecond
)

// Of two daemons that publish at the same time one gets the path, and the other reports that when
// it tries again.
func TestTwoDaemonsAtOnce(t *testing.T) {
	for range 20 {
		w := newWorld(t)
		r1, r2 := w.open(), w.open(func(o *Options) { o.RunDir = w.root + "/run2" })
		s1, s2 := socket(t, r1, "a"), socket(t, r2, "a")
		errs := map[*Socket]error{}
		var mu sync.Mutex
		var publications sync.WaitGroup
		for _, s := range []*Socket{s1, s2} {
			publications.Go(func() {
				err := s.Publish(t.Context(), announcement("a"))
				mu.Lock()
				defer mu.Unlock()
				errs[s] = err
			})
		}
		publications.Wait()
		loser := s1
		if errs[s1] == nil {
			loser = s2
		}
		if (errs[s1] == nil) == (errs[s2] == nil) {
			t.Fatalf("%v and %v", errs[s1], errs[s2])
		}
		wantConflict(t, loser.Publish(t.Context(), announcement("a")), "is held by process")
		mustAnswer(t, s1.path, announcement("a").Endpoint)
	}
}

// The mode is never more than 0600, whatever the umask, and exactly that in the end.
func TestModeFromTheFirstMoment(t *testing.T) {
	w := newWorld(t)
	s := socket(t, w.open(), "a")
	for _, mask := range []int{0, 0o777, 0o022} {
		old := syscall.Umask(mask)
		t.Cleanup(func() { syscall.Umask(old) })
		for range 30 {
			stop := make(chan struct{})
			result := make(chan error, 1)
			go func() { result <- watchMode(s.path, stop) }()
			publish(t, s)
			close(stop)
			if err := <-result; err != nil {
				t.Fatalf("umask %03o: %v", mask, err)
			}
			if err := s.Withdraw(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		syscall.Umask(old)
	}
}

// watchMode looks at a path as fast as it can, and complains about a wrong mode.
func watchMode(path string, stop chan struct{}) error {
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		if f, err := unixsock.Lstat(path); err == nil && f.Mode&0o777&^0o600 != 0 {
			return fmt.Errorf("%s has mode %03o", path, f.Mode&0o777)
		}
	}
}

// The kubelet sees one name, created and deleted.
func TestWhatInotifySees(t *testing.T) {
	w := newWorld(t)
	s := socket(t, w.open(), "a")
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.InotifyAddWatch(fd, w.dir, unix.IN_ALL_EVENTS&^(unix.IN_OPEN|unix.IN_ACCESS|unix.IN_CLOSE)); err != nil {
		t.Fatal(err)
	}
	publish(t, s)
	publish(t, s)
	if err := s.Withdraw(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []string{"created a-reg.sock", "deleted a-reg.sock", "created a-reg.sock", "deleted a-reg.sock"}
	if got := readEvents(t, fd); !slices.Equal(got, want) {
		t.Errorf("seen: %q", got)
	}
}

func readEvents(t *testing.T, fd int) []string {
	t.Helper()
	buf := make([]byte, 64<<10)
	n, err := unix.Read(fd, buf)
	if err != nil {
		t.Fatal(err)
	}
	var events []string
	for b := buf[:n]; len(b) > 0; {
		mask := uint32(b[4]) | uint32(b[5])<<8 | uint32(b[6])<<16 | uint32(b[7])<<24
		size := int(b[12])
		name := strings.TrimRight(string(b[16:16+size]), "\x00")
		b = b[16+size:]
		word := fmt.Sprintf("%#x", mask)
		switch mask & unix.IN_ALL_EVENTS {
		case unix.IN_MOVED_TO:
			word = "moved in"
		case unix.IN_CREATE:
			word = "created"
		case unix.IN_DELETE:
			word = "deleted"
		}
		events = append(events, word+" "+name)
	}
	return events
}

func TestTheDirectory(t *testing.T) {
	w := newWorld(t)
	old := syscall.Umask(0o027) // the kubelet's mode passes it
	t.Cleanup(func() { syscall.Umask(old) })
	if err := os.Remove(w.dir); err != nil {
		t.Fatal(err)
	}
	_, s := w.published("a")
	if info, err := os.Stat(w.dir); err != nil || info.Mode().Perm() != 0o750 {
		t.Fatalf("made: %v %v", info, err)
	}
	if look(t, s).DirRecreated {
		t.Error("it was made before any kubelet saw another")
	}

	// Somebody has removed and recreated it: the kubelet's watch is dead.
	os.RemoveAll(w.dir)
	wantPlace(t, s, status.Missing)
	keepInode := mkdirElsewhere(t, w.dir)
	if l := look(t, s); !l.DirRecreated || l.Place != status.Missing || !l.Up {
		t.Errorf("wiped: %+v", l)
	}
	publish(t, s)
	if l := look(t, s); !l.DirRecreated || l.Place != status.Ours {
		t.Errorf("published in it: %+v", l)
	}
	os.RemoveAll(keepInode)
	stat := s.r.o.Host.Stat
	s.r.o.Host.Stat = func(string) (unixsock.File, error) { return unixsock.File{}, syscall.EIO }
	if l := look(t, s); !l.DirRecreated || l.Place != status.Ours {
		t.Errorf("one call fails: %+v", l)
	}
	s.r.o.Host.Stat = stat
	// A kubelet that finds the socket watches the new directory.
	mustAnswer(t, s.path, announcement("a").Endpoint)
	if look(t, s).DirRecreated {
		t.Error("a kubelet watches it now")
	}

	// Moved away, and recreated by us.
	if err := os.Rename(w.dir, w.dir+".old"); err != nil {
		t.Fatal(err)
	}
	wantPlace(t, s, status.Missing)
	publish(t, s)
	if l := look(t, s); !l.DirRecreated || l.Place != status.Ours {
		t.Errorf("moved: %+v", l)
	}
	if _, err := os.Lstat(filepath.Join(w.dir+".old", "a-reg.sock")); err != nil {
		t.Errorf("what was moved is not at our path, so not ours to remove: %v", err)
	}
	os.RemoveAll(w.dir + ".old")
}

// mkdirElsewhere recreates dir with another inode.
func mkdirElsewhere(t *testing.T, dir string) (other string) {
	t.Helper()
	other = dir + ".x" // takes the free inode, if one is given away again
	if err := errors.Join(os.Mkdir(other, 0o750), os.Mkdir(dir, 0o750)); err != nil {
		t.Fatal(err)
	}
	return other
}

func TestTheDirectoryIsNotUsable(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(w *world)
		want string
	}{
		{"no root_dir", func(w *world) { os.RemoveAll(w.root) }, "root_dir"},
		{"a file", func(w *world) { os.Remove(w.dir); os.WriteFile(w.dir, nil, 0o600) }, "not a directory"},
		{"a loop", func(w *world) { os.Remove(w.dir); os.Symlink(w.dir, w.dir) }, "symbolic links"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			s := socket(t, w.open(), "a")
			c.do(w)
			err := s.Publish(t.Context(), announcement("a"))
			if err == nil || !strings.Contains(err.Error(), c.want) || isConflict(err) {
				t.Errorf("%v", err)
			}
			os.RemoveAll(w.dir)
			if err := os.MkdirAll(w.root, 0o755); err != nil {
				t.Fatal(err)
			}
			publish(t, s)
			mustAnswer(t, s.path, announcement("a").Endpoint)
		})
	}
}

// node-driver-registrar's --plugin-registration-path: a directory of any name.
func TestADirectoryOfAnotherName(t *testing.T) {
	w := newWorld(t)
	dir := filepath.Join(w.root, "registration")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	r := w.open(func(o *Options) { o.Dir = dir })
	s := socket(t, r, "a")
	publish(t, s)
	if s.path != dir+"/a-reg.sock" || r.dir.path != dir {
		t.Errorf("path %s", s.path)
	}
	mustAnswer(t, s.path, announcement("a").Endpoint)
	os.RemoveAll(dir)
	if err := s.Publish(t.Context(), announcement("a")); err == nil {
		t.Error("it was made")
	}
}

// After a failed replacement the old socket is still published.
func TestAFailedReplacementKeepsTheOld(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	r, s := w.published("a", with(m, true))
	dialAsKubelet(t, s.path).notify(t, true, "")
	serveSidecar(t, w.dir+"/z.sock", "CSIPlugin", "a")
	forgetSurvey(r)
	wantConflict(t, s.Publish(t.Context(), announcement("a")), "/z.sock")
	if l := look(t, s); l.Place != status.Ours || !l.Notification.Registered {
		t.Errorf("%+v", l)
	}
	if rec := recorded(s.r, "a"); !rec.Notification.Registered {
		t.Errorf("record %+v", rec)
	}
	if m.count("registration-a") != 1 {
		t.Error("no longer in the store")
	}
}

// A socket that was renamed in the directory is seen by the kubelet under its new name. It is not
// another registrar.
func TestMovedOrLinkedWithinTheDirectory(t *testing.T) {
	w := newWorld(t)
	_, s := w.published("a")
	if err := errors.Join(os.Rename(s.path, w.dir+"/b.sock"), os.Symlink(w.dir+"/b.sock", w.dir+"/c.sock")); err != nil {
		t.Fatal(err)
	}
	wantPlace(t, s, status.Missing)
	forgetSurvey(s.r)
	publish(t, s)
	mustAnswer(t, s.path, announcement("a").Endpoint)
	if _, err := os.Lstat(w.dir + "/b.sock"); err == nil {
		t.Error("the kubelet still sees the moved one")
	}
	if _, err := os.Lstat(w.dir + "/c.sock"); err != nil {
		t.Error("the link was not ours to remove")
	}
}

// publishForEver is a daemon that does nothing but publish.
func publishForEver(root string) int {
	o := options()
	o.RunDir = root + "/run"
	r, err := Open(root, o)
	if err != nil {
		return 1
	}
	s, err := r.Socket("a")
	if err != nil {
		return 1
	}
	for {
		if err := s.Publish(context.Background(), announcement("a")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
}

// Whenever the daemon is killed, the next start removes what it left.
func TestKilledWhilePublishing(t *testing.T) {
	w := newWorld(t)
	r := w.open()
	s := socket(t, r, "a")
	for i := range 12 {
		cmd := startChild(t, "publish", w.root)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "it publishes", func() bool { _, err := os.Lstat(s.path); return err == nil })
		time.Sleep(time.Duration(i) * 300 * time.Microsecond)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
		if err := s.Adopt(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		wantPlace(t, s, status.Missing)
		if removed, err := removeRecorded(w.run); err != nil || removed != nil {
			t.Errorf("recorded: %v, %v", removed, err)
		}
	}
	publish(t, s)
}

// stoppingStore is a store during whose calls the daemon is told to stop.
type stoppingStore struct {
	*manager
	stop context.CancelFunc
}

func (s stoppingStore) Keep(ctx context.Context, name string, c syscall.Conn) error {
	s.stop()
	return errors.Join(ctx.Err(), s.manager.Keep(ctx, name, c))
}

func (s stoppingStore) Forget(ctx context.Context, name string) error {
	s.stop()
	return errors.Join(ctx.Err(), s.manager.Forget(ctx, name))
}

// A publication that has begun when the daemon is told to stop is completed, and the next process
// adopts it.
func TestStoppedWhilePublishing(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	ctx, stop := context.WithCancel(t.Context())
	r := w.open(with(stoppingStore{m, stop}, true))
	s := socket(t, r, "foo.example")
	if err := s.Publish(ctx, announcement(s.name)); err != nil || s.Look().NotKept != "" {
		t.Errorf("published: %v, not kept: %v", err, s.Look().NotKept)
	}
	if err := s.Publish(ctx, announcement(s.name)); !errors.Is(err, context.Canceled) {
		t.Errorf("begun after the stop: %v", err)
	}
	if err := s.Close(context.Background(), false); err != nil {
		t.Error(err)
	}
	next := socket(t, w.open(with(m, true)), s.name)
	if err := next.Adopt(t.Context(), m.pass(t, StorePrefix+s.name)); err != nil || !next.Look().Up {
		t.Errorf("the next process: %v", err)
	}
	ctx, stop = context.WithCancel(t.Context())
	next.r.o.Store = stoppingStore{m, stop}
	if err := next.Withdraw(ctx); err != nil || m.count(StorePrefix+s.name) != 0 {
		t.Errorf("withdrawn: %v, in the store: %d", err, m.count(StorePrefix+s.name))
	}
}

// A publication that fails when it binds leaves nothing behind, and one that cannot remove the old
// socket leaves that.
func TestWhatCannotBePutInPlaceLeavesNothing(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	host := newHost()
	listen := host.Listen
	fails := func(ctx context.Context, path string, before func(syscall.Conn) error) (Listener, unixsock.File, error) {
		l, _, err := listen(ctx, path+".x", before)
		return nil, unixsock.File{}, errors.Join(syscall.EIO, err, l.Close(), os.Remove(path+".x"))
	}
	host.Listen = fails
	r := w.open(with(m, true), func(o *Options) { o.Host = host })
	s := socket(t, r, "a")
	wantError(t, s, "input/output error")
	if l := look(t, s); l.Up || m.count("registration-a") != 0 || !isGone(r.recordOf("a")) {
		t.Errorf("%+v, in the store: %d, record gone: %t", l, m.count("registration-a"), isGone(r.recordOf("a")))
	}
	host.Listen = listen
	publish(t, s)
	host.Listen = fails
	wantError(t, s, "input/output error")
	if l := look(t, s); l.Up || l.Place != status.Missing || m.count("registration-a") != 0 || !isGone(r.recordOf("a")) {
		t.Errorf("%+v, in the store: %d, record gone: %t", l, m.count("registration-a"), isGone(r.recordOf("a")))
	}
	host.Listen = listen
	publish(t, s)
	before, err := unixsock.Lstat(s.path)
	if err != nil {
		t.Fatal(err)
	}

	// A socket that cannot be removed stays as it was.
	remove := host.RemoveFile
	host.RemoveFile = func(string, unixsock.FileID) (bool, error) { return false, syscall.EROFS }
	wantError(t, s, "read-only file system")
	if after, err := unixsock.Lstat(s.path); err != nil || after != before || look(t, s).Place != status.Ours || m.count("registration-a") != 1 {
		t.Errorf("the old socket: %+v, %v", after, err)
	}
	mustAnswer(t, s.path, announcement("a").Endpoint)
	host.RemoveFile = remove
}
