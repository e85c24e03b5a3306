package unixsock

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/test/fake"
)

// A socket that is removed between bind and the look at its file was published and is gone: that is
// no failure.
func TestListenRemovedAtOnce(t *testing.T) {
	path := filepath.Join(fake.ShortDir(t), "s")
	made, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	l, f, err := complete(made, path)
	if err != nil || f != (File{}) {
		t.Fatalf("%+v, %v", f, err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// TestListenWhereNoModeCanBeSet runs itself in a separate process with a filter like that of the
// unit, because a filter cannot be lifted.
func TestListenWhereNoModeCanBeSet(t *testing.T) {
	if dir := os.Getenv("TEST_LISTEN"); dir != "" {
		listenFiltered(t, dir)
		return
	}
	dir, err := os.MkdirTemp("", "l") // short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestListenWhereNoModeCanBeSet$")
	cmd.Env = append(os.Environ(), "TEST_LISTEN="+dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	got, _, _ := strings.Cut(string(out), "PASS")
	// Without a umask that closes it, the socket is not left behind.
	const want = "umask 277, nothing refused: mode 600, <nil>\numask 077: mode 700, <nil>, left: 1\numask 022: a mode that cannot be set, left: 0\n"
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func listenFiltered(t *testing.T, dir string) {
	unix.Umask(0o277) // the owner, too, could not write
	path := filepath.Join(dir, "umask")
	l, _, err := Listen(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	f, err := Lstat(path)
	fmt.Printf("umask 277, nothing refused: mode %o, %v\n", f.Mode&0o777, err)
	refuse(t, unix.SYS_FCHMOD, unix.SYS_FCHMODAT, unix.SYS_FCHMODAT2)
	for _, umask := range []int{0o077, 0o022} {
		unix.Umask(umask)
		path := filepath.Join(dir, "s")
		l, f, err := Listen(t.Context(), path, nil)
		found, _ := filepath.Glob(path)
		if errors.Is(err, unix.EPERM) {
			fmt.Printf("umask %03o: a mode that cannot be set, left: %d\n", umask, len(found))
			continue
		}
		fmt.Printf("umask %03o: mode %o, %v, left: %d\n", umask, f.Mode&0o777, err, len(found))
		if err := errors.Join(l.Close(), os.Remove(path)); err != nil {
			t.Fatal(err)
		}
	}
}

// refuse makes system calls of this process fail with EPERM.
func refuse(t *testing.T, calls ...uint32) {
	t.Helper()
	filter := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}} // the number
	for _, nr := range calls {
		filter = append(filter, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: nr},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)})
	}
	filter = append(filter, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW})
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program))); errno != 0 {
		t.Fatal(errno)
	}
}
