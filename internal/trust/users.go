package trust

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"strconv"

	"csi-registrar/internal/unixsock"
)

// Anybody in place of a user trusts everybody.
const Anybody = "any"

// Users are the users to trust where owner, a name or a number, is trusted beside root and our
// own user: the owner first, nil for Anybody. The owner is looked up each time: packages make
// their users when they like. Also an unknown user is an error that says nothing about the files:
// the list of users may be cut off while it is written.
func Users(owner string) ([]uint32, error) {
	trusted := []uint32{0, uint32(os.Geteuid())}
	switch owner {
	case Anybody:
		return nil, nil
	case "root":
		return trusted, nil
	}
	u, err := user.Lookup(owner)
	uid, err := number(owner, u, err)
	return append([]uint32{uid}, trusted...), err
}

// number takes what looking up the owner gave.
func number(owner string, u *user.User, lookup error) (uint32, error) {
	digits := owner
	if lookup == nil {
		digits = u.Uid
	}
	uid, err := strconv.ParseUint(digits, 10, 32)
	if err == nil {
		return uint32(uid), nil
	}
	if _, none := errors.AsType[user.UnknownUserError](lookup); none {
		return 0, fmt.Errorf("there is no user %q on this machine: fix socket_owner", owner)
	}
	return 0, fmt.Errorf("cannot look up the user %q of socket_owner: %w%s", owner, lookup, unixsock.Hint(lookup))
}
