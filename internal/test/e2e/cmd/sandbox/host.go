package main

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Things of root outside of the unit, besides files and sockets.
const (
	ipcKey    = 0x637369
	queueName = "csi-sandbox"
)

// makeObjects makes shared memory, a semaphore, message queues and a terminal of root, and keeps
// the terminal open.
func makeObjects() (terminal *os.File, err error) {
	for _, object := range []struct {
		name string
		nr   uintptr
		args [3]uintptr
	}{
		{"shared memory", unix.SYS_SHMGET, [3]uintptr{ipcKey, 4096, unix.IPC_CREAT | 0o600}},
		{"a semaphore", unix.SYS_SEMGET, [3]uintptr{ipcKey, 1, unix.IPC_CREAT | 0o600}},
		{"a message queue", unix.SYS_MSGGET, [3]uintptr{ipcKey, unix.IPC_CREAT | 0o600}},
	} {
		if _, _, errno := unix.Syscall(object.nr, object.args[0], object.args[1], object.args[2]); errno != 0 {
			return nil, fmt.Errorf("cannot make %s: %w", object.name, errno)
		}
	}
	if err := openQueue(unix.O_RDWR | unix.O_CREAT); err != nil {
		return nil, fmt.Errorf("cannot make a POSIX message queue: %w", err)
	}
	if terminal, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		return nil, err
	}
	return terminal, unix.IoctlSetPointerInt(int(terminal.Fd()), unix.TIOCSPTLCK, 0)
}

func openQueue(flags int) error {
	name, err := unix.BytePtrFromString(queueName)
	if err != nil {
		return err
	}
	fd, _, errno := unix.Syscall6(unix.SYS_MQ_OPEN, uintptr(unsafe.Pointer(name)), uintptr(flags|unix.O_CLOEXEC), 0o600, 0, 0, 0)
	if errno != 0 {
		return errno
	}
	return unix.Close(int(fd))
}

// openTerminal opens a terminal of root.
func openTerminal() error {
	names, err := os.ReadDir("/dev/pts")
	if err != nil {
		return err
	}
	for _, name := range names {
		if err = open("/dev/pts/"+name.Name(), unix.O_RDONLY); err == nil {
			return nil
		}
	}
	return fmt.Errorf("%d terminals: %w", len(names), err)
}

// setMode sets the mode of a file to what it is, in each way that there is.
func setMode(path string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return err
	}
	mode := st.Mode & 0o7777
	err := unix.Chmod(path, mode)
	if err != nil {
		err = unix.Fchmodat(unix.AT_FDCWD, path, mode, 0)
	}
	if err != nil {
		err = unix.Fchmodat(unix.AT_FDCWD, path, mode, unix.AT_SYMLINK_NOFOLLOW) // fchmodat2
	}
	if err != nil {
		err = withFile(path, func(fd int) error { return unix.Fchmod(fd, mode) })
	}
	return err
}

func setTimes(path string) error {
	now := []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_NOW}}
	err := unix.UtimesNanoAt(unix.AT_FDCWD, path, now, 0)
	if err != nil {
		err = unix.Utimes(path, []unix.Timeval{{}, {}})
	}
	return err
}

func setAttribute(path string) error {
	err := unix.Setxattr(path, "user.sandbox", []byte("x"), 0)
	if err != nil {
		err = unix.Lsetxattr(path, "user.sandbox", []byte("x"), 0)
	}
	if err != nil {
		err = withFile(path, func(fd int) error { return unix.Fsetxattr(fd, "user.sandbox", []byte("x"), 0) })
	}
	return err
}

// setFlags sets the flags of a file (chattr(1)) to what they are.
func setFlags(path string) error {
	return withFile(path, func(fd int) error {
		flags, err := unix.IoctlGetInt(fd, unix.FS_IOC_GETFLAGS)
		if err != nil {
			return err
		}
		return unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, flags)
	})
}

func withFile(path string, try func(fd int) error) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return try(fd)
}

// writeMemory opens the memory of another process of root for writing. The kernel admits that for
// processes that have no more capabilities than this one.
func writeMemory() error {
	for pid, uid := range processes() {
		if uid == 0 && open(fmt.Sprintf("/proc/%d/mem", pid), unix.O_RDWR) == nil {
			return nil
		}
	}
	return unix.EACCES
}
