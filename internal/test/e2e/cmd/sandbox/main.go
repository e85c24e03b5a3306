// Command sandbox runs in place of the daemon, in its unit. It tries to reach what an attacker who
// has taken over the daemon would want, and writes a line for each thing that it reached.
//
//	sandbox serve PATH...  listens at the paths, outside of the unit, and has a terminal and IPC
//	sandbox try DIR        waits until DIR/go-1 exists, tries everything, and writes DIR/reached-1;
//	                       then twice more, as 2 and 3, with Landlock as the daemon uses it.
//	                       Then it makes the process in DIR/victim the unit's main process
//	sandbox stall          sends a status line with a control character, ignores SIGTERM,
//	                       and asks for 4 s more when it arrives
//	sandbox answer DIR PID answers at the control socket what names DIR, PID and escapes
//	sandbox ask DIR        runs the commands of root beside it, and writes a line for each harm:
//	                       outside of the unit. "sandbox ask DIR all" takes minutes
package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/daemon"
)

func main() {
	var err error
	switch {
	case len(os.Args) > 2 && os.Args[1] == "serve":
		err = serve(os.Args[2:])
	case len(os.Args) == 3 && os.Args[1] == "try":
		err = try(os.Args[2])
	case len(os.Args) == 2 && os.Args[1] == "stall":
		err = stall()
	case len(os.Args) == 4 && os.Args[1] == "answer":
		err = answer(os.Args[2], os.Args[3])
	case len(os.Args) > 2 && os.Args[1] == "ask":
		err = ask(os.Args[2], len(os.Args) == 4 && os.Args[3] == "all")
	default:
		err = fmt.Errorf("usage: sandbox serve PATH... | try DIR | stall | answer DIR PID | ask DIR [all]")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func serve(paths []string) error {
	var listeners []net.Listener // the garbage collector would close one
	for _, path := range paths {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.RemoveAll(path); err != nil {
			return err
		}
		ln, err := net.Listen("unix", path)
		if err != nil {
			return err
		}
		listeners = append(listeners, ln)
	}
	// The second process of this kind finds it in use.
	if ln, err := net.Listen("unix", "@abstract"); err == nil {
		listeners = append(listeners, ln)
	}
	terminal, err := makeObjects()
	for err == nil { // until it is killed
		_, err = listeners[0].Accept()
	}
	runtime.KeepAlive(listeners)
	runtime.KeepAlive(terminal)
	return err
}

func try(dir string) error {
	for _, round := range []string{"1", "2", "3"} {
		wait(filepath.Join(dir, "go-"+round))
		if round == "2" {
			abi, err := daemon.Confine(daemon.PrepareWritable(filepath.Dir(dir), "/var/lib/kubelet")...)
			if abi == 0 {
				return fmt.Errorf("no Landlock: %v", err)
			}
		}
		result := filepath.Join(dir, "reached-"+round)
		if err := os.WriteFile(result+".new", []byte(everything()), 0o600); err != nil {
			return err
		}
		if err := os.Rename(result+".new", result); err != nil {
			return err
		}
	}
	if err := notify("MAINPID=" + wait(filepath.Join(dir, "victim"))); err != nil {
		return err
	}
	for { // until it is killed
		time.Sleep(time.Hour)
	}
}

func stall() error {
	term := make(chan os.Signal, 1)
	signal.Notify(term, unix.SIGTERM)
	if err := notify("STATUS=\x1b[31mred"); err != nil {
		return err
	}
	for {
		<-term
		if err := notify("EXTEND_TIMEOUT_USEC=4000000"); err != nil {
			return err
		}
	}
}

func notify(message string) error {
	c, err := net.Dial("unixgram", os.Getenv("NOTIFY_SOCKET"))
	if err != nil {
		return err
	}
	_, err = c.Write([]byte(message))
	return errors.Join(err, c.Close())
}

// wait waits for a file and returns its content.
func wait(path string) string {
	for {
		if b, err := os.ReadFile(path); err == nil {
			return strings.TrimSpace(string(b))
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// everything tries everything.
func everything() string {
	var reached strings.Builder
	note := func(what string, err error) {
		if err == nil {
			fmt.Fprintln(&reached, what)
		}
	}
	for _, path := range writable {
		note("make a file in "+path, makeFile(path))
	}
	for _, path := range changeable {
		err := open(path, unix.O_WRONLY|unix.O_APPEND)
		if err != nil {
			err = open(path, unix.O_RDWR) // of a FIFO, also if nobody reads from it
		}
		note("change "+path, err)
	}
	for _, path := range readable {
		note("read "+path, read(path))
	}
	for _, path := range sockets {
		note("connect to "+path, connect(path))
	}
	for _, path := range metadata {
		note("set the mode of "+path, setMode(path))
		note("set the times of "+path, setTimes(path))
		note("set an attribute of "+path, setAttribute(path))
	}
	note("set the flags of /var/lib/kubelet/config.yaml", setFlags("/var/lib/kubelet/config.yaml"))
	note("open a terminal of root", openTerminal())
	note("write into the memory of a process of root", writeMemory())
	for _, call := range calls {
		note("call "+call.name, call.try())
	}
	note("look into the root of another process", otherRoots())
	note("signal a process of root", signalRoot())
	note("move a file into plugins_registry", moveIn(os.Rename))
	note("link a file into plugins_registry", moveIn(os.Link))
	note("signal a process of another user", signalOthers())
	return reached.String()
}

var writable = []string{
	"/", "/boot", "/dev", "/dev/shm", "/etc", "/etc/csi-registrar", "/etc/csi-registrar/conf.d", "/etc/systemd/system", "/home", "/mnt", "/opt", "/proc", "/root",
	"/run", "/run/csi-registrar", "/run/csi-registrar/conf.d", "/run/csi-registrar/registrations", "/run/csi-registrar/state", "/run/systemd", "/run/systemd/system",
	"/run/udev/rules.d", "/srv", "/sys/fs/cgroup", "/tmp", "/usr/bin", "/usr/lib/csi-registrar/conf.d", "/var", "/var/lib", "/var/lib/kubelet", "/var/lib/kubelet/device-plugins",
	"/var/lib/kubelet/plugins", "/var/lib/kubelet/plugins_registry", "/var/lib/kubelet/pods", "/var/log", "/var/tmp",
}

var changeable = []string{
	"/etc/passwd", "/etc/shadow", "/etc/csi-registrar/conf.d/10-a.toml", "/proc/1/oom_score_adj", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe",
	"/proc/1/clear_refs", "/proc/sys/vm/overcommit_memory", "/run/fifo", "/proc/sysrq-trigger", "/run/csi-registrar/conf.d/10-a.toml", "/run/initctl", "/sys/fs/cgroup/cgroup.procs", "/sys/kernel/uevent_helper",
	"/usr/bin/csi-registrar", "/usr/lib/systemd/system/csi-registrar.service", "/var/lib/kubelet/config.yaml", "/var/lib/kubelet/kubeadm-flags.env", "/var/lib/kubelet/kubeconfig",
}

// metadata are files that are on another mount in round 3, and directories that are writable.
var metadata = []string{"/run/csi-registrar/state", "/tmp", "/var/lib/kubelet/config.yaml", "/var/lib/kubelet/plugins_registry"}

var readable = []string{
	"/etc/cni/net.d/calico-kubeconfig", "/etc/krb5.keytab", "/run/cloud-init/instance-data-sensitive.json", "/run/containers/storage/config.json", "/var/lib/cloud/instance/user-data.txt",
	"/var/lib/docker/containers/c/config.v2.json", "/var/lib/kubelet/.dockercfg", "/var/lib/kubelet/config.json", "/var/lib/kubelet/plugins/kubernetes.io/csi/vol_data.json", "/var/log/secret",
	"/dev/kmsg", "/dev/mem", "/dev/sda", "/etc/gshadow", "/etc/kubernetes/admin.conf", "/etc/passwd", "/etc/rancher/k3s/k3s.yaml", "/etc/shadow", "/etc/ssh/ssh_host_ed25519_key",
	"/etc/ssl/private/key.pem", "/etc/credstore/x", "/home/somebody/secret", "/proc/1/environ", "/proc/kcore", "/proc/kmsg", "/root/secret", "/run/credentials/x", "/run/credstore/x",
	"/var/lib/etcd/member", "/var/lib/k0s/kubelet.conf", "/var/lib/k0s/pki/ca.key", "/var/lib/kubelet/config.yaml", "/var/lib/kubelet/bootstrap-kubeconfig", "/var/lib/kubelet/kubeconfig",
	"/var/lib/kubelet/pki/key", "/var/lib/kubelet/pods/p/token", "/var/lib/rancher/k3s/server/token", "/var/lib/systemd/random-seed", "/var/snap/microk8s/current/credentials/client.config",
}

var sockets = []string{
	"/run/buildkit/buildkitd.sock", "/run/containerd/containerd.sock", "/run/cri-dockerd.sock", "/run/crio/crio.sock", "/run/dbus/system_bus_socket", "/run/docker.sock",
	"/run/docker/containerd/containerd.sock", "/run/driver/csi.sock", "/run/k0s/containerd.sock", "/run/k3s/containerd/containerd.sock", "/run/libvirt/libvirt-sock", "/run/nri/nri.sock",
	"/run/podman/podman.sock", "/run/snapd-snap.socket", "/run/snapd.socket", "/run/systemd/io.system.ManagedOOM", "/run/systemd/private", "/run/systemd/userdb/io.systemd.DynamicUser",
	"/run/udev/control", "/var/lib/lxd/unix.socket", "/var/lib/kubelet/plugins/driver/csi.sock", "/var/snap/lxd/common/lxd/unix.socket", "/var/snap/microk8s/common/run/containerd.sock",
	"/run/other/service.sock", "/run/systemd/journal/dev-log", "/run/systemd/journal/io.systemd.journal", "/run/systemd/journal/socket", "/run/systemd/journal/stdout",
	"/run/systemd/notify", "/var/lib/kubelet/device-plugins/kubelet.sock", "/var/lib/kubelet/pod-resources/kubelet.sock",
	"@abstract",
}

func makeFile(dir string) error {
	path := filepath.Join(dir, ".probe")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	f.Close()
	return os.Remove(path)
}

func open(path string, flags int) error {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err == nil {
		unix.Close(fd)
	}
	return err
}

// read reads a byte, because in some sandboxes a masked file can be opened.
func read(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if n, err := unix.Read(fd, make([]byte, 1)); n <= 0 {
		return fmt.Errorf("%d bytes, %w", n, err)
	}
	return nil
}

func connect(path string) error {
	for _, kind := range []string{"unix", "unixgram", "unixpacket"} {
		c, err := net.Dial(kind, path)
		if err == nil {
			c.Close()
			return nil
		}
	}
	return unix.ECONNREFUSED
}

// processes returns the other processes in /proc, with their users.
func processes() map[int]uint32 {
	all := map[int]uint32{}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		var st unix.Stat_t
		if err == nil && pid != os.Getpid() && unix.Stat("/proc/"+e.Name(), &st) == nil {
			all[pid] = st.Uid
		}
	}
	return all
}

func otherRoots() error {
	for pid := range processes() {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d/root/etc", pid)); err == nil {
			return nil
		}
	}
	return unix.EACCES
}

// signalRoot signals PID 1 in each way that there is, with signals that do nothing.
func signalRoot() error {
	err := unix.Kill(1, 0)
	if err != nil {
		err = unix.Tgkill(1, 1, 0)
	}
	if fd, openErr := unix.PidfdOpen(1, 0); err != nil && openErr == nil {
		err = unix.PidfdSendSignal(fd, 0, nil, 0)
		unix.Close(fd)
	}
	if err != nil {
		_, _, errno := unix.Syscall6(unix.SYS_RT_SIGQUEUEINFO, 1, 0, uintptr(unsafe.Pointer(&unix.Siginfo{Code: -1})), 0, 0, 0)
		if err = nil; errno != 0 {
			err = errno
		}
	}
	return err
}

// moveIn tries to get a file of root_dir into a directory that can be written.
func moveIn(move func(from, to string) error) error {
	const from, to = "/var/lib/kubelet/kubeadm-flags.env", "/var/lib/kubelet/plugins_registry/.moved"
	if err := move(from, to); err != nil {
		return err
	}
	return os.Remove(to)
}

func signalOthers() error {
	for pid, uid := range processes() {
		if uid != 0 && unix.Kill(pid, 0) == nil {
			return nil
		}
	}
	return unix.EPERM
}
