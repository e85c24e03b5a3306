package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	ll "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/sys/worker"
)

// TestConfine runs itself in separate processes, which stay confined until they end: with this
// kernel's Landlock, and with each older version.
func TestConfine(t *testing.T) {
	if dir := os.Getenv("TEST_CONFINE"); dir != "" {
		if abi, err := strconv.Atoi(os.Getenv("TEST_CONFINE_ABI")); err == nil {
			stop, err := pretendABI(abi)
			if err != nil {
				t.Fatal(err)
			}
			defer stop()
		}
		tryConfined(dir)
		return
	}
	abi, err := ll.LandlockGetABIVersion()
	if err != nil {
		t.Skipf("this kernel has Landlock %d: %v", abi, err)
	}
	errata, err := ll.LandlockGetErrata()
	signals := abi >= 6 && err == nil && errata&2 != 0
	checkConfined(t, abi, signals)
	for older := range abi {
		if older > 0 && older != 6 && older != abi { // 6 has what 7 has
			checkConfined(t, older, signals && older >= 6, fmt.Sprintf("TEST_CONFINE_ABI=%d", older))
		}
	}
}

// pretendABI makes the kernel report an older version of Landlock to this process, until stop: a
// filter passes the question to a thread, which answers it.
func pretendABI(abi int) (stop func(), err error) {
	const nr, flags = 0, 32 // in struct seccomp_data
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: nr},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_LANDLOCK_CREATE_RULESET, Jf: 3},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: flags},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.LANDLOCK_CREATE_RULESET_VERSION, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_USER_NOTIF},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return nil, err
	}
	const all = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_TSYNC | unix.SECCOMP_FILTER_FLAG_TSYNC_ESRCH
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, all, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return nil, errno
	}
	ends := make([]int, 2)
	if err := unix.Pipe2(ends, unix.O_CLOEXEC); err != nil {
		return nil, err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			ready := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}, {Fd: int32(ends[0]), Events: unix.POLLIN}}
			if _, err := unix.Poll(ready, -1); err != nil {
				continue // interrupted
			}
			if ready[1].Revents != 0 {
				return
			}
			var question struct {
				id   uint64
				rest [72]byte
			}
			if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(&question))); errno != 0 {
				continue
			}
			answer := struct {
				id           uint64
				value        int64
				error, flags int32
			}{id: question.id, value: int64(abi)}
			unix.Syscall(unix.SYS_IOCTL, fd, unix.SECCOMP_IOCTL_NOTIF_SEND, uintptr(unsafe.Pointer(&answer)))
		}
	}()
	return func() {
		unix.Close(ends[1])
		<-done
		unix.Close(ends[0])
		unix.Close(int(fd))
	}, nil
}

// checkConfined checks what a process can do that is confined by a version of Landlock.
func checkConfined(t *testing.T, abi int, signals bool, environment ...string) {
	t.Helper()
	dir := t.TempDir()
	root, run := filepath.Join(dir, "kubelet"), filepath.Join(dir, "run")
	for _, d := range []string{filepath.Join(root, "plugins_registry"), filepath.Join(run, "state"), filepath.Join(run, "registrations")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(root, "config.yaml"), []byte("kind: KubeletConfiguration\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(root, "empty"), 0o700); err != nil {
		t.Fatal(err)
	}
	abstract, err := net.Listen("unix", abstractSocket(dir))
	if err != nil {
		t.Fatal(err)
	}
	defer abstract.Close()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestConfine$")
	cmd.Env = append(append(os.Environ(), "TEST_CONFINE="+dir), environment...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	got, _, _ := strings.Cut(string(out), "PASS")
	refused := func(ok bool) string {
		if ok {
			return "refused"
		}
		return "done"
	}
	notPermitted := func(ok bool) string {
		if ok {
			return "not permitted"
		}
		return "done"
	}
	want := fmt.Sprintf(`abi %d
a record: done
the state: done
a socket: done
reading: done
root_dir: refused
the kubelet's configuration: refused
truncating it: %[2]s
emptying it: %[2]s
renaming it: refused
removing it: refused
removing a directory: refused
a directory: refused
an empty file: refused
a socket in root_dir: refused
a FIFO: refused
a symbolic link: refused
a character device: refused
a block device: refused
an abstract socket: %[3]s
a signal to another process: %[4]s
a signal to itself: done
`, abi, refused(abi >= 3), notPermitted(abi >= 6), notPermitted(signals))
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// abstractSocket is the address at which another process listens.
func abstractSocket(dir string) string { return "@" + dir }

func tryConfined(dir string) {
	root, run := filepath.Join(dir, "kubelet"), filepath.Join(dir, "run")
	registry := filepath.Join(root, "plugins_registry")
	config := filepath.Join(root, "config.yaml")
	abi, err := Confine(PrepareWritable(run, root)...)
	if err != nil {
		fmt.Println("not confined:", err)
	}
	fmt.Println("abi", abi)
	open := func(path string, flags int) error {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		if err == nil {
			unix.Close(fd)
		}
		return err
	}
	write := func(path string) error { return os.WriteFile(path, nil, 0o600) }
	for _, c := range []struct {
		what string
		err  error
	}{
		{"a record", write(filepath.Join(run, "registrations", "x"))},
		{"the state", write(filepath.Join(run, "state", "x"))},
		{"a socket", errors.Join(write(filepath.Join(registry, "x")), os.Remove(filepath.Join(registry, "x")))},
		{"reading", func() error { _, err := os.ReadFile(config); return err }()},
		{"root_dir", write(filepath.Join(root, "x"))},
		{"the kubelet's configuration", open(config, unix.O_APPEND|unix.O_WRONLY)},
		{"truncating it", unix.Truncate(config, 0)},
		{"emptying it", open(config, unix.O_RDONLY|unix.O_TRUNC)},
		{"renaming it", os.Rename(config, filepath.Join(registry, "config.yaml"))},
		{"removing it", os.Remove(config)},
		{"removing a directory", unix.Rmdir(filepath.Join(root, "empty"))},
		{"a directory", unix.Mkdir(filepath.Join(root, "x"), 0o700)},
		{"an empty file", unix.Mknod(filepath.Join(root, "x"), unix.S_IFREG|0o600, 0)},
		{"a socket in root_dir", unix.Mknod(filepath.Join(root, "x"), unix.S_IFSOCK|0o600, 0)},
		{"a FIFO", unix.Mkfifo(filepath.Join(root, "x"), 0o600)},
		{"a symbolic link", os.Symlink("x", filepath.Join(root, "x"))},
		{"a character device", unix.Mknod(filepath.Join(root, "x"), unix.S_IFCHR|0o600, 0)},
		{"a block device", unix.Mknod(filepath.Join(root, "x"), unix.S_IFBLK|0o600, 0)},
		{"an abstract socket", func() error {
			c, err := net.Dial("unix", abstractSocket(dir))
			if err == nil {
				c.Close()
			}
			return err
		}()},
		{"a signal to another process", unix.Kill(os.Getppid(), 0)},
		{"a signal to itself", unix.Kill(os.Getpid(), 0)},
	} {
		word := "done"
		switch {
		// as Landlock refuses files
		case errors.Is(c.err, unix.EACCES), errors.Is(c.err, unix.EXDEV):
			word = "refused"
		case errors.Is(c.err, unix.EPERM): // and the rest; but so do missing capabilities
			word = "not permitted"
		case c.err != nil:
			word = c.err.Error()
		}
		fmt.Printf("%s: %s\n", c.what, word)
	}
}

// All threads take part in the call, so it would wait for one that waits for a file system.
func TestConfineWaitsForNoFileSystem(t *testing.T) {
	getenv := map[string]string{"NOTIFY_SOCKET": "/x", landlockVariable: "1"}
	options := Options{KeepSockets: true, Getenv: func(name string) string { return getenv[name] }}
	options.Source.Root = t.TempDir()
	pool, answer := worker.NewPool(), make(chan struct{})
	defer close(answer)
	ctx, abandon := context.WithCancel(t.Context())
	abandon()
	_, _ = worker.Do(ctx, pool.Slot("/dead", nil), time.Minute, func() bool { <-answer; return true }, nil)
	var log strings.Builder
	d := &daemon{
		options: options, pool: pool, notifier: systemd.NewNotifier(options.Getenv), handed: &descriptors{},
		log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	defer d.notifier.Close()
	d.confine(t.Context(), t.TempDir())
	if d.landlock != 0 || !strings.Contains(log.String(), "/dead does not answer") {
		t.Errorf("abi %d: %s", d.landlock, log.String())
	}
}
