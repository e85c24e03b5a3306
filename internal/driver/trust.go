package driver

import (
	"errors"
	"fmt"

	"csi-registrar/internal/status"
	"csi-registrar/internal/trust"
)

// untrusted is the finding for an error of trust.SocketOwner. Where nothing can be told the driver is
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
