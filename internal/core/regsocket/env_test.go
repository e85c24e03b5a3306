package regsocket

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/test/fake"
)

// isolatedEnv marks a process in which a test runs again alone: it may mount and run out of
// descriptors.
const isolatedEnv = "KUBELET_TEST_ISOLATED"

func TestFileSystems(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount in a namespace of its own")
	}
	t.Parallel()
	for name, test := range map[string]func(*testing.T){
		"no space":                  noSpace,
		"read-only":                 readOnly,
		"read-only, closed":         readOnlyClosed,
		"read-only root_dir":        readOnlyRootDir,
		"another file system":       otherFileSystem,
		"another file system, full": otherFileSystemFull,
		"another mount":             otherMount,
		"mounted over":              mountedOver,
		"an overlay":                overlay,
	} {
		t.Run(name, func(t *testing.T) {
			if !isolate(t, &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}) {
				return
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				t.Fatal(err)
			}
			test(t)
		})
	}
}

func TestOutOfDescriptors(t *testing.T) {
	if isolate(t, nil) {
		registryOutOfDescriptors(t)
	}
}

// isolate runs the test again in a process of its own, beside other such tests, and reports
// whether this is that process.
func isolate(t *testing.T, attr *syscall.SysProcAttr) bool {
	t.Helper()
	if os.Getenv(isolatedEnv) != "" {
		return true
	}
	t.Parallel()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	run := "^" + strings.ReplaceAll(t.Name(), "/", "$/^") + "$"
	cmd := exec.Command(exe, "-test.run="+run, "-test.v", "-test.timeout=60s")
	cmd.Env = append(os.Environ(), isolatedEnv+"=1")
	cmd.SysProcAttr = attr
	out, err := cmd.CombinedOutput()
	if errors.Is(err, fs.ErrPermission) {
		t.Skip("may not make a mount namespace here")
	}
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
	return false
}

func mount(t *testing.T, on, options string) {
	t.Helper()
	if err := unix.Mount("tmpfs", on, "tmpfs", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unmount(t, on) })
}

// unmount unmounts a file system even if it is busy.
func unmount(t *testing.T, on string) {
	t.Helper()
	if err := unix.Unmount(on, unix.MNT_DETACH); err != nil && err != unix.EINVAL {
		t.Error(err)
	}
}

// wantError checks that publishing fails with a helpful error.
func wantError(t *testing.T, s *Socket, want ...string) {
	t.Helper()
	err := s.Publish(t.Context(), announcement("a"))
	if err == nil || isConflict(err) {
		t.Fatalf("error is %v", err)
	}
	for _, part := range want {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error is %v, want %q in it", err, part)
		}
	}
}

func noSpace(t *testing.T) {
	w := newWorld(t)
	mount(t, w.root, "size=64k,nr_inodes=4") // root, plugins_registry, and two more
	os.Mkdir(w.dir, 0o750)
	os.WriteFile(w.root+"/1", nil, 0o600)
	os.WriteFile(w.root+"/2", nil, 0o600)
	s := socket(t, w.open(func(o *Options) { o.RunDir = "" }), "a")
	wantError(t, s, "no space left on device; free space or inodes of that file system")
	os.Remove(w.root + "/1")
	publish(t, s)
	publish(t, s) // with the inode of the old one
	wantPlace(t, s, status.Ours)
	mustAnswer(t, s.path, announcement("a").Endpoint)
	s.Close(t.Context(), false)
}

func readOnly(t *testing.T) {
	w := newWorld(t)
	mount(t, w.root, "")
	os.Mkdir(w.dir, 0o750)
	s := socket(t, w.open(func(o *Options) { o.RunDir = "" }), "a")
	publish(t, s)
	remount(t, w.root, unix.MS_RDONLY)
	wantError(t, s, "read-only", "ReadWritePaths")
	mustAnswer(t, s.path, announcement("a").Endpoint)
	if err := s.Withdraw(t.Context()); err == nil {
		t.Error("withdrawn from a read-only file system")
	}
	if l := look(t, s); !l.Up || l.Place != status.Ours {
		t.Errorf("a failed Withdraw can be tried again, but: %+v", l)
	}
	remount(t, w.root, 0)
	if err := s.Withdraw(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantPlace(t, s, status.Missing)
}

func remount(t *testing.T, on string, flags uintptr) {
	t.Helper()
	if err := unix.Mount("", on, "", unix.MS_REMOUNT|flags, ""); err != nil {
		t.Fatal(err)
	}
}

// A socket that could not be withdrawn stays when its Socket is closed, and blocks neither the next
// Socket nor the next process.
func readOnlyClosed(t *testing.T) {
	for _, keep := range []bool{true, false} {
		w := newWorld(t)
		w.run = fake.ShortDir(t)
		mount(t, w.root, "")
		os.Mkdir(w.dir, 0o750)
		m := newManager(t)
		r := w.open(with(m, keep))
		s := socket(t, r, "a")
		publish(t, s)
		remount(t, w.root, unix.MS_RDONLY)
		if err := s.Withdraw(t.Context()); err == nil {
			t.Fatal("withdrawn")
		}
		if err := s.Close(t.Context(), false); (err == nil) != keep {
			t.Errorf("keep %t: %v", keep, err)
		}
		if keep {
			s = socket(t, w.open(with(m, keep)), "a")
			if err := s.Adopt(t.Context(), m.pass(t, "registration-a")); err != nil {
				t.Error(err)
			}
		} else {
			s = socket(t, r, "a")
		}
		if err := s.Publish(t.Context(), announcement("a")); err == nil || isConflict(err) {
			t.Errorf("while it is read-only: %v", err)
		}
		remount(t, w.root, 0)
		publish(t, s)
		mustAnswer(t, s.path, announcement("a").Endpoint)
		if n := m.count("registration-a"); n != 1 {
			t.Errorf("keep %t: %d in the store", keep, n)
		}
		if err := errors.Join(s.Withdraw(t.Context()), s.Close(t.Context(), false)); err != nil {
			t.Error(err)
		}
		unmount(t, w.root)
	}
}

// plugins_registry is a mount point.
func otherFileSystem(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	mount(t, w.dir, "")
	s := socket(t, w.open(with(m, true)), "a")
	for range 2 {
		publish(t, s)
		wantPlace(t, s, status.Ours)
		mustAnswer(t, s.path, announcement("a").Endpoint)
		if n := m.count("registration-a"); n != 1 {
			t.Errorf("%d in the store", n)
		}
	}
}

// plugins_registry is a mount point without a free inode: the new socket gets that of the old one.
func otherFileSystemFull(t *testing.T) {
	w := newWorld(t)
	m := newManager(t)
	mount(t, w.dir, "size=64k,nr_inodes=3") // the directory, and two more
	s := socket(t, w.open(with(m, true)), "a")
	publish(t, s)
	if err := os.WriteFile(w.dir+"/hog", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(w.dir+"/another", nil, 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("there is an inode left: %v", err)
	}
	publish(t, s)
	if l := look(t, s); l.Place != status.Ours || m.count("registration-a") != 1 {
		t.Errorf("%+v, in the store: %d", l, m.count("registration-a"))
	}
	mustAnswer(t, s.path, announcement("a").Endpoint)

	// Somebody else gets the inode.
	if err := s.Withdraw(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The server may not have closed its end of the connection yet, which holds the inode.
	eventually(t, "a free inode", func() bool { return os.WriteFile(w.dir+"/another", nil, 0o600) == nil })
	wantError(t, s, "no space left on device; free space or inodes of that file system")
	if l := look(t, s); l.Up || m.count("registration-a") != 0 || !isGone(s.r.recordOf("a")) {
		t.Errorf("%+v, in the store: %d", l, m.count("registration-a"))
	}
	os.Remove(w.dir + "/hog")
	publish(t, s)
}

// A plugins_registry in the lower layer of an overlay is copied up when the first socket is made in
// it. It stays the directory that the kubelet watches.
func overlay(t *testing.T) {
	w := newWorld(t)
	layers := fake.ShortDir(t)
	mount(t, layers, "")
	for _, dir := range []string{"lower/plugins_registry", "upper", "work"} {
		if err := os.MkdirAll(layers+"/"+dir, 0o750); err != nil {
			t.Fatal(err)
		}
	}
	options := "lowerdir=" + layers + "/lower,upperdir=" + layers + "/upper,workdir=" + layers + "/work"
	if err := unix.Mount("overlay", w.root, "overlay", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unmount(t, w.root) })
	s := socket(t, w.open(), "a")
	before, err := unixsock.Stat(w.dir)
	if err != nil {
		t.Fatal(err)
	}
	look(t, s)
	time.Sleep(2 * tick) // until the copy has another time
	publish(t, s)
	if after, err := unixsock.Stat(w.dir); err != nil || after.FileID != before.FileID {
		t.Errorf("the directory was %+v, is %+v, %v", before.FileID, after.FileID, err)
	}
	if l := look(t, s); l.DirRecreated || l.Place != status.Ours {
		t.Errorf("%+v", l)
	}
}

// A bind mount has the device of its root_dir, but nothing can be moved into it from there.
func otherMount(t *testing.T) {
	w := newWorld(t)
	if err := unix.Mount(w.dir, w.dir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unmount(t, w.dir) })
	s := socket(t, w.open(), "a")
	publish(t, s)
	mustAnswer(t, s.path, announcement("a").Endpoint)
}

// The root_dir is not writable, but plugins_registry is.
func readOnlyRootDir(t *testing.T) {
	w := newWorld(t)
	mount(t, w.root, "")
	os.Mkdir(w.dir, 0o750)
	mount(t, w.dir, "")
	if err := unix.Mount("", w.root, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	s := socket(t, w.open(func(o *Options) { o.RunDir = "" }), "a")
	publish(t, s)
	mustAnswer(t, s.path, announcement("a").Endpoint)
}

func mountedOver(t *testing.T) {
	w := newWorld(t)
	s := socket(t, w.open(), "a")
	publish(t, s)
	mount(t, w.dir, "")
	if l := look(t, s); l.Place != status.Missing || !l.DirRecreated || !l.Up {
		t.Errorf("mounted over: %+v", l)
	}
	publish(t, s)
	mustAnswer(t, s.path, announcement("a").Endpoint)
	unmount(t, w.dir)
	// Our first socket is there again, and nobody listens.
	wantPlace(t, s, status.Foreign)
	publish(t, s)
	mustAnswer(t, s.path, announcement("a").Endpoint)
}

func registryOutOfDescriptors(t *testing.T) {
	w := newWorld(t)
	_, s := w.published("a")
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	var hogs []int
	hog := func() {
		for {
			fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return
			}
			hogs = append(hogs, fd)
		}
	}
	free := func() {
		for _, fd := range hogs {
			unix.Close(fd)
		}
		hogs = nil
	}
	defer free()
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 100, Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	// A kubelet's connection and a silent one, made while there are descriptors.
	k := dialAsKubelet(t, s.path)
	if _, err := k.getInfo(t); err != nil {
		t.Fatal(err)
	}
	silent, err := net.Dial("unix", s.path)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	eventually(t, "accepted", func() bool { return connectionsOf(s) == 2 })
	late, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(late)
	hog()
	// The connected kubelet is answered although nothing can be written.
	k.notify(t, true, "")
	if err := s.Publish(t.Context(), announcement("a")); err == nil {
		t.Error("published without descriptors")
	}
	if l := look(t, s); l.Place != status.Ours || !l.Notification.Registered {
		t.Errorf("%+v", l)
	}
	// A new connection cannot be accepted, which is logged, and it is answered later.
	if err := unix.Connect(late, &unix.SockaddrUnix{Name: s.path}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is said", func() bool { return strings.Contains(w.log.String(), "cannot accept") })
	time.Sleep(3 * acceptPause)
	if n := strings.Count(w.log.String(), "cannot accept"); n != 1 {
		t.Errorf("said %d times", n)
	}
	free()
	eventually(t, "it is accepted", func() bool { return connectionsOf(s) == 3 })
	publish(t, s)
	mustAnswer(t, s.path, announcement("a").Endpoint)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
}
