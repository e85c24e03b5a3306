package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/node/cgroup"
	"csi-registrar/internal/sys/safetext"
)

// setUIDs sets the uids of a process.
func (n *node) setUIDs(pid int, uids string) {
	n.write(fmt.Sprintf("proc/%d/status", pid), "Name:\tx\nUid:\t"+uids+"\n")
}

// A process can make its files in /proc very long.
func TestHugeFile(t *testing.T) {
	n := newNode(t)
	n.process(900, "sleep", "0::/")
	if err := os.Truncate(n.path("proc/900/cgroup"), 64<<30); err != nil {
		t.Fatal(err)
	}
	if r := n.examine(); len(r.Findings) != 0 {
		t.Errorf("%+v", r.Findings)
	}
}

func TestOnlyProcessesOfRootAreKubelets(t *testing.T) {
	for _, uids := range []string{"65534\t65534\t65534\t65534", "65534\t0\t0\t0", "0\t65534\t0\t0", "", "00\t0\t0\t0"} {
		n := newNode(t)
		n.process(900, "kubelet", "0::/system.slice/kubelet.service")
		n.listens(900, "/x")
		n.setUIDs(900, uids)
		r := n.examine()
		if len(r.Findings) != 0 || !slices.ContainsFunc(r.Checks, func(c Check) bool {
			return c.Result == Skipped && strings.HasPrefix(c.Says, "kubelet (pid 900, kubelet.service) is not a process of root")
		}) {
			t.Errorf("%+v\n%+v", r.Findings, r.Checks)
		}
		n.remove(n.path("proc/812"))
		if r := n.examine(); len(r.Findings) != 1 || !strings.Contains(r.Findings[0].Found, "no kubelet runs") {
			t.Errorf("%+v", r.Findings)
		}
	}
}

func TestHostileCgroupName(t *testing.T) {
	for _, cgroup := range []string{"/$(reboot).service", "/a b.service", "/-x.service", "/user.slice/user-1000.slice/user@1000.service/app.slice/sshd.service", "/x.scope/sshd.service"} {
		n := newNode(t)
		n.startKubelet()
		n.write("proc/812/cgroup", "0::"+cgroup+"\n")
		n.remove(n.path("proc/812/fdinfo/9"))
		r := n.examine()
		if len(r.Findings) != 1 || r.Findings[0].Step != "watching" || !strings.HasSuffix(lines(r.Findings[0].Fix), "\nsystemctl restart kubelet.service") {
			t.Errorf("%s: %+v", cgroup, r.Findings)
		}
	}
}

func TestHostileDropInName(t *testing.T) {
	n := newNode(t)
	n.remove(n.path("usr/lib/csi-registrar/conf.d/10-nfs.toml"))
	n.write("usr/lib/csi-registrar/conf.d/40;reboot.toml", n.table(""))
	n.write("etc/csi-registrar/conf.d/40;reboot.toml", "")
	n.restartDaemon()
	r := n.examine(name)
	path := n.path("etc/csi-registrar/conf.d/40;reboot.toml")
	if len(r.Findings) != 1 || lines(r.Findings[0].Fix) != "mv -n '"+path+"' '"+strings.TrimSuffix(path, ".toml")+"_too.toml'\ncsi-registrar reload" || !strings.Contains(r.Findings[0].Found, `"`+path+`"`) {
		t.Fatalf("%+v", r.Findings)
	}
	n.follow(r.Findings[0].Fix)
	if r := n.examine(name); len(r.Findings) != 0 {
		t.Errorf("%+v", r.Findings)
	}
}

func TestNoChownOfALink(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: files of another user")
	}
	n := newNode(t)
	chmod(t, n.path("csi"), 0o777|os.ModeSticky)
	real := n.path("csi/real.sock")
	if err := errors.Join(os.Rename(n.socket(), real), os.Symlink(real, n.socket()), os.Lchown(n.socket(), 65123, -1)); err != nil {
		t.Fatal(err)
	}
	n.restartDaemon()
	r := n.examine()
	if len(r.Findings) != 1 || r.Findings[0].Step != "trust" || strings.Contains(lines(r.Findings[0].Fix), "chown") || r.Findings[0].Fix[0].String() != "rm "+n.socket() {
		t.Errorf("%+v", r.Findings)
	}
}

func TestFileSystemDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newDiagnosis(Options{})
		answers := make(chan struct{})
		hang := func() (int, error) { <-answers; return 0, nil }
		start := time.Now()
		if _, err := look(t.Context(), x, "/dead $(x)", hang); err == nil || err.Error() != `the file system of "/dead $(x)" does not answer` || time.Since(start) != fileTimeout {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		start = time.Now()
		if _, err := look(ctx, x, "/other", hang); !errors.Is(err, context.Canceled) || time.Since(start) != 0 {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		close(answers)
	})
}

func TestRunEndsWithItsContext(t *testing.T) {
	n := newNode(t)
	n.driver.set(func(f *fakeDriver) { f.hang = "GetPluginInfo" })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		Run(ctx, Options{Source: n.source(), Units: n.units, Root: n.root})
	}()
	<-n.driver.asked()
	cancel()
	select {
	case <-done:
	case <-time.After(4 * time.Second): // the driver has 5 s
		t.Error("Run has not ended")
	}
}

func TestHangingDriversAreQueriedInParallel(t *testing.T) {
	n := newNode(t)
	const drivers = 8
	var hanging []chan struct{}
	for i := range drivers {
		f := &fakeDriver{name: fmt.Sprintf("hangs-%d.csi.example.com", i), hang: "NodeGetInfo"}
		f.start(t, n.path(fmt.Sprintf("csi/%d.sock", i)))
		t.Cleanup(f.stop)
		hanging = append(hanging, f.asked())
		n.write(fmt.Sprintf("etc/csi-registrar/conf.d/60-%d.toml", i), fmt.Sprintf("[driver.%q]\nsocket = %q\n", f.name, f.path))
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan Report)
	go func() {
		done <- Run(ctx, Options{Source: n.source(), Units: n.units, Root: n.root, NodeInfoTimeout: time.Hour})
	}()
	for _, asked := range hanging { // no driver answers before all were called
		<-asked
	}
	cancel()
	r := <-done
	for i := range drivers {
		if !slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Driver == fmt.Sprintf("hangs-%d.csi.example.com", i) }) {
			t.Errorf("no finding for driver %d", i)
		}
	}
	if !slices.IsSortedFunc(r.Checks, func(a, b Check) int { return strings.Compare(a.Driver, b.Driver) }) {
		t.Errorf("checks of different drivers are mixed: %+v", r.Checks)
	}
}

func FuzzProcess(f *testing.F) {
	f.Add("/var/lib/kubelet/pod-resources/1", "0::/system.slice/kubelet.service\n", "Uid:\t0\t0\t0\t0\n")
	f.Add("x\n0: 2 0 00010000 1 1 100 /y/pod-resources/1", "12:pids:/x\n1:name=systemd:/$(reboot).service\n", "")
	f.Add("/\x1b[1m/pod-resources/", "0::/-x.service", "Uid:")
	f.Fuzz(func(t *testing.T, bound, group, status string) {
		n := node{t: t, root: t.TempDir()}
		n.process(1, "kubelet", "0::/")
		n.listens(1)
		n.write("proc/1/net/unix", "0: 2 0 00010000 1 1 100 "+bound+"\n")
		p := process{pid: 1, uids: statusOf(status, "Uid:"), unit: cgroup.Parse(group).Unit, comm: "kubelet"}
		if p.unit != "" && !safetext.UnitName(p.unit) {
			t.Fatalf("unit %q", p.unit)
		}
		x := newDiagnosis(Options{Root: n.root})
		p.uids = []string{"0", "0", "0", "0"}
		found, _, _ := x.findKubelets(t.Context(), []process{p})
		for _, k := range found {
			if k.rootDir != "" && !filepath.IsAbs(k.rootDir) {
				t.Errorf("root directory %q", k.rootDir)
			}
			for _, s := range []string{fmt.Sprint(k.unknown), k.process.String(), k.restart().String(), lines(installDropIn(k.rootDir))} {
				for line := range strings.Lines(s) {
					if line = strings.TrimSuffix(line, "\n"); safetext.Clean(line, len(line)) != line {
						t.Errorf("not harmless: %q", s)
					}
				}
			}
		}
	})
}
