package main

import (
	"errors"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

type call struct {
	name string
	try  func() error
}

// number tries a system call by its number. An error about the arguments means that the filter
// admitted the call; ENOENT, that there is nothing of that name in the service's own namespace.
func number(name string, nr uintptr, args ...uintptr) call {
	return call{name, func() error {
		a := append(args, 0, 0, 0, 0, 0, 0)
		_, _, errno := unix.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
		if errno == unix.EPERM || errno == unix.EACCES || errno == unix.ENOSYS || errno == unix.ENOENT {
			return errno
		}
		return nil
	}}
}

// otherFamilies makes a socket, or a pair of them, of each family but AF_UNIX.
func otherFamilies() error {
	for family := range 46 { // AF_MAX
		for kind := unix.SOCK_STREAM; kind <= unix.SOCK_PACKET; kind++ {
			if family == unix.AF_UNIX {
				continue
			}
			if fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0); err == nil {
				return unix.Close(fd)
			}
			if fds, err := unix.Socketpair(family, kind|unix.SOCK_CLOEXEC, 0); err == nil {
				return errors.Join(unix.Close(fds[0]), unix.Close(fds[1]))
			}
		}
	}
	return unix.EAFNOSUPPORT
}

var bad = ^uintptr(0)

var calls = []call{
	call{"socket of another family than AF_UNIX", otherFamilies},
	// Newer than package unix, and so are the groups of some systemds.
	number("fchmodat2", 452), number("mount_setattr", unix.SYS_MOUNT_SETATTR, bad), number("memfd_secret", 447, bad), number("lsm_set_self_attr", 460, bad), number("setxattrat", 463, bad),
	number("removexattrat", 466, bad), number("open_tree_attr", 467, bad), number("file_setattr", 469, bad),
	number("io_uring_setup", unix.SYS_IO_URING_SETUP, 1, 0), number("io_setup", unix.SYS_IO_SETUP, 1, 0),
	number("add_key", unix.SYS_ADD_KEY, 0, 0, 0, 0, 0), number("keyctl", unix.SYS_KEYCTL, 0, 0, 0), number("request_key", unix.SYS_REQUEST_KEY, 0, 0, 0, 0),
	number("process_vm_readv", unix.SYS_PROCESS_VM_READV, bad), number("process_vm_writev", unix.SYS_PROCESS_VM_WRITEV, bad), number("ptrace", unix.SYS_PTRACE, bad, bad),
	number("mount", unix.SYS_MOUNT), number("umount2", unix.SYS_UMOUNT2), number("fsopen", unix.SYS_FSOPEN), number("move_mount", unix.SYS_MOVE_MOUNT), number("open_tree", unix.SYS_OPEN_TREE, bad),
	number("pivot_root", unix.SYS_PIVOT_ROOT), number("chroot", unix.SYS_CHROOT),
	call{"unshare a user namespace", func() error { runtime.LockOSThread(); return unix.Unshare(unix.CLONE_NEWUSER) }},
	call{"unshare a mount namespace", func() error { return unix.Unshare(unix.CLONE_NEWNS) }},
	number("setns", unix.SYS_SETNS, bad, unix.CLONE_NEWNS),
	number("bpf", unix.SYS_BPF, bad), number("perf_event_open", unix.SYS_PERF_EVENT_OPEN), number("userfaultfd", unix.SYS_USERFAULTFD, 1<<20), number("fanotify_init", unix.SYS_FANOTIFY_INIT, bad),
	number("init_module", unix.SYS_INIT_MODULE), number("finit_module", unix.SYS_FINIT_MODULE, bad), number("delete_module", unix.SYS_DELETE_MODULE), number("kexec_load", unix.SYS_KEXEC_LOAD),
	number("reboot", unix.SYS_REBOOT), number("swapon", unix.SYS_SWAPON), number("acct", unix.SYS_ACCT, 1), number("quotactl", unix.SYS_QUOTACTL, bad), number("syslog", unix.SYS_SYSLOG, 10),
	number("sethostname", unix.SYS_SETHOSTNAME, 0, bad), number("clock_settime", unix.SYS_CLOCK_SETTIME, bad), number("settimeofday", unix.SYS_SETTIMEOFDAY, 0, bad),
	number("setuid", unix.SYS_SETUID, 65534), number("setgroups", unix.SYS_SETGROUPS, 0, 0), number("chown", unix.SYS_CHOWN), number("setrlimit", unix.SYS_SETRLIMIT, bad, 0),
	number("sched_setscheduler", unix.SYS_SCHED_SETSCHEDULER, bad), number("open_by_handle_at", unix.SYS_OPEN_BY_HANDLE_AT, bad), number("pidfd_getfd", unix.SYS_PIDFD_GETFD, bad),
	number("prlimit64", unix.SYS_PRLIMIT64, 1, unix.RLIMIT_NOFILE),
	number("kcmp", unix.SYS_KCMP, bad), number("personality", unix.SYS_PERSONALITY, 0x0040000), number("vhangup", unix.SYS_VHANGUP),
	number("shmget", unix.SYS_SHMGET, ipcKey), number("semget", unix.SYS_SEMGET, ipcKey), number("msgget", unix.SYS_MSGGET, ipcKey),
	call{"mq_open", func() error { return openQueue(unix.O_RDONLY) }},
	call{"make a device", func() error {
		err := unix.Mknod("/tmp/device", unix.S_IFCHR|0o600, int(unix.Mkdev(1, 1)))
		_ = os.Remove("/tmp/device")
		return err
	}},
	call{"make a set-user-ID file", func() error {
		path := "/tmp/suid"
		defer os.Remove(path)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			return err
		}
		return unix.Chmod(path, 0o4755)
	}},
	call{"make a set-user-ID file without a name", func() error {
		fd, err := unix.Open("/tmp", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o4755)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if _, err := unix.Write(fd, []byte("x")); err != nil { // the write takes the bit away
			return err
		}
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_ISUID == 0 {
			return unix.EPERM
		}
		return nil
	}},
	call{"map memory that can be written and executed", func() error {
		m, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err == nil {
			_ = unsafe.Pointer(&m[0])
			return unix.Munmap(m)
		}
		return err
	}},
}
