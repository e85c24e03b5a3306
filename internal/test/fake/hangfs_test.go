package fake

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func mount(t *testing.T) (*HangFS, string) {
	t.Helper()
	dir := ShortDir(t)
	h, err := MountHangFS(dir)
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist) {
		if os.Getenv("CI") == "true" {
			t.Fatal("a file system that hangs cannot be had here, and under CI it must: ", err)
		}
		t.Skip("a file system that hangs needs root and FUSE: ", err)
	}
	must(t, err)
	t.Cleanup(func() { must(t, h.Close()) })
	return h, dir
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestHangFSHoldsSocketsDirectoriesAndLinks(t *testing.T) {
	_, dir := mount(t)
	sub, moved, link := filepath.Join(dir, "sub"), filepath.Join(dir, "sub/b.sock"), filepath.Join(dir, "link")
	must(t, os.Mkdir(sub, 0o755))
	must(t, os.Symlink("sub", link))
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(link, "a.sock"), Net: "unix"})
	must(t, err)
	defer listener.Close()
	listener.SetUnlinkOnClose(false)
	must(t, unix.Renameat2(unix.AT_FDCWD, filepath.Join(sub, "a.sock"), unix.AT_FDCWD, moved, unix.RENAME_NOREPLACE))
	must(t, os.Chmod(moved, 0o600))
	must(t, os.Chown(moved, 1, 2))
	var st unix.Stat_t
	must(t, unix.Lstat(moved, &st))
	if st.Mode != unix.S_IFSOCK|0o600 || st.Uid != 1 || st.Gid != 2 || st.Ctim.Sec == 0 {
		t.Errorf("%+v", st)
	}
	c, err := net.Dial("unix", moved)
	must(t, err)
	must(t, c.Close())
	must(t, os.WriteFile(filepath.Join(sub, "file"), nil, 0o644))
	if err := unix.Renameat2(unix.AT_FDCWD, filepath.Join(sub, "file"), unix.AT_FDCWD, moved, unix.RENAME_NOREPLACE); err != unix.EEXIST {
		t.Errorf("rename without replacing: %v", err)
	}
	must(t, unix.Renameat2(unix.AT_FDCWD, filepath.Join(sub, "file"), unix.AT_FDCWD, moved, unix.RENAME_EXCHANGE))
	if err := os.Remove(sub); !errors.Is(err, unix.ENOTEMPTY) {
		t.Errorf("removing a directory that is not empty: %v", err)
	}
	for range 500 {
		f, err := os.CreateTemp(sub, strings.Repeat("long", 20))
		must(t, err)
		must(t, f.Close())
	}
	list, err := os.ReadDir(sub)
	must(t, err)
	if len(list) != 502 {
		t.Errorf("%d entries", len(list))
	}
	must(t, os.RemoveAll(sub))
	list, err = os.ReadDir(dir)
	must(t, err)
	if len(list) != 1 || list[0].Name() != "link" || list[0].Type() != fs.ModeSymlink {
		t.Errorf("left: %v", list)
	}
}

func TestHangFSHangsAndResumes(t *testing.T) {
	h, dir := mount(t)
	must(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o644))
	for range 3 {
		must(t, h.Hang())
		ended := make(chan error, 2)
		for _, path := range []string{dir, filepath.Join(dir, "file")} {
			go func() { _, err := os.Lstat(path); ended <- err }()
		}
		select {
		case err := <-ended:
			t.Fatalf("it does not hang: %v", err)
		case <-time.After(50 * time.Millisecond):
		}
		must(t, h.Resume())
		must(t, <-ended)
		must(t, <-ended)
	}
}

func TestHangFSEndsHangingCallsWhenClosed(t *testing.T) {
	mount(t) // skips where there is no FUSE
	dir := t.TempDir()
	closed, err := MountHangFS(dir)
	must(t, err)
	must(t, closed.Hang())
	ended := make(chan error)
	go func() { _, err := os.Lstat(filepath.Join(dir, "file")); ended <- err }()
	must(t, closed.Close())
	if err := <-ended; !slices.ContainsFunc([]error{unix.ENOTCONN, unix.ECONNABORTED, unix.ENOENT}, func(e error) bool { return errors.Is(err, e) }) {
		t.Errorf("%v", err)
	}
}
