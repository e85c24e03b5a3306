package kubelet

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"csi-registrar/internal/status"
)

// temporaryPrefix begins the names that sockets are bound under before they get their
// own. A dot, so that the kubelet ignores them; eight hexadecimal digits follow.
const (
	temporaryPrefix = ".csi-reg-"
	temporaryDigits = 8
)

func temporaryName(folder string) string {
	b := make([]byte, temporaryDigits/2)
	rand.Read(b) // never fails
	return filepath.Join(folder, temporaryPrefix+hex.EncodeToString(b))
}

func isTemporary(name string) bool {
	digits, ok := strings.CutPrefix(name, temporaryPrefix)
	_, err := hex.DecodeString(digits)
	return ok && len(digits) == temporaryDigits && err == nil
}

// Sweep removes what a crash or a power cut left behind: dead sockets under the
// configured drivers' names, and our own temporary names that are dead. Nothing else is
// touched, and nothing that somebody listens on. It returns the removed paths. To be
// called before the kubelet starts; it takes 100 ms if there is something, and no time else.
func (r *Registry) Sweep(ctx context.Context, names []string) (removed []string, err error) {
	var paths []string
	for _, name := range names {
		if status.CheckName(name) == nil {
			paths = append(paths, r.PathOf(name))
		}
	}
	var errs []error
	for _, dir := range slices.Compact([]string{r.folder.root, r.folder.path}) {
		if dir == "" {
			continue
		}
		entries, err := os.ReadDir(dir)
		if err := ignoreMissing(err); err != nil {
			errs = append(errs, err)
		}
		for _, e := range entries {
			if isTemporary(e.Name()) {
				paths = append(paths, filepath.Join(dir, e.Name()))
			}
		}
	}
	removed, err = removeDead(ctx, paths)
	return removed, errors.Join(append(errs, err)...)
}
