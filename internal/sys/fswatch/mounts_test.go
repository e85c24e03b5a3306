package fswatch

import (
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/worker"
)

// mayMount reports whether this process has a mount namespace of its own. If not, it runs the test
// in another process, which has.
func mayMount(t *testing.T) bool {
	t.Helper()
	if os.Getenv("FSWATCH_MOUNTS") != "" {
		return true
	}
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), "FSWATCH_MOUNTS=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	if err != nil && strings.Contains(err.Error(), "operation not permitted") {
		t.Skip("no mount namespace: ", err)
	}
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	return false
}

// TestMountsElsewhere: only paths that a mount can change are walked, also through symbolic links.
func TestMountsElsewhere(t *testing.T) {
	if !mayMount(t) {
		return
	}
	dir := tempDir(t)
	for _, d := range []string{"a", "b", "target/deep", "else where"} {
		must(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	must(t, os.Symlink("../target", filepath.Join(dir, "b/link")))
	w := New(slog.New(slog.DiscardHandler), worker.NewPool())
	w.slowLook = time.Hour
	var mu sync.Mutex
	walked := map[string]int{}
	lstat := w.calls.lstat
	w.calls.lstat = func(path string, st *unix.Stat_t) error {
		mu.Lock()
		walked[path]++
		mu.Unlock()
		return lstat(path, st)
	}
	run(t, w)
	inA := subscribe(t, w.Subscribe, filepath.Join(dir, "a/s"))
	defer inA.Close()
	linked := subscribe(t, w.Subscribe, filepath.Join(dir, "b/link/deep/s"))
	defer linked.Close()
	mounted := func(at string, hinted *Subscription) {
		t.Helper()
		must(t, unix.Mount("tmpfs", filepath.Join(dir, at), "tmpfs", 0, ""))
		expectHint(t, hinted, "mounted over "+at)
		calm(hinted)
		unmount(t, filepath.Join(dir, at))
		expectHint(t, hinted, "unmounted "+at)
		calm(hinted)
	}
	mounted("a", inA) // the mounts are known
	mu.Lock()
	before := walked[filepath.Join(dir, "b")]
	mu.Unlock()
	for range 3 {
		must(t, unix.Mount("tmpfs", filepath.Join(dir, "else where"), "tmpfs", 0, ""))
		unmount(t, filepath.Join(dir, "else where"))
		mounted("a", inA)
	}
	mu.Lock()
	after := walked[filepath.Join(dir, "b")]
	mu.Unlock()
	if after != before {
		t.Errorf("another path was walked %d times", after-before)
	}
	for _, at := range []string{"target", "target/deep", "b"} {
		mounted(at, linked)
	}
}

// Mounts are tested in a separate mount namespace, and so in a separate process.
func TestMounts(t *testing.T) {
	if !mayMount(t) {
		return
	}
	w, dir := start(t), tempDir(t)
	for _, d := range []string{"a", "b", "src", "src/x"} {
		must(t, os.Mkdir(filepath.Join(dir, d), 0o755))
	}
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	inA, deepInA, inB := subscribe(t, w.Subscribe, filepath.Join(a, "s")), subscribe(t, w.Subscribe, filepath.Join(a, "x/y/s")), subscribe(t, w.Subscribe, filepath.Join(b, "s"))
	defer inA.Close()
	defer deepInA.Close()
	defer inB.Close()

	t.Cleanup(func() { // if the test failed half-way, or the directory could not be removed
		for _, mounted := range []string{a, filepath.Join(b, "s")} {
			_ = unix.Unmount(mounted, unix.MNT_DETACH)
		}
	})
	time.Sleep(2 * mountPause) // the first look, which the beginning causes, is over
	must(t, unix.Mount("tmpfs", a, "tmpfs", 0, ""))
	begun := time.Now()
	expectHint(t, inA, "tmpfs over its directory")
	t.Logf("hinted %v after the mount", time.Since(begun))
	expectHint(t, deepInA, "tmpfs over its grandparent")
	expectQuiet(t, inB, "a mount elsewhere")

	must(t, os.WriteFile(filepath.Join(a, "s"), nil, 0o600))
	expectHint(t, inA, "made in the mounted directory")
	calm(deepInA)

	// The directory of the mount point has no event for this.
	must(t, os.Chmod(a, 0o711))
	expectHint(t, inA, "mode of the mounted directory")
	calm(deepInA)

	unmount(t, a)
	expectHint(t, inA, "unmounted")
	calm(inA)
	must(t, os.WriteFile(filepath.Join(a, "s"), nil, 0o600))
	expectHint(t, inA, "made in the directory below")
	calm(deepInA)

	must(t, unix.Mount(filepath.Join(dir, "src"), a, "", unix.MS_BIND, ""))
	expectHint(t, inA, "bind mount")
	expectHint(t, deepInA, "bind mount")
	must(t, os.Mkdir(filepath.Join(dir, "src/x/y"), 0o755)) // through the other name
	expectHint(t, deepInA, "made through the source of the bind mount")

	// A mount over a file: the socket itself.
	must(t, os.WriteFile(filepath.Join(b, "s"), nil, 0o600))
	expectHint(t, inB, "made")
	must(t, os.WriteFile(filepath.Join(dir, "other"), nil, 0o600))
	must(t, unix.Mount(filepath.Join(dir, "other"), filepath.Join(b, "s"), "", unix.MS_BIND, ""))
	expectHint(t, inB, "mounted over")
	unmount(t, filepath.Join(b, "s"))
	unmount(t, a)
}

// unmount tries again while the watcher walks a path through the mount, which keeps it busy.
func unmount(t *testing.T, dir string) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		err := unix.Unmount(dir, 0)
		if err == nil {
			return
		}
		if err != unix.EBUSY || time.Now().After(deadline) {
			t.Fatalf("unmounting %s: %v", dir, err)
		}
	}
}

// A real limit of the kernel: user namespaces have their own.
func TestRealLimits(t *testing.T) {
	limit := os.Getenv("FSWATCH_LIMIT")
	if limit == "" {
		for _, limit := range []string{"watches", "instances"} {
			t.Run(limit, func(t *testing.T) {
				cmd := exec.Command(os.Args[0], "-test.run=^TestRealLimits$", "-test.v")
				cmd.Env = append(os.Environ(), "FSWATCH_LIMIT="+limit)
				cmd.SysProcAttr = &syscall.SysProcAttr{
					Cloneflags:  syscall.CLONE_NEWUSER,
					UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
					GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
				}
				out, err := cmd.CombinedOutput()
				if strings.Contains(string(out), "--- SKIP") {
					t.Skipf("%s", out)
				}
				if _, ran := err.(*exec.ExitError); err != nil && !ran {
					t.Skip("no user namespace: ", err)
				}
				if err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
			})
		}
		return
	}
	file := "/proc/sys/user/max_inotify_" + limit
	if err := os.WriteFile(file, []byte("2"), 0); err != nil {
		t.Skip("cannot lower the limit: ", err)
	}
	if limit == "instances" {
		must(t, os.WriteFile(file, []byte("0"), 0))
	}
	dir := tempDir(t)
	w := New(slog.New(slog.DiscardHandler), worker.NewPool())
	w.slowLook, w.pollInterval = time.Hour, 10*time.Millisecond
	run(t, w)
	path := filepath.Join(dir, "a/b/s")
	s := subscribe(t, w.Subscribe, path)
	defer s.Close()
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	must(t, os.WriteFile(path, nil, 0o600))
	waitUntilSeen(t, s, path)
	if got := w.Polling(); !strings.Contains(got, "fs.inotify.max_user_"+limit) {
		t.Errorf("degraded: %q", got)
	}
	must(t, os.WriteFile(file, []byte("100"), 0))
	for deadline := time.Now().Add(soon); w.Polling() != ""; runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatalf("still degraded: %s", w.Polling())
		}
	}
	calm(s)
	must(t, os.Remove(path))
	expectHint(t, s, "told by the kernel")
}
