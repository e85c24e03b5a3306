package kubelet

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"csi-registrar/internal/unixsock"
)

// A driver with endpoint_link has a symbolic link of ours that the kubelet is told instead of
// the driver's socket. The kubelet resolves it for each call (kubelet v1.36), so pointing it
// elsewhere sends the next call there, and the registration stays as it is.

// pointLink makes the link at path point to target, in one step: a call finds the old or the
// new one. Whatever else is at path is left alone.
func pointLink(path, target string) error {
	switch now, err := os.Readlink(path); {
	case err == nil && now == target:
		return nil
	case err == nil, errors.Is(err, os.ErrNotExist):
	default:
		return notALink(path, err)
	}
	// The kubelet's own mode for its directories.
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return fmt.Errorf("cannot make the directory of the endpoint link: %w", err)
	}
	temporary := filepath.Join(filepath.Dir(path), linkPrefix+rand.Text()[:shortName])
	err := os.Symlink(target, temporary)
	if err == nil {
		if err = os.Rename(temporary, path); err != nil {
			err = errors.Join(err, os.Remove(temporary))
		}
	}
	if err != nil {
		return fmt.Errorf("cannot make the endpoint link: %w%s", err, hint(err))
	}
	return nil
}

// removeLink removes the link at path; something else stays.
func removeLink(path string) error {
	if _, err := os.Readlink(path); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return notALink(path, err)
	}
	return ignoreMissing(os.Remove(path))
}

func notALink(path string, err error) error {
	if f, statErr := unixsock.Lstat(path); statErr == nil && !f.IsLink() {
		return fmt.Errorf("the endpoint link cannot be made: %s is %s: move it away", path, f.Kind())
	}
	return fmt.Errorf("cannot look at the endpoint link: %w", err)
}

// Names in the directory of the links: they are short, for a Unix socket's path has 107 bytes.
const (
	linkPrefix     = ".l"
	recorderPrefix = ".t"
	shortName      = 6 // characters that follow
)

