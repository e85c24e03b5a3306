package kubelet

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"time"

	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

// temporaryPrefix is the prefix of the names that sockets are bound to before they get their own: a
// dot, so that the kubelet ignores them, and eight hexadecimal digits after it. getsockname returns
// this name for the life of the socket, and none is used twice.
const temporaryPrefix = ".csi-reg-"

// temporaryFor is how long a temporary name stays at least. The kubelet examines each name that
// comes, ignores those with a dot, and logs an error for one that is gone already.
const temporaryFor = 5 * time.Second

func temporaryName(dir string) string {
	return filepath.Join(dir, fmt.Sprintf("%s%08x", temporaryPrefix, rand.Uint32()))
}

func isTemporary(name string) bool {
	// The pattern is valid.
	ok, _ := filepath.Match(temporaryPrefix+strings.Repeat("[0-9a-f]", 8), name)
	return ok
}

// temporaryNames has, by path, when a scan saw a temporary name first.
type temporaryNames map[string]time.Time

// young reports whether a name has not been there for temporaryFor yet.
func (names temporaryNames) young() bool {
	for _, since := range names {
		if time.Since(since) < temporaryFor {
			return true
		}
	}
	return false
}

// removeTemporary removes the temporary names that have been in the directory for temporaryFor and
// are not needed: those of published sockets, and those on which nobody listens, which a failed
// publication or a killed process left. It returns all that it saw; before are those of the last
// scan.
func (r *Registry) removeTemporary(ctx context.Context, before temporaryNames) temporaryNames {
	// The slot gives a hint when the file system answers.
	slot := r.o.Pool.Slot(r.dir.path, r.entries.Hint)
	left, err := worker.Do(ctx, slot, checkTime, func() temporaryNames {
		left := r.temporaryNames(before)
		var old []string
		for path, since := range left {
			if time.Since(since) >= temporaryFor && !r.removeIfPublished(path) {
				old = append(old, path)
			}
		}
		// What cannot be removed, or is gone already, is examined again by the next scan.
		_, _ = r.o.Host.RemoveStale(ctx, old)
		return left
	}, nil)
	if err != nil {
		return before
	}
	return left
}

// temporaryNames returns the temporary names in the directory.
func (r *Registry) temporaryNames(before temporaryNames) temporaryNames {
	names := make(temporaryNames)
	entries, _ := r.o.Host.ReadDir(r.dir.path) // after an error there are none to remove
	for _, e := range entries {
		if path := filepath.Join(r.dir.path, e.Name()); isTemporary(e.Name()) {
			names[path] = time.Now()
			if since, ok := before[path]; ok {
				names[path] = since
			}
		}
	}
	return names
}

// removeIfPublished removes a temporary name if its socket is at its path, and reports whether the
// socket is one of ours: else its publication may not have ended.
func (r *Registry) removeIfPublished(path string) (ours bool) {
	f, err := r.o.Host.Lstat(path)
	if err != nil {
		return false
	}
	s := r.socketOf(f.FileID)
	if s == nil {
		return false
	}
	if at, err := r.o.Host.Lstat(s.path); err == nil && at.FileID == f.FileID {
		_, _ = r.o.Host.RemoveFile(path, f.FileID) // after an error the next scan tries again
	}
	return true
}

// socketOf returns our Socket whose listener is bound to a file; nil if there is none.
func (r *Registry) socketOf(id unixsock.FileID) *Socket {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.sockets {
		if p := s.current.Load(); p != nil && p.FileID == id {
			return s
		}
	}
	return nil
}

// removeTemporary removes the temporary name of a listener that was withdrawn or replaced. If that
// fails, the scan removes it.
func (s *Socket) removeTemporary(p *listener) {
	if _, err := s.r.o.Host.RemoveFile(p.Bound, p.FileID); err != nil {
		s.log.Debug("a temporary name is left", "path", p.Bound, "error", err)
	}
}
