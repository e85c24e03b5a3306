package driver

import (
	"context"
	"errors"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/worker"
	"csi-registrar/internal/test/fake"
)

// TestConnectionOfAGoneSocketIsClosed checks that a driver whose socket is gone loses its
// connection, although it still serves it.
func TestConnectionOfAGoneSocketIsClosed(t *testing.T) {
	_, socket := paths(t)
	start(t, socket, &fakeDriver{})
	before := fake.Descriptors(t)
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	expectReady(t, ask(t, c))
	must(t, os.Remove(socket))
	if r := ask(t, c); r.Driver != status.Absent {
		t.Errorf("%+v without a socket", r)
	}
	for deadline := time.Now().Add(20 * time.Second); fake.Descriptors(t) > before; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the connection is still open")
		}
	}
}

// closes is a box that is closed.
type closes struct {
	box
	closed bool
}

func (c *closes) Close() { c.closed = true }

// TestHintsEndWithTheClient checks that a closed client needs no watches any more.
func TestHintsEndWithTheClient(t *testing.T) {
	hints := &closes{box: make(box, 1)}
	New(config.Connection{Socket: "/none", Endpoint: "/none"}, nil, hints, worker.NewPool()).Close()
	if !hints.closed {
		t.Error("they are not closed")
	}
}

// TestBreaksAfterTheLastAnswer checks that the end of a connection gives a hint, however soon it
// follows the last answer.
func TestBreaksAfterTheLastAnswer(t *testing.T) {
	_, socket := paths(t)
	var after atomic.Int64 // nanoseconds
	closing := &closer{Listener: listen(t, socket)}
	f := &fakeDriver{node: func(context.Context) (*csi.NodeGetInfoResponse, error) {
		time.AfterFunc(time.Duration(after.Load()), closing.close)
		return &csi.NodeGetInfoResponse{NodeId: "node-1"}, nil
	}}
	t.Cleanup(f.serve(closing))
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	for range 150 {
		after.Add(10_000)
		if r := ask(t, c); r.Driver == status.Ready {
			expectHint(t, c, "the connection broke")
		}
	}
}

// endedContext has ended, but ends no call that waits for it, as if it had ended when the call
// returned.
type endedContext struct{ context.Context }

func (endedContext) Err() error            { return context.Canceled }
func (endedContext) Done() <-chan struct{} { return nil }

// TestConnectionOfAnEndedContextIsClosed checks that a connection is closed that nobody waits for
// any more.
func TestConnectionOfAnEndedContextIsClosed(t *testing.T) {
	_, socket := paths(t)
	start(t, socket, &fakeDriver{})
	c := client(t, config.Connection{Name: name, Socket: socket}, nil)
	fake.CheckLeaks(t)
	if l := c.lookAt(endedContext{t.Context()}, c.socket, true); l.finding != interrupted {
		t.Errorf("%+v", l)
	}
}

// TestConnectionWithoutACallIsClosed checks that Live closes a connection that gRPC has not used.
func TestConnectionWithoutACallIsClosed(t *testing.T) {
	_, socket := paths(t)
	start(t, socket, &fakeDriver{})
	fake.CheckLeaks(t)
	noCall := func(csi.IdentityClient, context.Context, *csi.ProbeRequest, ...grpc.CallOption) (*csi.ProbeResponse, error) {
		return nil, errors.New("interrupted")
	}
	if _, err := callOnce(t.Context(), worker.NewPool(), trust.Anybody, socket, "Probe", noCall); err == nil {
		t.Error("no error")
	}
}
