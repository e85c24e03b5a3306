package sampledriver

import (
	"errors"
	"fmt"
	"syscall"
)

// mounter is the part of publishing that needs rights.
type mounter interface {
	bind(source, target string, readonly bool) error
	unmount(target string) error
	readonly(target string) bool
}

// bindMount is the real one.
type bindMount struct{}

func (bindMount) bind(source, target string, readonly bool) error {
	if err := syscall.Mount(source, target, "", syscall.MS_BIND, ""); err != nil {
		return fmt.Errorf("cannot bind mount: %w", err)
	}
	if !readonly {
		return nil
	}
	// A bind mount takes no flags with its first call.
	if err := syscall.Mount("", target, "", syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY, ""); err != nil {
		return errors.Join(fmt.Errorf("cannot make the bind mount read-only: %w", err), syscall.Unmount(target, 0))
	}
	return nil
}

func (bindMount) unmount(target string) error { return syscall.Unmount(target, 0) }

func (bindMount) readonly(target string) bool {
	var fs syscall.Statfs_t
	return syscall.Statfs(target, &fs) == nil && fs.Flags&stReadonly != 0
}

// stReadonly is ST_RDONLY of statfs(2), which package syscall does not name.
const stReadonly = 1
