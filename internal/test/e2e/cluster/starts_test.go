package cluster

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"csi-registrar/internal/test/e2e/harness"
	"csi-registrar/internal/test/fake"
)

const (
	// checkInterval is CHECK_INTERVAL of the example.
	checkInterval = 5 * time.Second
	// controllerLimit is how much later than the reporter's next check the taint may be back.
	controllerLimit = 5 * time.Second
	// slowNodeInfo keeps the driver out of the CSINode for longer than an interval.
	slowNodeInfo = checkInterval + 3*time.Second
	// startsOfANode is the number of starts with one control plane.
	startsOfANode = 20
)

// probeLog has the times at which a driver answered Probe.
type probeLog struct {
	mu sync.Mutex
	at []time.Time
}

// note is a grpc.UnaryServerInterceptor.
func (l *probeLog) note(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	answer, err := handler(ctx, req)
	if err == nil && path.Base(info.FullMethod) == fake.Probe {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.at = append(l.at, time.Now())
	}
	return answer, err
}

// last returns the time of the last answer before a time.
func (l *probeLog) last(before time.Time) (last time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, at := range l.at {
		if at.Before(before) {
			last = at
		}
	}
	return last
}

// starts starts the parts of a node in random order, and ends its driver.
type starts struct {
	*gatedNode
	random *rand.Rand
	// registrar starts what registers the driver.
	registrar func()
	// report starts the reporter.
	report    func() *harness.Process
	reporting *harness.Process

	// early has the times from the removal of the taint until the CSINode listed the driver.
	early []time.Duration
	// unanswered has the times from the last answer to Probe to the removal of the taint, if too
	// long.
	unanswered []time.Duration
	// back has the times from the end of the driver until the taint was back.
	back []time.Duration
}

// start cuts the power of the node and starts all its parts in random order, up to two seconds
// apart. It returns when the taint was removed. The Node object is kept or deleted.
func (s *starts) start(kept, slow bool) {
	s.Helper()
	s.off()
	if !kept {
		s.deleteNode()
	}
	s.driver.Set(func(a *fake.Answers) {
		a.Hang, a.Delay = nil, nil
		if slow {
			a.Delay = map[string]time.Duration{fake.NodeGetInfo: slowNodeInfo}
		}
	})
	version := s.now()
	parts := []func(){s.c.launchKubelet, s.registrar, func() { s.driver.Start() }, func() { s.reporting = s.report() }}
	for _, i := range s.random.Perm(len(parts)) {
		parts[i]()
		time.Sleep(time.Duration(s.random.Int64N(int64(2 * time.Second))))
	}
	gone := s.seen(version, "the taint is gone", func(c change) bool { return c.object == "node" && !c.deleted && !c.tainted })
	if age := gone.at.Sub(s.probes.last(gone.at)); age > checkInterval {
		s.unanswered = append(s.unanswered, age)
	}
	if kept {
		return // and so is the CSINode
	}
	listed := s.seen(version, "the CSINode has the driver", func(c change) bool { return c.listed })
	if gone.version < listed.version {
		s.early = append(s.early, listed.at.Sub(gone.at))
	}
}

// die ends the driver, or makes it hang, and returns when the taint is back.
func (s *starts) die(how func()) {
	s.Helper()
	time.Sleep(time.Duration(s.random.Int64N(int64(checkInterval))))
	version, died := s.now(), time.Now()
	how()
	tainted := s.seen(version, "the taint is back", func(c change) bool { return c.object == "node" && c.tainted })
	s.back = append(s.back, tainted.at.Sub(died))
	s.reporting.End(syscall.SIGKILL, time.Minute)
	for _, c := range s.log.since(tainted.version) {
		if c.object == "node" && !c.tainted {
			s.Errorf("the taint is gone again while the driver is dead: %+v", c)
		}
	}
}

// newStarts prepares a node with a seed for the order of events. Additional variables of the
// reporter replace those of the example.
func newStarts(t *testing.T, seed uint64, variables ...string) *starts {
	t.Helper()
	g := newGatedNode(t, exampleFile(t, "readiness/rule.yaml"))
	g.apply(exampleFile(t, "readiness/reporter.yaml"))
	g.deleteNode()
	g.on()
	pod := g.reporterPod()
	return &starts{
		gatedNode: g, random: rand.New(rand.NewPCG(seed, 0)), registrar: g.startDaemon,
		report: func() *harness.Process { return g.report(pod, variables) },
	}
}

// eachSeed runs a test for a total of READINESS_STARTS starts, with READINESS_SEED and the seeds
// after it.
func eachSeed(t *testing.T, test func(t *testing.T, seed uint64, plays int)) {
	t.Helper()
	number := func(name string, otherwise int) int {
		text := os.Getenv(name)
		if text == "" {
			return otherwise
		}
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return n
	}
	all := number("READINESS_STARTS", 4)
	for first := 0; first < all; first += startsOfANode {
		seed := uint64(number("READINESS_SEED", 1) + first/startsOfANode)
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			test(t, seed, min(all-first, startsOfANode))
		})
	}
}

// TestTaintIsGoneOnlyForADriverThatIsListedAndServes checks that, in whatever order the parts of a
// node start, the taint is only removed when the CSINode lists the driver and the driver answered
// Probe within the reporter's last interval; and that the taint is back soon after the driver has
// ended or hangs.
func TestTaintIsGoneOnlyForADriverThatIsListedAndServes(t *testing.T) {
	eachSeed(t, func(t *testing.T, seed uint64, plays int) {
		s := newStarts(t, seed)
		for range plays {
			s.start(s.random.IntN(2) == 0, s.random.IntN(8) == 0)
			if s.random.IntN(4) == 0 {
				s.die(func() { s.driver.Set(func(a *fake.Answers) { a.Hang = map[string]bool{fake.Probe: true} }) })
			} else {
				s.die(s.driver.Kill)
			}
		}
		slices.Sort(s.back)
		most := s.back[plays-1]
		t.Logf("%d starts: the taint was gone too early in %d and %d; %d deaths: it is back after %s in the median, %s at most",
			plays, len(s.early), len(s.unanswered), plays, s.back[plays/2], most)
		if len(s.early)+len(s.unanswered) > 0 {
			t.Errorf("the taint was gone %s before the CSINode listed the driver, and %s after its last answer to Probe", s.early, s.unanswered)
		}
		if most > checkInterval+controllerLimit {
			t.Errorf("the taint is back after %s", most)
		}
	})
}

// TestSidecarsHealthzIsNoReadiness checks that with /healthz of another registrar in place of
// csi-registrar's readiness, the taint is removed too early. PEER names a program with
// node-driver-registrar's flags. If the test fails, packaging/doc/readiness.md is no longer correct
// about the sidecar.
func TestSidecarsHealthzIsNoReadiness(t *testing.T) {
	peer := os.Getenv("PEER")
	if peer == "" {
		t.Skip("PEER= names no other registrar")
	}
	eachSeed(t, func(t *testing.T, seed uint64, plays int) {
		s := newStarts(t, seed, "CHECK_ENDPOINT=http://"+exampleHTTP+"/healthz")
		s.daemon.Stop()
		var sidecar *harness.Process
		s.registrar = func() {
			sidecar = harness.StartProcess(t, "the peer", s.c.Command(peer, "--csi-address="+s.driver.Socket,
				"--kubelet-registration-path="+s.driver.Socket, "--plugin-registration-path="+s.c.n.Registry(), "--http-endpoint="+exampleHTTP))
		}
		quick := 0
		for i := range plays {
			slow := i%2 == 0
			before := len(s.early)
			s.start(false, slow)
			if !slow {
				quick += len(s.early) - before
			}
			s.reporting.End(syscall.SIGKILL, time.Minute)
			sidecar.End(syscall.SIGKILL, time.Minute)
		}
		t.Logf("%d starts, every other with a slow driver: the taint was gone before the CSINode listed the driver in %d, in %d of them with a quick one, for %s",
			plays, len(s.early), quick, s.early)
		if len(s.early) == 0 {
			t.Error("the taint was never gone too early")
		}
	})
}
