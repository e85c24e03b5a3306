package built

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"
)

// Cached returns a directory that build has filled. It is kept in the user's cache directory, one
// for each version of Go and each key. The name is for people. Several processes may call Cached at
// once.
func Cached(name string, key []byte, build func(dir string) error) (dir string, err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(fmt.Append(nil, runtime.Version(), runtime.GOARCH, string(key)))
	dir = filepath.Join(cache, "csi-registrar", "programs", fmt.Sprintf("%s-%x", name, sum[:6]))
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", err
	}
	lock, err := os.Create(filepath.Join(filepath.Dir(dir), "."+filepath.Base(dir)+".lock"))
	if err != nil {
		return "", err
	}
	defer lock.Close() // releases the lock
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", err
	}
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	draft := dir + ".new"
	if err := os.RemoveAll(draft); err != nil {
		return "", err
	}
	if err := os.Mkdir(draft, 0o755); err != nil {
		return "", err
	}
	if err := build(draft); err != nil {
		return "", err
	}
	return dir, os.Rename(draft, dir)
}
