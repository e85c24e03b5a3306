package mountinfo

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestPropagates has the lines of the mount that a driver, and a kubelet, have their directory on,
// as they were on Debian 12 and 13 for each way to start the two.
func TestPropagates(t *testing.T) {
	const (
		host     = "24 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"
		hostDisk = "77 24 8:17 / /var/lib/kubelet rw,relatime shared:40 - ext4 /dev/sdb1 rw"
	)
	for name, c := range map[string]struct {
		driver, kubelet, others string
		want                    bool
	}{
		"a unit without a namespace":           {host, host, "", true},
		"the kubelet's directory is a disk":    {hostDisk, hostDisk, "", true},
		"a private mount of the host":          {"24 1 8:1 / / rw - ext4 /dev/sda1 rw", "24 1 8:1 / / rw - ext4 /dev/sda1 rw", "", true},
		"PrivateMounts=yes":                    {"431 423 8:1 / / rw,relatime shared:872 master:1 - ext4 /dev/sda1 rw", host, "", false},
		"MountFlags=slave":                     {"431 423 8:1 / / rw,relatime master:1 - ext4 /dev/sda1 rw", host, "", false},
		"MountFlags=private":                   {"431 423 8:1 / / rw,relatime - ext4 /dev/sda1 rw", host, "", false},
		"a container with rshared":             {"612 590 8:1 /var/lib/kubelet /var/lib/kubelet rw,relatime shared:1 - ext4 /dev/sda1 rw", host, "", true},
		"a container with rshared, own disk":   {"612 590 8:17 / /var/lib/kubelet rw,relatime shared:40 - ext4 /dev/sdb1 rw", hostDisk, "", true},
		"a container with rslave":              {"612 590 8:1 /var/lib/kubelet /var/lib/kubelet rw,relatime master:1 - ext4 /dev/sda1 rw", host, "", false},
		"a container without propagation":      {"612 590 8:1 /var/lib/kubelet /var/lib/kubelet rw,relatime - ext4 /dev/sda1 rw", host, "", false},
		"a kubelet that receives (kubens)":     {host, "700 650 8:1 / / rw,relatime shared:90 master:1 - ext4 /dev/sda1 rw", "", true},
		"a driver in kubens' pods":             {"612 590 8:1 /var/lib/kubelet /k rw,relatime shared:90 master:1 - ext4 /dev/sda1 rw", "700 650 8:1 / / rw,relatime shared:90 master:1 - ext4 /dev/sda1 rw", "", true},
		"below kubens, and not up":             {"612 590 8:1 / / rw,relatime shared:91 master:90 - ext4 /dev/sda1 rw", "700 650 8:1 / / rw,relatime shared:90 master:1 - ext4 /dev/sda1 rw", "", false},
		"a slave of a slave":                   {host, "700 650 8:1 / / rw,relatime master:90 - ext4 /dev/sda1 rw", "650 1 8:1 / / rw shared:90 master:1 - ext4 /dev/sda1 rw", true},
		"a slave of a slave of another group":  {host, "700 650 8:1 / / rw,relatime master:90 - ext4 /dev/sda1 rw", "650 1 8:1 / / rw shared:90 master:7 - ext4 /dev/sda1 rw", false},
		"a chain of four":                      {host, "700 650 8:1 / / rw,relatime master:93 - ext4 /dev/sda1 rw", "1 1 8:1 / / rw shared:93 master:92 - x y rw\n2 1 8:1 / / rw shared:92 master:91 - x y rw\n3 1 8:1 / / rw shared:91 master:1 - x y rw", true},
		"a chain whose end is not known":       {host, "700 650 8:1 / / rw,relatime master:93 - ext4 /dev/sda1 rw", "1 1 8:1 / / rw shared:93 master:92 - x y rw", false},
		"a loop, of a list that was changing":  {host, "700 650 8:1 / / rw,relatime master:93 - ext4 /dev/sda1 rw", "1 1 8:1 / / rw shared:93 master:92 - x y rw\n2 1 8:1 / / rw shared:92 master:93 - x y rw", false},
		"siblings of one master":               {"431 423 8:1 / / rw,relatime shared:872 master:1 - ext4 /dev/sda1 rw", "700 650 8:1 / / rw,relatime shared:90 master:1 - ext4 /dev/sda1 rw", "", false},
		"a group from which another receives":  {"431 423 8:1 / / rw,relatime shared:872 master:1 propagate_from:1 - ext4 /dev/sda1 rw", host, "", false},
		"two private mounts of one directory":  {"612 590 8:1 /k /k rw,relatime - ext4 /dev/sda1 rw", "700 650 8:1 / / rw,relatime - ext4 /dev/sda1 rw", "", false},
		"a group that begins as the other's":   {"612 590 8:1 /k /k rw,relatime shared:4 - ext4 /dev/sda1 rw", "700 650 8:1 / / rw,relatime shared:40 master:44 - ext4 /dev/sda1 rw", "", false},
		"the kubelet in a private namespace":   {host, "700 650 8:1 / / rw,relatime - ext4 /dev/sda1 rw", "", false},
		"a snap, whose root is another":        {"612 590 8:1 /k /k rw shared:1 - ext4 /dev/sda1 rw", "700 650 8:1 /var/snap/k /var/snap/k rw master:1 - ext4 /dev/sda1 rw", "", true},
		"a kubelet in a container with rslave": {host, "612 590 8:1 /var/lib/kubelet /var/lib/kubelet rw,relatime master:1 - ext4 /dev/sda1 rw", "", true},
	} {
		proc := t.TempDir()
		process(t, proc, "7", c.others)
		view := func(line string) View {
			all, err := Parse(strings.NewReader(line + "\n"))
			if err != nil || len(all) != 1 {
				t.Fatalf("%s: %v, %v", line, all, err)
			}
			return View{Mount: all[0]}
		}
		if got := view(c.driver).Propagates(view(c.kubelet), func() map[string]string { return Masters(proc) }); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// process writes the files of a process in a directory that stands for /proc.
func process(t *testing.T, proc, pid, mounts string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Join(proc, pid, "ns"), 0o755))
	must(t, os.WriteFile(filepath.Join(proc, pid, "mountinfo"), []byte(mounts+"\n"), 0o600))
	must(t, os.Symlink("mnt:["+pid+"]", filepath.Join(proc, pid, "ns/mnt")))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestNamespaces checks that one process is taken for each namespace, and nothing else in /proc.
func TestNamespaces(t *testing.T) {
	proc := t.TempDir()
	process(t, proc, "1", "")
	process(t, proc, "22", "")
	must(t, os.MkdirAll(proc+"/33/ns", 0o755))
	must(t, os.Symlink("mnt:[22]", proc+"/33/ns/mnt"))
	must(t, os.Symlink("1", proc+"/self"))
	must(t, os.MkdirAll(proc+"/44", 0o755)) // a process of another user
	if got := strings.Join(Namespaces(proc), " "); got != "1 22" {
		t.Errorf("%s, want 1 22", got)
	}
}

// isolated reports whether this process has a mount namespace of its own, in which all mounts are
// private. If not, it runs the test in another process, which has: what that mounts reaches no
// other namespace.
func isolated(t *testing.T) bool {
	t.Helper()
	if os.Getenv("VIEW_ISOLATED") != "" {
		outer, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", os.Getppid()))
		must(t, err)
		inner, err := os.Readlink("/proc/self/ns/mnt")
		must(t, err)
		if inner == outer {
			t.Fatal("this would mount in the namespace of others")
		}
		return true
	}
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), "VIEW_ISOLATED=1")
	// Go makes all mounts private in the new namespace.
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, syscall.EPERM) || strings.Contains(string(out), "SKIP") {
		t.Skipf("no mount namespace: %v\n%s", err, out)
	}
	t.Logf("%s", out)
	must(t, err)
	return false
}

// shell is a shell with its own view of the file system.
type shell struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
	pid string
}

// newShell starts a shell that runs a script first. In it, $K is the kubelet's directory.
func newShell(t *testing.T, dir, script string) *shell {
	t.Helper()
	s := &shell{t: t, cmd: exec.Command("sh", "-c", script)}
	s.cmd.Env = append(os.Environ(), "K="+dir+"/k", "D="+dir)
	s.cmd.Stderr = os.Stderr
	in, err := s.cmd.StdinPipe()
	must(t, err)
	out, err := s.cmd.StdoutPipe()
	must(t, err)
	s.in, s.out = in, bufio.NewScanner(out)
	must(t, s.cmd.Start())
	_, err = io.WriteString(in, "echo $$\n")
	must(t, err)
	if !s.out.Scan() {
		t.Fatal("it does not start: ", s.out.Err())
	}
	s.pid = s.out.Text()
	return s
}

// run runs a command in the shell, and reports whether it succeeds.
func (s *shell) run(command string) (code string, ok bool) {
	s.t.Helper()
	_, err := fmt.Fprintf(s.in, "%s; echo $?\n", command)
	must(s.t, err)
	if !s.out.Scan() {
		s.t.Fatalf("%s: %v", command, s.out.Err())
	}
	return s.out.Text(), s.out.Text() == "0"
}

// do runs a command that must succeed.
func (s *shell) do(command string) {
	s.t.Helper()
	if code, ok := s.run(command); !ok {
		s.t.Fatalf("%s: exit code %s", command, code)
	}
}

func (s *shell) close() {
	s.t.Helper()
	must(s.t, s.in.Close())
	must(s.t, s.cmd.Wait())
}

func (s *shell) look(dir string) (View, error) { return Look("/proc", s.pid, dir) }

const (
	own = "exec unshare -m --propagation "
	// container is a shell whose root directory is another one, with the kubelet's directory in it.
	// It ends with how the mount propagates.
	container = own + `unchanged sh -ec 'R=$(mktemp -d -p $D); mount -t tmpfs tmpfs $R; mount --make-private $R; mkdir -p $R$K
		for d in bin sbin lib lib64 usr dev proc etc; do mkdir $R/$d; mount --rbind /$d $R/$d; done
		mount --bind $K $R$K; mount --make-`
	enter = ` $R$K; exec chroot $R sh'`
)

// TestViews compares the rule with what happens: one shell stands for the kubelet, another one
// mounts.
func TestViews(t *testing.T) {
	if !isolated(t) {
		return
	}
	kubelets := map[string]string{
		"host":                     "exec sh",
		"shared namespace":         own + "shared sh",
		"kubens":                   own + "slave sh -ec 'mount --make-rshared /; exec sh'",
		"slave":                    own + "slave sh",
		"slave of a slave's group": own + "slave sh -ec 'mount --make-rshared /; unshare -m --propagation slave sh; exit 0'",
		"private":                  own + "private sh",
		"private directory":        own + "shared sh -ec 'mount --bind --make-private $K $K; exec sh'",
		"container, rslave":        container + "slave" + enter,
	}
	drivers := map[string]string{
		"host":                   "exec sh",
		"PrivateMounts=":         own + "slave sh -ec 'mount --make-rshared /; exec sh'",
		"MountFlags=slave":       own + "slave sh",
		"MountFlags=private":     own + "private sh",
		"unchanged":              own + "unchanged sh",
		"container, rshared":     container + "shared" + enter,
		"container, rslave":      container + "slave" + enter,
		"container, private":     container + "private" + enter,
		"the directory is bound": own + "unchanged sh -ec 'mount --bind $K $K; mount --make-private $K; exec sh'",
	}
	dir, count := world(t), map[bool]int{}
	start := func(scripts map[string]string) map[string]*shell {
		shells := map[string]*shell{}
		for name, script := range scripts {
			shells[name] = newShell(t, dir, script)
		}
		return shells
	}
	kubeletShells := start(kubelets)
	for driver, d := range start(drivers) {
		from, err := d.look(dir + "/k/pods")
		must(t, err)
		for kubelet, k := range kubeletShells {
			to, err := k.look(dir + "/k/pods")
			must(t, err)
			if !from.Same(to) {
				t.Errorf("%s, %s: it is not the same directory", driver, kubelet)
			}
			d.do("mount -t tmpfs tmpfs $K/pods/v; touch $K/pods/v/seen")
			_, seen := k.run("test -e $K/pods/v/seen")
			d.do("umount $K/pods/v")
			if says := from.Propagates(to, func() map[string]string { return Masters("/proc") }); says != seen {
				t.Errorf("driver %s, kubelet %s: the rule says %v, the kubelet sees it: %v\n%+v\n%+v", driver, kubelet, says, seen, from.Mount, to.Mount)
			}
			count[seen]++
		}
		d.close()
	}
	for _, k := range kubeletShells {
		k.close()
	}
	if count[true] < 15 || count[false] < 40 {
		t.Errorf("seen and not seen: %v", count)
	}
}

// world returns a directory with a kubelet's directory in it, on a shared mount as on a host with
// systemd. It is a mount of this namespace only.
func world(t *testing.T) string {
	t.Helper()
	if out, err := exec.Command("mount", "--make-rprivate", "/").CombinedOutput(); err != nil {
		t.Skipf("SKIP %v: %s", err, out)
	}
	dir := t.TempDir()
	for _, args := range [][]string{{"-t", "tmpfs", "tmpfs", dir}, {"--make-rshared", "/"}} {
		if out, err := exec.Command("mount", args...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	t.Cleanup(func() { must(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
	must(t, os.MkdirAll(dir+"/k/pods/v", 0o755))
	return dir
}

// TestLook: absolute links begin at the root directory of the process, the mount that is on top
// counts, and a directory that is missing or another one is detected.
func TestLook(t *testing.T) {
	if !isolated(t) {
		return
	}
	dir := world(t)
	must(t, os.MkdirAll(dir+"/other/pods", 0o755))
	must(t, os.Symlink(dir+"/k", dir+"/link"))
	host := newShell(t, dir, "exec sh")
	defer host.close()
	inside := newShell(t, dir, container+"shared"+` $R$K; mkdir -p $R$D/other/pods; ln -s $D/k $R/link; exec chroot $R sh'`)
	defer inside.close()
	hosts, err := host.look(dir + "/link/pods")
	must(t, err)
	for path, same := range map[string]bool{"/link/pods": true, dir + "/k/pods": true, dir + "/other/pods": false} {
		if v, err := inside.look(path); err != nil || v.Same(hosts) != same {
			t.Errorf("%s is the same: %v, %v, want %v", path, v.Same(hosts), err, same)
		}
	}
	if _, err := inside.look(dir + "/link/pods"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a directory that only the host has: %v", err)
	}
	before := hosts.Mount
	host.do("mount -t tmpfs one $K/pods; mount -t tmpfs two $K")
	v, err := host.look(dir + "/k")
	if err != nil || v.Mount.Source != "two" || v.Mount.ID == before.ID {
		t.Errorf("%+v (%v), want the mount two", v.Mount, err)
	}
	host.do("umount $K; umount $K/pods")
	if _, err := Look("/proc", "0", "/"); err == nil {
		t.Error("no process is no error")
	}
}
