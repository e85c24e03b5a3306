package trust

import (
	"errors"
	"fmt"
	"slices"

	"csi-registrar/internal/unixsock"
)

// SocketOwner is the user, by name or number, who besides root and our own may own a driver's
// socket and the directories on the way to it, as with sshd's StrictModes: whoever can replace the
// socket can pose as the driver, and the kubelet would send it the secrets of every volume.
type SocketOwner string

// Listener checks which user called listen() on the socket behind a connection. That is the proof:
// the file at the path may have been replaced since.
func (o SocketOwner) Listener(path string, peer unixsock.Cred) error {
	trusted, err := Users(string(o))
	if err != nil || trusted == nil || slices.Contains(trusted, peer.UID) {
		return err
	}
	return &Error{Path: path, Owner: User(peer.UID),
		Problem: fmt.Sprintf("is served by a process (pid %d) that runs as %s, not as %s", peer.PID, Who(peer.UID), o)}
}

// Path checks the socket and every directory and link on the way to it. An *Error says why it is
// not trusted; any other error means that the check failed. It blocks for as long as a file system
// on the way does not answer.
func (o SocketOwner) Path(path string) error {
	trusted, err := Users(string(o))
	if err != nil {
		return err
	}
	err = Rule{Owners: trusted}.Check(path)
	if err == nil || errors.As(err, new(*Error)) {
		return err
	}
	return fmt.Errorf("cannot check who owns the driver's socket and the directories on the way to it: %w%s", err, unixsock.Hint(err))
}
