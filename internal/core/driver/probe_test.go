package driver

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
)

func TestProbeCallsProbeAlone(t *testing.T) {
	_, socket := paths(t)
	f := &fakeDriver{}
	start(t, socket, f)
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	first := ask(t, c)
	for i := range 3 {
		r := c.Ask(t.Context(), Probing, nil)
		expectReady(t, r)
		if r.Connection != first.Connection || r.Connection == 0 {
			t.Errorf("over connection %d, want %d", r.Connection, first.Connection)
		}
		if probes, others := f.called("Probe"), f.called("GetPluginInfo")+f.called("NodeGetInfo"); probes != 2+i || others != 2 {
			t.Errorf("%d calls of Probe, %d others", probes, others)
		}
	}
	expectReady(t, ask(t, c))
	if n := f.called("Probe"); n != 4 {
		t.Errorf("Ask called Probe: %d calls", n)
	}
}

// A driver that does not implement Probe stays Ready.
func TestProbeThatIsNotImplemented(t *testing.T) {
	_, socket := paths(t)
	f := &fakeDriver{ready: fails[*csi.ProbeResponse](codes.Unimplemented, "")}
	start(t, socket, f)
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	expectReady(t, ask(t, c))
	expectReady(t, c.Ask(t.Context(), Probing, nil))
}

// A silent driver is probed over the kept connection, also by Ask, until it answers.
func TestProbeThatIsNotAnswered(t *testing.T) {
	_, socket := paths(t)
	f := &fakeDriver{}
	start(t, socket, f)
	c := client(t, config.Connection{Name: name, Socket: socket, Timeout: 300 * time.Millisecond}, nil)
	c.cfg.Timeout = 20 * time.Second
	expectReady(t, ask(t, c))
	kept := c.conn
	c.cfg.Timeout = 300 * time.Millisecond
	f.set(func() { f.ready = hang[*csi.ProbeResponse] })
	for i, do := range []func() status.Report{func() status.Report { return c.Ask(t.Context(), Probing, nil) }, func() status.Report { return ask(t, c) }} {
		r := do()
		if r.Driver != status.Starting || !r.Silent || !strings.Contains(r.Reason, "did not answer Probe within 300ms") {
			t.Errorf("%d: %+v", i, r)
		}
	}
	c.cfg.Timeout = 20 * time.Second
	f.set(func() { f.ready = nil })
	expectReady(t, ask(t, c))
	if n := f.called("GetPluginInfo"); c.conn != kept || n != 1 {
		t.Errorf("asked over another connection, or all again: %d calls of GetPluginInfo", n)
	}
	// After a minute of silence the connection is replaced.
	c.conn.silentSince = time.Now().Add(-maxSilence)
	expectReady(t, ask(t, c))
	if c.conn == kept || f.called("GetPluginInfo") != 2 {
		t.Error("asked over the connection that was silent for a minute")
	}
}

// A driver that is not ready is asked everything again.
func TestProbeThatFails(t *testing.T) {
	_, socket := paths(t)
	f := &fakeDriver{}
	start(t, socket, f)
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	expectReady(t, ask(t, c))
	f.set(func() { f.ready = says(&csi.ProbeResponse{Ready: wrapperspb.Bool(false)}) })
	if r := c.Ask(t.Context(), Probing, nil); r.Driver != status.Starting || r.Silent {
		t.Errorf("%+v", r)
	}
	f.set(func() { f.ready = nil })
	expectReady(t, ask(t, c))
	if n := f.called("NodeGetInfo"); n != 2 {
		t.Errorf("%d calls of NodeGetInfo, want 2", n)
	}
}

// A connection that breaks during a Probe gives a hint.
func TestProbeOfADriverThatEnds(t *testing.T) {
	_, socket := paths(t)
	f := &fakeDriver{}
	stop := start(t, socket, f)
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	expectReady(t, ask(t, c))
	f.set(func() { f.ready = hang[*csi.ProbeResponse] })
	report := make(chan status.Report, 1)
	go func() { report <- c.Ask(t.Context(), Probing, nil) }()
	for f.called("Probe") < 2 {
		time.Sleep(time.Millisecond)
	}
	stop()
	if r := <-report; r.Driver == status.Ready || r.Silent {
		t.Errorf("%+v", r)
	}
	expectHint(t, c, "the driver ended")
	if r := ask(t, c); r.Driver != status.Absent {
		t.Errorf("%+v", r)
	}
}

// Only Probe and NodeGetInfo can be expensive for a driver.
func TestConnectionOfExpensiveCalls(t *testing.T) {
	_, socket := paths(t)
	f := &fakeDriver{info: fails[*csi.GetPluginInfoResponse](codes.Internal, "")}
	start(t, socket, f)
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	if r := ask(t, c); r.Connection != 0 {
		t.Errorf("without GetPluginInfo: %+v", r)
	}
	f.set(func() { f.info, f.node = nil, fails[*csi.NodeGetInfoResponse](codes.Internal, "") })
	if r := ask(t, c); r.Connection != 1 {
		t.Errorf("without NodeGetInfo: %+v", r)
	}
}

// After a hint a driver that answered, but is not ready, is not called unless its socket is
// another.
func TestAskAfterAHint(t *testing.T) {
	_, socket := paths(t)
	f := &fakeDriver{node: fails[*csi.NodeGetInfoResponse](codes.Unavailable, "no controller")}
	stop := start(t, socket, f)
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	again := func() status.Report { return c.Ask(t.Context(), Hinted, func(status.Report) {}) }
	first := ask(t, c)
	if r := again(); r.Driver != "" || f.called("NodeGetInfo") != 1 {
		t.Errorf("%+v after %d calls", r, f.called("NodeGetInfo"))
	}
	if r := ask(t, c); r.Driver != status.Starting || f.called("NodeGetInfo") != 2 {
		t.Errorf("asked: %+v after %d calls", r, f.called("NodeGetInfo"))
	}
	stop()
	must(t, os.Remove(socket))
	if r := again(); r.Driver != status.Absent {
		t.Errorf("without a driver: %+v", r)
	}
	start(t, socket, f)
	if r := again(); r.Driver == "" || r.Connection == first.Connection || f.called("NodeGetInfo") != 3 {
		t.Errorf("another driver: %+v after %d calls", r, f.called("NodeGetInfo"))
	}
	c.last = status.Report{Reason: interrupted.reason}
	if r := again(); r.Driver == "" || f.called("NodeGetInfo") != 4 {
		t.Errorf("after an inquiry that was interrupted: %+v", r)
	}
	f.set(func() { f.node = nil })
	if r := again(); r.Driver != "" {
		t.Errorf("ready without a change: %+v", r)
	}
	expectReady(t, ask(t, c))
	expectReady(t, again())
}
