package unixsock

import (
	"fmt"
	"io/fs"
	"net"
	"os"
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
	poller := &net.OpError{Op: "dial", Net: "unix", Err: unix.ENOSPC}
	bind := &net.OpError{Op: "listen", Net: "unix", Err: os.NewSyscallError("bind", unix.ENOSPC)}
	if got := Hint(poller); got != "; raise the sysctl fs.epoll.max_user_watches" {
		t.Errorf("of the netpoller: %q", got)
	}
	if got := Hint(bind); got != "; free space or inodes of that file system" {
		t.Errorf("of bind: %q", got)
	}
	for _, err := range []error{nil, unix.ECONNREFUSED} {
		if got := Hint(err); got != "" {
			t.Errorf("%v: %q", err, got)
		}
	}
}
