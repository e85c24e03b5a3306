package system

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"csi-registrar/internal/test/e2e/built"
)

const (
	nfsDir = "/var/lib/kubelet/plugins/csi-nfsplugin"
	moves  = 1000 // of the link between two instances
)

// caller calls a driver like the kubelet, over a new connection each time, until it is stopped.
type caller struct {
	calls atomic.Int64
	stop  context.CancelFunc
	done  sync.WaitGroup

	mu     sync.Mutex
	failed []error
}

func call(t testing.TB, n *node, socket string) *caller {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	c := &caller{stop: stop}
	c.done.Go(func() {
		for ctx.Err() == nil {
			if err := callOnce(ctx, n, socket); err != nil && ctx.Err() == nil {
				c.mu.Lock()
				c.failed = append(c.failed, err)
				c.mu.Unlock()
			}
			c.calls.Add(1)
		}
	})
	return c
}

func callOnce(ctx context.Context, n *node, socket string) error {
	conn, err := grpc.NewClient("passthrough:///driver", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return dialInside(n, socket) }))
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{})
	return err
}

// dialInside connects from the machine's network namespace, as its kubelet does: the kernel lists a
// connection in the namespace of the process that made it.
func dialInside(n *node, socket string) (net.Conn, error) {
	type dialled struct {
		conn net.Conn
		err  error
	}
	done := make(chan dialled)
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
		ns, err := os.Open(n.Path("/proc/1/ns/net"))
		if err == nil {
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
			ns.Close()
		}
		if err != nil {
			done <- dialled{nil, err}
			return
		}
		conn, err := net.Dial("unix", socket)
		done <- dialled{conn, err}
	}()
	d := <-done
	return d.conn, d.err
}

// neverFailed ends the calls and checks that none has failed.
func (c *caller) neverFailed(t testing.TB, what string) {
	t.Helper()
	c.stop()
	c.done.Wait()
	t.Logf("%s: %d calls, %d failed", what, c.calls.Load(), len(c.failed))
	if len(c.failed) > 0 {
		t.Errorf("%s: %d of %d calls failed, the first: %v", what, len(c.failed), c.calls.Load(), c.failed[0])
	}
	if c.calls.Load() < 10 {
		t.Errorf("%s: only %d calls", what, c.calls.Load())
	}
}

// TestUpgradeOfADriver upgrades a driver with the units of the example, and moves the link between
// two instances a thousand times. No call fails, and the kubelet sees nothing.
func TestUpgradeOfADriver(t *testing.T) {
	t.Parallel()
	n := emptyNode(t, "trixie")
	file, dropIn := example(t, "nfs", "*.toml")
	n.Write("/etc/csi-registrar/conf.d/"+file, dropIn)
	n.drivers = []string{"nfs.csi.k8s.io"}
	_, units := example(t, "upgrade", "csi-nfs@.service")
	n.Write("/etc/systemd/system/csi-nfs@.service", units)
	_, script := example(t, "upgrade", "csi-driver-upgrade")
	n.WriteMode("/usr/local/sbin/csi-driver-upgrade", script, 0o755)
	driver, err := os.ReadFile(built.Command(t, "upstream"))
	if err != nil {
		t.Fatal(err)
	}
	n.WriteMode("/usr/local/bin/nfsplugin", string(driver), 0o755)
	n.Chroot("systemctl", "enable", "csi-nfs@a.service")
	n.Boot()
	n.registered(0)
	mark, link := n.mark(), n.Path(nfsDir+"/csi.sock")
	upgrade := func() { n.Run("/usr/local/sbin/csi-driver-upgrade", "csi-nfs", nfsDir) }
	serves := func(instance string, others ...string) {
		t.Helper()
		if to, err := os.Readlink(link); to != instance+".sock" || err != nil {
			t.Errorf("the link points at %s, %v", to, err)
		}
		if state := n.show("csi-nfs@"+instance, "ActiveState"); state != "active" {
			t.Errorf("csi-nfs@%s is %s", instance, state)
		}
		for _, other := range others {
			if state := n.show("csi-nfs@"+other, "ActiveState"); state != "inactive" {
				t.Errorf("csi-nfs@%s is %s", other, state)
			}
		}
	}

	serves("a", "b")
	calls := call(t, n, link)
	upgrade()
	serves("b", "a")
	upgrade()
	serves("a", "b")
	// An upgrade that was interrupted after the move is completed by the next one.
	n.Run("systemctl", "start", "csi-nfs@b.service")
	before := n.show("csi-nfs@b", "MainPID")
	upgrade()
	serves("b", "a")
	if n.show("csi-nfs@b", "MainPID") == before {
		t.Error("the instance of the interrupted upgrade serves, which may have the old program")
	}
	// An upgrade whose new instance does not start changes nothing.
	n.Write("/etc/systemd/system/csi-nfs@a.service.d/broken.conf", "[Service]\nRestart=no\nExecStart=\nExecStart=/bin/false\n")
	n.Run("systemctl", "daemon-reload")
	if out, err := n.Try("/usr/local/sbin/csi-driver-upgrade", "csi-nfs", nfsDir); err == nil {
		t.Errorf("an upgrade to a driver that does not start: %s", out)
	}
	serves("b")
	calls.neverFailed(t, "upgrades")

	n.Run("sh", "-c", "rm -r /etc/systemd/system/csi-nfs@a.service.d && systemctl daemon-reload && systemctl restart csi-nfs@a.service")
	calls = call(t, n, link)
	for i := range moves {
		temporary := filepath.Join(filepath.Dir(link), ".next")
		if err := os.Symlink(string("ab"[i%2])+".sock", temporary); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(temporary, link); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond) // time for some calls to each instance
	}
	calls.neverFailed(t, strconv.Itoa(moves)+" moves")
	n.waited()
	n.quiet(mark)

	// drain waits for an open connection, and for nothing else.
	held, err := dialInside(n, n.Path(nfsDir+"/a.sock"))
	if err != nil {
		t.Fatal(err)
	}
	if out, err := n.Try("csi-registrar", "drain", "--socket", nfsDir+"/a.sock", "--timeout", "1s"); err == nil || !strings.Contains(out, "connections to") {
		t.Errorf("drain beside an open connection: %v: %s", err, out)
	}
	// A Probe of supervise may be open.
	n.Run("csi-registrar", "drain", "--socket", nfsDir+"/b.sock", "--timeout", "1m")
	held.Close()
	n.Run("csi-registrar", "drain", "--socket", nfsDir+"/a.sock", "--timeout", "1m")
}
