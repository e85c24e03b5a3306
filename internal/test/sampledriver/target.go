package sampledriver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// mountAt makes the target and mounts the volume there, or leaves nothing behind but a note.
func (d *Driver) mountAt(v volume, source, target string, readonly bool) error {
	// Written down first: a driver that is killed between the two forgets no mount.
	if !slices.Contains(v.Targets, target) {
		v.Targets = append(d.mounted(v), target)
		if err := d.update(v); err != nil {
			return internal(err)
		}
	}
	made := true
	if err := os.Mkdir(target, 0o750); errors.Is(err, os.ErrExist) {
		made = false
	} else if err != nil {
		return internal(fmt.Errorf("cannot make %s: %w", target, err))
	}
	if info, err := os.Lstat(target); err != nil || !info.IsDir() {
		return status.Errorf(codes.FailedPrecondition, "%s is there already and is no directory", target)
	}
	err := d.mount.bind(source, target, readonly)
	if err == nil {
		return nil
	}
	if made {
		if removed := syscall.Rmdir(target); removed != nil && !errors.Is(removed, os.ErrNotExist) {
			err = errors.Join(err, removed)
		}
	}
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EACCES) {
		return status.Errorf(codes.PermissionDenied, "cannot mount volume %s at %s: %v: run the driver as root with CAP_SYS_ADMIN", v.ID, target, err)
	}
	return internal(fmt.Errorf("cannot mount volume %s at %s: %w", v.ID, target, err))
}

// unmountAt unmounts the volume there, if it is, and forgets the target.
func (d *Driver) unmountAt(v volume, target string) error {
	// Mounts may be stacked, by a call that was repeated after a crash.
	for d.isMounted(v.ID, target) {
		if err := d.mount.unmount(target); err != nil {
			return internal(fmt.Errorf("cannot unmount %s: %w", target, err))
		}
	}
	if !slices.Contains(v.Targets, target) {
		return nil
	}
	v.Targets = slices.DeleteFunc(slices.Clone(v.Targets), func(t string) bool { return t == target })
	if err := d.update(v); err != nil {
		return internal(err)
	}
	return nil
}

// checkPath refuses a path that must not become a mount point: one that is relative, goes up, lies
// within the driver's own directory, or is not one that a kubelet asks for. Otherwise any caller of
// the driver could mount anywhere, such as over /etc.
func (d *Driver) checkPath(id, field, path string) error {
	switch {
	case id == "":
		return invalid("volume_id is missing")
	case path == "":
		return invalid(field + " is missing")
	case !filepath.IsAbs(path) || slices.Contains(strings.Split(path, "/"), ".."):
		return invalid(field + " must be absolute and without '..'")
	}
	if inside, err := filepath.Rel(d.Data, path); err == nil && filepath.IsLocal(inside) {
		return invalid(field + " lies within the driver's data directory")
	}
	return d.checkKubelets(field, path)
}

// checkKubelets refuses a path that is not below pods or plugins of the kubelet's root directory.
// Links on the way count as what they point to: a pod can make some in its volumes.
func (d *Driver) checkKubelets(field, path string) error {
	parent, err := filepath.EvalSymlinks(filepath.Dir(path))
	if errors.Is(err, os.ErrNotExist) { // nothing is mounted there, and nothing can be
		parent, err = filepath.Dir(path), nil
	}
	if err != nil {
		return internal(fmt.Errorf("cannot look at %s: %w", field, err))
	}
	for _, name := range []string{"pods", "plugins"} {
		dir := filepath.Join(d.RootDir, name)
		dirs := []string{dir}
		if real, err := filepath.EvalSymlinks(dir); err == nil {
			dirs = append(dirs, real)
		}
		for _, dir := range dirs {
			if inside, err := filepath.Rel(dir, parent); err == nil && filepath.IsLocal(inside) {
				return nil
			}
		}
	}
	return invalid(fmt.Sprintf("%s %s is not below pods or plugins of %s, the kubelet's root directory: start the driver with --root-dir if that is another", field, path, d.RootDir))
}
