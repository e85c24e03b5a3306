package driver

import (
	"errors"
	"fmt"
	"slices"

	"csi-registrar/internal/status"
	"csi-registrar/internal/trust"
	"csi-registrar/internal/unixsock"
)

// Trust decides who may stand between us and the driver, as sshd's StrictModes decides it
// for a key file: whoever can replace the socket can be the driver, and the kubelet would
// hand it every volume's secrets. Trusted are root, the owner and our own user.
type Trust struct {
	Owner string // name, number or "any"
}

// untrusted is the finding for an error of Trust. Where nothing can be told the driver is
// Starting: a mismatch would take its registration away.
func untrusted(err error) finding {
	if err == nil {
		return finding{}
	}
	e, distrusted := errors.AsType[*trust.Error](err)
	if !distrusted {
		return finding{status.Starting, err.Error()}
	}
	var fixes string
	if e.Command.Name != "" {
		fixes = fmt.Sprintf(`run "%s", or `, e.Command)
	}
	if e.Owner != "" {
		fixes += fmt.Sprintf("set socket_owner = %q if that user runs the driver, or ", e.Owner)
	}
	return finding{status.Mismatch, fmt.Sprintf(`%v, so another user could pose as the driver: %sset socket_owner = "any" to turn these checks off`, e, fixes)}
}

// Listener checks who called listen() on the socket that was connected to. That is the proof;
// the path is only where we looked.
func (t Trust) Listener(path string, peer unixsock.Cred) error {
	trusted, err := trust.Users(t.Owner)
	if err != nil || trusted == nil || slices.Contains(trusted, peer.UID) {
		return err
	}
	return &trust.Error{Path: path, Owner: trust.User(peer.UID),
		Problem: fmt.Sprintf("is served by a process (pid %d) that runs as %s, not as %s", peer.PID, trust.Who(peer.UID), t.Owner)}
}

// Path checks the socket and every directory and link on the way to it. What speaks against it is a
// *trust.Error; any other error means that it cannot be told.
//
// It blocks for as long as a file system on the way does not answer.
func (t Trust) Path(path string) error {
	trusted, err := trust.Users(t.Owner)
	if err != nil {
		return err
	}
	err = trust.Rule{Owners: trusted}.Check(path)
	if err == nil || errors.As(err, new(*trust.Error)) {
		return err
	}
	return fmt.Errorf("cannot look who owns the way to the driver's socket: %w%s", err, unixsock.Hint(err))
}
