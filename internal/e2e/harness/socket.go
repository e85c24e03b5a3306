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

// Accepts reports whether somebody listens at the path.
func Accepts(path string) bool {
	c, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return false
	}
	c.Close()
	return true
}

// WhenAccepts dials until the path accepts and tells when it first did. It looks every
// 200 µs, which is fine for a second or two.
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

// listen makes a Unix socket; only Stop of its owner removes the name.
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
