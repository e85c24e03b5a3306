package main

import (
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
// admitted the call.
func number(name string, nr uintptr, args ...uintptr) call {
	return call{name, func() error {
		a := append(args, 0, 0, 0, 0, 0, 0)
		_, _, errno := unix.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
		if errno == unix.EPERM || errno == unix.EACCES || errno == unix.ENOSYS {
			return errno
		}
		return nil
	}}
}

func socket(name string, family, kind int) call {
	return call{"socket " + name, func() error {
		fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			unix.Close(fd)
		}
		return err
	}}
}

var bad = ^uintptr(0)

var calls = []call{
	socket("AF_INET", unix.AF_INET, unix.SOCK_STREAM), socket("AF_INET6", unix.AF_INET6, unix.SOCK_STREAM), socket("AF_NETLINK", unix.AF_NETLINK, unix.SOCK_RAW),
	socket("AF_PACKET", unix.AF_PACKET, unix.SOCK_RAW), socket("AF_VSOCK", unix.AF_VSOCK, unix.SOCK_STREAM), socket("AF_ALG", unix.AF_ALG, unix.SOCK_SEQPACKET),
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
	number("kcmp", unix.SYS_KCMP, bad), number("personality", unix.SYS_PERSONALITY, 0x0040000), number("vhangup", unix.SYS_VHANGUP),
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
	call{"map memory that can be written and executed", func() error {
		m, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err == nil {
			_ = unsafe.Pointer(&m[0])
			return unix.Munmap(m)
		}
		return err
	}},
}
