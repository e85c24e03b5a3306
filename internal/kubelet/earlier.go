package kubelet

import (
	"net"
	"path/filepath"
	"slices"
	"strings"
)

// earlierPaths are the places other than the Socket's own where a kept listener may have
// been published when the root_dir was another: as the record says, and as the temporary
// name says under which it was bound, which a socket keeps for life (getsockname).
func earlierPaths(s *Socket, l *net.UnixListener, rec record) []string {
	var paths []string
	add := func(path string) {
		if path != s.path && !slices.Contains(paths, path) {
			paths = append(paths, path)
		}
	}
	if filepath.IsAbs(rec.Path) && filepath.Base(rec.Path) == s.name+suffix {
		add(filepath.Clean(rec.Path))
	}
	if bound := l.Addr().String(); filepath.IsAbs(bound) && strings.HasPrefix(filepath.Base(bound), temporaryPrefix) {
		dir := filepath.Dir(bound)
		if filepath.Base(dir) != folderName {
			dir = filepath.Join(dir, folderName)
		}
		add(filepath.Join(dir, s.name+suffix))
	}
	return paths
}
