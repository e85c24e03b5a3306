package trust

import (
	"errors"
	"os"
	"os/user"
	"slices"
	"strings"
	"syscall"
	"testing"

	"csi-registrar/internal/sys/unixsock"
)

func TestUsers(t *testing.T) {
	us := uint32(os.Geteuid())
	for owner, want := range map[SocketOwner][]uint32{"root": {0, us}, "65533": {stranger, 0, us}, Anybody: nil} {
		if got, err := Users(owner); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %v %v, want %v", owner, got, err, want)
		}
	}
	if _, err := Users("no-such-user"); err == nil {
		t.Error("a user that does not exist is known")
	}
}

func TestNumberOfAnOwnerThatCannotBeLookedUp(t *testing.T) {
	for _, test := range []struct {
		owner  string
		lookup error
		want   string // empty: the number
	}{
		{"csi", user.UnknownUserError("csi"), "no user"},
		{"csi", &os.PathError{Op: "open", Path: "/etc/passwd", Err: syscall.EMFILE}, "LimitNOFILE"},
		{"csi", syscall.EIO, "cannot look up"},
		{"65533", user.UnknownUserError("65533"), ""},
		{"65533", syscall.EMFILE, ""},
		{"4294967296", user.UnknownUserError("4294967296"), "no user"}, // not root
	} {
		uid, err := number(test.owner, nil, test.lookup)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) || err == nil && uid != stranger {
			t.Errorf("%s, %v: %d %v", test.owner, test.lookup, uid, err)
		}
	}
}

// TestListenerOfAnotherUser checks that an error says whom to trust instead.
func TestListenerOfAnotherUser(t *testing.T) {
	us, other := uint32(os.Geteuid()), uint32(stranger)
	for _, test := range []struct {
		owner SocketOwner
		peer  uint32
		ok    bool
	}{{"root", 0, true}, {"root", us, true}, {"root", other, false}, {"65533", other, true}, {"65533", 65532, false}, {Anybody, other, true}} {
		err := test.owner.Listener("/s", unixsock.Cred{PID: 7, UID: test.peer, GID: us})
		e, _ := errors.AsType[*Error](err)
		if (err == nil) != test.ok || !test.ok && (e == nil || e.Path != "/s" || e.Owner != User(test.peer)) {
			t.Errorf("%s, served by %d: %v", test.owner, test.peer, err)
		}
	}
}

// TestPathOfTheDriversSocket checks that an untrusted path is told from a check that failed.
func TestPathOfTheDriversSocket(t *testing.T) {
	dir := tempDir(t)
	must(t, os.Symlink("l", dir+"/l"))
	err := SocketOwner("root").Path(dir + "/l")
	if _, untrusted := errors.AsType[*Error](err); err == nil || untrusted || !strings.HasPrefix(err.Error(), "cannot check") {
		t.Errorf("a loop: %v", err)
	}
	must(t, os.Chmod(dir+"/a", 0o777))
	err = SocketOwner("root").Path(dir + "/a/b/f")
	if e, untrusted := err.(*Error); !untrusted || e.Path != dir+"/a" {
		t.Errorf("an open directory: %v", err)
	}
}
