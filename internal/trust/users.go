package trust

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"strconv"

	"csi-registrar/internal/unixsock"
)

// Anybody stands for every user.
const Anybody = "any"

// Users returns the users to trust if owner, a name or a number, is trusted besides root and our
// own user: the owner first; nil for Anybody. It looks the owner up each time, because packages
// create their users at any time. An unknown user is an error that says nothing about the files:
// the list of users may be incomplete while it is being written.
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

// number returns the number of owner from the result of its lookup.
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
