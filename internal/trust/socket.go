package trust

import (
	"errors"
	"fmt"
	"slices"

	"csi-registrar/internal/unixsock"
)

// SocketOwner is the user, by name or number, who besides root and our own may stand between us
// and a driver, as sshd's StrictModes decides it for a key file: whoever can replace the socket
// can be the driver, and the kubelet would hand it every volume's secrets.
type SocketOwner string

// Listener checks who called listen() on the socket that was connected to. That is the proof;
// the path is only where we looked.
func (o SocketOwner) Listener(path string, peer unixsock.Cred) error {
	trusted, err := Users(string(o))
	if err != nil || trusted == nil || slices.Contains(trusted, peer.UID) {
		return err
	}
	return &Error{Path: path, Owner: User(peer.UID),
		Problem: fmt.Sprintf("is served by a process (pid %d) that runs as %s, not as %s", peer.PID, Who(peer.UID), o)}
}

// Path checks the socket and every directory and link on the way to it. What speaks against it is a
// *Error; any other error means that it cannot be told.
//
// It blocks for as long as a file system on the way does not answer.
func (o SocketOwner) Path(path string) error {
	trusted, err := Users(string(o))
	if err != nil {
		return err
	}
	err = Rule{Owners: trusted}.Check(path)
	if err == nil || errors.As(err, new(*Error)) {
		return err
	}
	return fmt.Errorf("cannot look who owns the way to the driver's socket: %w%s", err, unixsock.Hint(err))
}
