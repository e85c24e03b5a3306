package unixsock

import (
	"fmt"
	"io/fs"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestHint(t *testing.T) {
	for errno, want := range map[syscall.Errno]string{
		unix.EMFILE: "LimitNOFILE=", unix.ENFILE: "fs.file-max", unix.ENOMEM: "memory", unix.ENOBUFS: "memory",
		unix.ENOSPC: "free space or inodes", unix.EDQUOT: "free space", unix.EROFS: "ReadWritePaths=",
	} {
		got := Hint(fmt.Errorf("cannot connect: %w", &fs.PathError{Op: "open", Path: "/x", Err: errno}))
		if !strings.HasPrefix(got, "; ") || !strings.Contains(got, want) {
			t.Errorf("%v: %q", errno, got)
		}
	}
	for _, err := range []error{nil, unix.ECONNREFUSED} {
		if got := Hint(err); got != "" {
			t.Errorf("%v: %q", err, got)
		}
	}
}
