package regsocket

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/node/pluginreg"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/unixsock"
)

// servedFor is for how long the same process must have been found at the path before the driver
// counts as served by it: node-driver-registrar ends when the kubelet refuses it.
const servedFor = 15 * time.Second

// holder is the process that listens at the path of a registration socket in place of us.
type holder struct {
	pid     int
	started uint64          // when the process started: another one can have its pid; 0: not known
	file    unixsock.FileID // its socket
	since   time.Time       // when it was found first
}

// askHolder asks the process that listens at the path which driver it serves. The result is a
// ConflictError, unless it is a csi-registrar that yields to us: then the path is free now.
func (s *Socket) askHolder(ctx context.Context, a status.Announcement, held *unixsock.InUse) error {
	host := s.r.o.Host
	file, err := host.Lstat(s.path)
	if err != nil {
		return fmt.Errorf("cannot look at the registration socket of another process: %w", err)
	}
	limited, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	info, cred, err := host.GetInfo(limited, s.path)
	ours := err == nil && cred.UID == 0 && info.Type == registerapi.CSIPlugin && info.Name == s.name
	if ours && info.Store == pluginreg.NoStore && s.r.o.KeepSockets {
		if _, err := host.RemoveFile(s.path, file.FileID); err != nil {
			return fmt.Errorf("cannot take the path of the registration socket: %w", err)
		}
		s.log.Info("registration taken over from a csi-registrar that cannot keep its socket", "path", s.path, "pid", cred.PID)
		s.held(holder{}, status.ServedBy{}, false)
		return nil
	}
	now := holder{pid: cred.PID, started: host.StartTime(cred.PID), file: file.FileID, since: time.Now()}
	same := now.started != 0 && now.pid == s.holder.pid && now.started == s.holder.started
	if same {
		now.since = s.holder.since
	}
	var by status.ServedBy
	if asked := time.Now(); ours && same && asked.Sub(now.since) >= servedFor && filepath.Clean(info.Endpoint) == filepath.Clean(a.Endpoint) {
		by = status.ServedBy{PID: cred.PID, Since: now.since, AskedAt: asked}
	}
	yields := !s.r.o.KeepSockets && (ours && info.Store == pluginreg.HasStore ||
		err != nil && s.seen.Yields && file.FileID == s.holder.file) // its process restarts
	s.held(now, by, yields)
	switch {
	case yields:
		return ConflictError(fmt.Sprintf("the csi-registrar that has a descriptor store serves the driver at %s: this one publishes when it is gone", s.path))
	case by.PID != 0:
		return ConflictError(fmt.Sprintf("%s serves the driver to the kubelet, at %s: when it ends (a node-driver-registrar sidecar of the driver?), csi-registrar does", held.Holder, s.path))
	}
	return s.heldBy(held.Holder)
}

// held records who holds the path; the zero holder: nobody.
func (s *Socket) held(h holder, by status.ServedBy, yields bool) {
	s.holder = h
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen.ServedBy, s.seen.Yields = by, yields
}
