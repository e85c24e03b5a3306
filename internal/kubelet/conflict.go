package kubelet

import (
	"fmt"

	"csi-registrar/internal/unixsock"
)

// ConflictError says that somebody else has the path of a registration socket, or serves the
// same driver from another one.
type ConflictError struct {
	Driver string
	Path   string // what they have
	Holder string // who or what it is, for people
	Same   bool   // they have the very path; else the name
}

func (e *ConflictError) Error() string {
	if !e.Same {
		return fmt.Sprintf("%s is already served to the kubelet at %q by %s: stop that registrar (a node-driver-registrar sidecar of the driver?), or remove the driver here", e.Driver, e.Path, e.Holder)
	}
	return fmt.Sprintf("%s is held by %s, which is left alone: stop or move it away (a node-driver-registrar sidecar of the driver?)", e.Path, e.Holder)
}

// Conflict marks the error for the registrar.
func (e *ConflictError) Conflict() bool { return true }

func process(c unixsock.Cred) string {
	if c.PID == 0 { // of a process namespace that cannot be seen from here
		return fmt.Sprintf("a process of uid %d", c.UID)
	}
	return fmt.Sprintf("process %d (uid %d)", c.PID, c.UID)
}

// heldBy is the error for a path of ours that somebody else has.
func (s *Socket) heldBy(holder string) error {
	return &ConflictError{Driver: s.name, Path: s.path, Holder: holder, Same: true}
}
