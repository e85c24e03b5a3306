package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/test/fake"
	"csi-registrar/internal/node/status"
)

// linkedNode is a node with a driver that has an endpoint link, and a caller that, like the
// kubelet, connects for each call.
type linkedNode struct {
	daemonNode
	socket, link  string
	deregistered  atomic.Int64
	calls, failed atomic.Int64
}

const linkedName = "linked.example"

func newLinkedNode(t *testing.T) *linkedNode {
	t.Helper()
	root := fake.ShortDir(t)
	n := &linkedNode{daemonNode: daemonNode{T: t, root: root, log: newOutput()}, socket: filepath.Join(root, "d.sock"),
		link: filepath.Join(root, "k/plugins/csi-registrar", linkedName+".sock")}
	d := fake.NewDriver(n.socket, fake.Healthy(linkedName))
	if _, err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Kill)
	manager, err := fake.StartManager(root)
	if err != nil {
		t.Fatal(err)
	}
	n.manager = manager
	kubelet, err := fake.StartKubelet(filepath.Join(root, "k/plugins_registry"), fake.NewAPIServer(), func(e fake.Event) {
		if e.What == fake.Deregistered {
			n.deregistered.Add(1)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(kubelet.Stop(), n.manager.Close()); err != nil {
			t.Error(err)
		}
	})
	conf := fmt.Sprintf("[kubelet]\nroot_dir = %q\n[driver.%q]\nsocket = %q\nsocket_owner = \"any\"\nendpoint_link = true\n", filepath.Join(root, "k"), linkedName, n.socket)
	if err := errors.Join(os.MkdirAll(filepath.Join(root, "etc/csi-registrar"), 0o755), os.WriteFile(filepath.Join(root, "etc/csi-registrar/config.toml"), []byte(conf), 0o644)); err != nil {
		t.Fatal(err)
	}
	n.start()
	n.eventually("the driver is registered", func() bool { return n.state().State == string(status.Registered) })
	// A daemon that is killed before its answer arrives loses the registration.
	n.eventually("the kubelet has the answer to its notification", kubelet.Idle)
	// That answer does not wait until the kubelet's pidfd is saved. A daemon that is killed before
	// that forgets the kubelet until it calls again.
	n.eventually("the record of the kubelet is written", func() bool {
		_, err := os.Stat(filepath.Join(root, "run/csi-registrar/state/kubelet.json"))
		return err == nil
	})
	if got := kubelet.Registered()[linkedName].Endpoint; got != n.link {
		t.Fatalf("the kubelet was told %q, want %q", got, n.link)
	}
	return n
}

// restart ends the daemon with a signal and starts another.
func (n *linkedNode) restart(s os.Signal) {
	n.Helper()
	if err := n.daemon.Process.Signal(s); err != nil {
		n.Fatal(err)
	}
	_ = n.daemon.Wait()
	n.start()
}

func (n *linkedNode) state() status.Driver {
	n.Helper()
	// Empty if the daemon does not answer.
	s, _ := control.NewClient(control.Path(n.root)).Status(n.Context())
	d, _ := s.Driver(linkedName)
	return d
}

// target returns the target of the link.
func (n *linkedNode) target() string {
	n.Helper()
	target, err := os.Readlink(n.link)
	if err != nil {
		n.Error(err)
	}
	return target
}

// call calls the driver once.
func (n *linkedNode) call(ctx context.Context) error {
	c, err := grpc.NewClient("unix:"+n.link, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	_, err = csi.NewNodeClient(c).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	return err
}

// callUntil calls the driver repeatedly until stop is called. Several callers may run in parallel.
func (n *linkedNode) callUntil() (stop func()) {
	ctx, cancel := context.WithCancel(n.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for ctx.Err() == nil {
			if err := n.call(context.WithoutCancel(ctx)); err != nil {
				n.failed.Add(1)
				n.Logf("call %d failed: %v", n.calls.Load(), err)
				time.Sleep(50 * time.Millisecond) // the kubelet waits 0.5 s before it tries again
			}
			n.calls.Add(1)
		}
	}()
	return func() { cancel(); <-ended }
}

// moreCalls waits for calls that begin after now.
func (n *linkedNode) moreCalls() {
	n.Helper()
	until := n.calls.Load() + 20
	n.eventually("calls are made", func() bool { return n.calls.Load() >= until })
}

// trace starts a recorder and waits until calls arrive there.
func (n *linkedNode) trace() (recorder *exec.Cmd, stdout, stderr *output) {
	n.Helper()
	recorder = exec.Command(os.Args[0], "trace", linkedName, "--json", "--config-root", n.root)
	recorder.Env = append(os.Environ(), asProgram+"=1")
	stdout, stderr = newOutput(), newOutput()
	recorder.Stdout, recorder.Stderr = stdout, stderr
	if err := recorder.Start(); err != nil {
		n.Fatal(err)
	}
	n.Cleanup(func() { _ = recorder.Process.Kill() })
	n.eventually("calls arrive at the recorder", func() bool { return strings.Contains(stderr.String(), "are recorded here") })
	return recorder, stdout, stderr
}

// A recording loses no registration, and no call except those that are pending in a recorder that
// is killed or frozen.
func TestTraceLosesNoCall(t *testing.T) {
	n := newLinkedNode(t)
	if n.target() != n.socket {
		t.Fatalf("the link points to %s", n.target())
	}
	want, err := strconv.ParseInt(cmp.Or(os.Getenv("TRACE_CALLS"), "0"), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	callers := int64(1)
	if want > 0 {
		callers = 8
	}
	for range callers {
		defer n.callUntil()()
	}
	if _, stdout, _ := try(t, "status", linkedName, "--config-root", n.root); !strings.Contains(stdout, "points to") {
		t.Errorf("status does not show the link:\n%s", stdout)
	}
	if _, stdout, _ := try(t, "doctor", linkedName, "--config-root", n.root); strings.Contains(stdout, "to the kubelet") || strings.Contains(stdout, "the endpoint "+n.socket+" there") {
		t.Errorf("doctor reports the link as another endpoint:\n%s", stdout)
	}
	pointsBack := func() {
		t.Helper()
		n.eventually("the link points at the driver", func() bool { return n.target() == n.socket })
	}
	type step struct {
		name  string
		lost  int64  // calls that may fail
		cause string // of its end, in the journal
		// do returns for how long the recorder missed calls, at least.
		do func(recorder *exec.Cmd, stderr *output) time.Duration
	}
	interrupt := func(recorder *exec.Cmd) {
		t.Helper()
		if err := errors.Join(recorder.Process.Signal(syscall.SIGINT), recorder.Wait()); err != nil {
			t.Error(err)
		}
	}
	missing := regexp.MustCompile(`left out: the calls of up to ([0-9.a-z]+), when they went to the driver directly`)
	steps := []step{
		{"interrupted", 0, "the recorder has ended", func(recorder *exec.Cmd, _ *output) time.Duration {
			interrupt(recorder)
			if n.target() != n.socket {
				t.Errorf("after its end the link points to %s", n.target())
			}
			return 0
		}},
		{"killed", 1, "the recorder's connection was closed", func(recorder *exec.Cmd, _ *output) time.Duration {
			_ = recorder.Process.Kill()
			_ = recorder.Wait()
			return 0 // and no summary
		}},
		// A pending call fails, and perhaps one that arrives meanwhile.
		{"frozen", 2, "the recorder sent nothing for 1.5s", func(recorder *exec.Cmd, stderr *output) time.Duration {
			began := time.Now()
			if err := recorder.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			pointsBack()
			t.Logf("a frozen recorder lost its lease after %s", time.Since(began))
			n.moreCalls()
			frozen := time.Since(began)
			if err := recorder.Process.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			n.eventually("it has the calls again", func() bool { return strings.Count(stderr.String(), "are recorded here") == 2 })
			n.moreCalls()
			interrupt(recorder)
			return frozen
		}},
		{"beside a daemon that is killed", 0, "", func(recorder *exec.Cmd, stderr *output) time.Duration {
			n.restart(syscall.SIGKILL)
			n.eventually("it has the calls again", func() bool { return strings.Count(stderr.String(), "are recorded here") == 2 })
			n.moreCalls()
			interrupt(recorder)
			return time.Nanosecond
		}},
		{"beside a daemon that is restarted", 0, "the daemon ends", func(recorder *exec.Cmd, stderr *output) time.Duration {
			n.restart(syscall.SIGTERM)
			n.eventually("it has the calls again", func() bool { return strings.Count(stderr.String(), "are recorded here") == 2 })
			interrupt(recorder)
			return time.Nanosecond
		}},
	}
	// Each step once, or random steps until TRACE_CALLS calls were made.
	for i := 0; i < len(steps) || n.calls.Load() < want; i++ {
		step := steps[i%len(steps)]
		if want > 0 {
			step = steps[rand.N(len(steps))]
		}
		before, logged := n.failed.Load(), len(n.log.String())
		recorder, stdout, stderr := n.trace()
		n.moreCalls()
		missed := step.do(recorder, stderr)
		pointsBack()
		n.moreCalls()
		if lost := n.failed.Load() - before; lost > step.lost*callers {
			t.Errorf("%s: %d calls failed, at most %d may\n%s", step.name, lost, step.lost*callers, stderr)
		}
		if got := strings.Count(stdout.String(), `NodeGetInfo"`); got < 10 {
			t.Errorf("%s: %d calls are in the record\n%s%s", step.name, got, stdout, stderr)
		}
		if step.cause != "" && !strings.Contains(n.log.String()[logged:], `cause="`+step.cause) {
			t.Errorf("%s: the log does not have the cause %q\n%s", step.name, step.cause, n.log.String()[logged:])
		}
		said := missing.FindStringSubmatch(stderr.String())
		if missed > 0 && said == nil || said != nil && !strings.Contains(stderr.String(), "trying again") {
			t.Errorf("%s: missed calls for at least %s, the summary has %q\n%s", step.name, missed, said, stderr)
		}
		if said != nil {
			// It is rounded to three digits.
			if told, err := time.ParseDuration(said[1]); err != nil || told < missed*99/100 {
				t.Errorf("%s: missed calls for at least %s, the summary has %q, %v", step.name, missed, said, err)
			}
		}
		if t.Failed() {
			break
		}
	}
	if n.deregistered.Load() > 0 || n.state().Traced {
		t.Errorf("%d deregistrations, traced: %t", n.deregistered.Load(), n.state().Traced)
	}
	if left, err := filepath.Glob(filepath.Join(filepath.Dir(n.link), ".*")); err != nil || len(left) > 0 {
		t.Errorf("%v is left, %v", left, err)
	}
	t.Logf("%d calls, %d failed", n.calls.Load(), n.failed.Load())
}
