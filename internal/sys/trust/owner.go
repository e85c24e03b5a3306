package trust

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"

	"csi-registrar/internal/sys/unixsock"
)

// SocketOwner is the user, by name or number, who besides root and our own may own a driver's
// socket and the directories on the way to it, as with sshd's StrictModes: a user who can replace
// the socket can pose as the driver, and the kubelet would send it the secrets of every volume.
type SocketOwner string

// Anybody as a SocketOwner stands for every user.
const Anybody SocketOwner = "any"

// ValidOwner describes for people what ParseOwner accepts.
const ValidOwner = `a user's name, a uid such as "1000", or "any"`

// ParseOwner returns an error if s cannot be a SocketOwner.
func ParseOwner(s string) (SocketOwner, error) {
	// The highest uid means "no user" to the system.
	if uid, err := strconv.ParseUint(s, 10, 32); strings.Trim(s, "0123456789") == "" && (err != nil || uid == 1<<32-1) {
		return "", fmt.Errorf("%q is not a uid", s)
	}
	// The static binary only reads /etc/passwd: users from elsewhere must be given by number.
	_, err := Users(SocketOwner(s))
	return SocketOwner(s), err
}

// Users returns the users to trust if owner is trusted besides root and our own user: the owner
// first; nil for Anybody. It looks the owner up each time, because packages create their users at
// any time. An unknown user does not mean that a file is untrusted: the list of users may be
// incomplete while it is being written.
func Users(owner SocketOwner) ([]uint32, error) {
	trusted := []uint32{0, uint32(os.Geteuid())}
	switch owner {
	case Anybody:
		return nil, nil
	case "root":
		return trusted, nil
	}
	u, err := user.Lookup(string(owner))
	uid, err := number(string(owner), u, err)
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
		return 0, fmt.Errorf("there is no user %q on this machine", owner)
	}
	return 0, fmt.Errorf("cannot look up the user %q: %w%s", owner, lookup, unixsock.Hint(lookup))
}

// Listener checks which user called listen() on the socket behind a connection. It must be checked
// in addition to Path, because the file at the path may have been replaced since.
func (o SocketOwner) Listener(path string, peer unixsock.Cred) error {
	trusted, err := Users(o)
	if err != nil {
		return fmt.Errorf("socket_owner: %w", err)
	}
	if trusted == nil || slices.Contains(trusted, peer.UID) {
		return nil
	}
	return &Error{Path: path, Owner: User(peer.UID),
		Problem: fmt.Sprintf("is served by a process (pid %d) that runs as %s, not as %s", peer.PID, Who(peer.UID), o)}
}

// Path checks the socket and every directory and link on the way to it. An *Error describes why it
// is not trusted; any other error means that the check failed. It blocks for as long as a file
// system on the way does not answer.
func (o SocketOwner) Path(path string) error {
	trusted, err := Users(o)
	if err != nil {
		return fmt.Errorf("socket_owner: %w", err)
	}
	err = Rule{Owners: trusted}.Check(path)
	if err == nil || errors.As(err, new(*Error)) {
		return err
	}
	return fmt.Errorf("cannot check who owns the driver's socket and the directories on the way to it: %w%s", err, unixsock.Hint(err))
}
