package trust

import (
	"os"
	"os/user"
	"slices"
	"strings"
	"syscall"
	"testing"
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
	} {
		uid, err := number(test.owner, nil, test.lookup)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) || err == nil && uid != stranger {
			t.Errorf("%s, %v: %d %v", test.owner, test.lookup, uid, err)
		}
	}
}
