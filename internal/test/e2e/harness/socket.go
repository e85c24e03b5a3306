package harness

import (
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

func inode(path string) (uint64, error) {
	fi, err := os.Lstat(path)
	if err != nil {
		return 0, err
	}
	return fi.Sys().(*syscall.Stat_t).Ino, nil
}

// Accepts reports whether a process listens at the path.
func Accepts(path string) bool {
	c, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return false
	}
	c.Close()
	return true
}

// WhenAccepts dials every 200 µs until the path accepts, and returns when that was. It is meant for
// waits of a second or two.
func WhenAccepts(path string, limit time.Duration) (time.Time, bool) {
	tick := time.NewTicker(200 * time.Microsecond)
	defer tick.Stop()
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); <-tick.C {
		if _, err := os.Lstat(path); err == nil && Accepts(path) {
			return time.Now(), true
		}
	}
	return time.Time{}, false
}

// listen makes a Unix socket. Only its owner's Stop removes the file.
func listen(path string) (*net.UnixListener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	return l, nil
}
