package daemon

import (
	"context"
	"fmt"

	"csi-registrar/internal/kubelet"
	"csi-registrar/internal/status"
	"csi-registrar/internal/volumes"
)

// inUse says why a driver whose table disappeared is not withdrawn yet; empty: it can be.
// Without the registration the kubelet could not unmount its volumes. A driver that does not
// answer cannot do that either.
func (r *configReloader) inUse(ctx context.Context, rootDir, name string) string {
	const until = "its table disappeared from the configuration; it is withdrawn when "
	if d, _ := r.agent.Status().Driver(name); d.Driver != status.Ready {
		return ""
	}
	all, err := volumes.Count(ctx, r.pool, rootDir)
	n := all[name]
	switch {
	case err != nil:
		return until + "it is known that none of its volumes are in use: " + err.Error()
	case n == status.Volumes{}:
		return ""
	}
	return fmt.Sprintf(until+"its volumes are no longer in use (%d published, %d staged), or by csi-registrar reload", n.Published, n.Staged)
}

// volumeSocket is a registration socket that warns if it is withdrawn while volumes are in use:
// because the driver was disabled, is another one, or is gone, or by a reload.
type volumeSocket struct {
	*kubelet.Socket
	parts         *parts
	rootDir, name string
}

// Withdraw implements registrar.Socket.
func (s volumeSocket) Withdraw(ctx context.Context) error {
	all, err := volumes.Count(ctx, s.parts.pool, s.rootDir)
	if err != nil {
		s.parts.log.Warn("withdrawing a driver without knowing its volumes", "driver", s.name, "error", err)
	} else if n := all[s.name]; n != (status.Volumes{}) {
		s.parts.log.Warn("withdrawing a driver whose volumes are in use: the kubelet cannot unmount them until it is registered again",
			"driver", s.name, "published", n.Published, "staged", n.Staged)
	}
	return s.Socket.Withdraw(ctx)
}
