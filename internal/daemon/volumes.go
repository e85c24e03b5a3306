package daemon

import (
	"context"
	"fmt"

	"csi-registrar/internal/core/regsocket"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/node/volumes"
)

// inUse returns why a driver whose table disappeared is not withdrawn yet; empty: it can be.
// Without the registration the kubelet could not unmount its volumes. A driver that does not answer
// could not unmount them either.
func (r *configReloader) inUse(ctx context.Context, rootDir, name string) string {
	const until = "its table disappeared from the configuration; it is withdrawn when "
	if d, _ := r.agent.Status().Driver(name); d.Driver != status.Ready {
		return ""
	}
	all, err := volumes.Count(ctx, r.pool, rootDir)
	n := all[name]
	switch {
	case err != nil:
		return until + "csi-registrar can see that none of its volumes are in use: " + err.Error()
	case n == status.Volumes{}:
		return ""
	}
	return fmt.Sprintf(until+"its volumes are no longer in use (%d published, %d staged), or by csi-registrar reload", n.Published, n.Staged)
}

// volumeSocket is a registration socket that warns if it is withdrawn while volumes are in use:
// because the driver was disabled, reports another name or is gone, or by a reload.
type volumeSocket struct {
	*kubelet.Socket
	parts         *parts
	rootDir, name string
	warned        string // of a withdrawal that failed since
}

// Withdraw implements registrar.Socket.
func (s *volumeSocket) Withdraw(ctx context.Context) error {
	warning, attrs := "", []any{"driver", s.name}
	all, err := volumes.Count(ctx, s.parts.pool, s.rootDir)
	if n := all[s.name]; err != nil {
		warning, attrs = "withdrawing a driver without knowing its volumes", append(attrs, "error", err)
	} else if n != (status.Volumes{}) {
		warning = "withdrawing a driver whose volumes are in use: the kubelet cannot unmount them until it is registered again"
		attrs = append(attrs, "published", n.Published, "staged", n.Staged)
	}
	if warning != "" && warning != s.warned {
		s.parts.log.Warn(warning, attrs...)
	}
	if err = s.Socket.Withdraw(ctx); err == nil {
		warning = ""
	}
	s.warned = warning
	return err
}

// Close implements agent.Socket.
func (s *volumeSocket) Close(ctx context.Context) error {
	defer s.parts.release(s.rootDir)
	return s.Socket.Close(ctx)
}
