package kubelet

import (
	"fmt"
)

// ConflictError says that somebody else has the path of a registration socket, or serves the
// same driver from another one; and who that is, for people.
type ConflictError string

func (e ConflictError) Error() string { return string(e) }

// Conflict marks the error for the registrar.
func (e ConflictError) Conflict() bool { return true }

// heldBy is the error for a path of ours that somebody else has.
func (s *Socket) heldBy(holder string) error {
	return ConflictError(fmt.Sprintf("%s is held by %s, which is left alone: stop or move it away (a node-driver-registrar sidecar of the driver?)", s.path, holder))
}
