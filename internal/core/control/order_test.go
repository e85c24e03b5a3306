package control

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/test/fake"
)

// changing is a Backend whose status changes right after it was read.
type changing struct {
	Backend
	version string
	changed chan struct{}
}

func (b *changing) Changed() <-chan struct{} { return b.changed }

func (b *changing) Status() status.Document {
	d := status.Document{Version: b.version}
	if b.version == "1" {
		b.version = "2"
		close(b.changed)
		b.changed = make(chan struct{})
	}
	return d
}

// TestChangeDuringStatus checks that a change while the status is read is not missed.
func TestChangeDuringStatus(t *testing.T) {
	b := &changing{version: "1", changed: make(chan struct{})}
	s := &snapshot[string]{render: func(d status.Document) string { return d.Version }}
	if got, _ := s.get(b); got != "1" {
		t.Errorf("the first is %s", got)
	}
	if got, _ := s.get(b); got != "2" {
		t.Errorf("still %s", got)
	}
}

// TestLockFile checks that other users cannot open the lock, and so not hold it, and that no link
// is followed.
func TestLockFile(t *testing.T) {
	dir := fake.ShortDir(t)
	path := filepath.Join(dir, "lock")
	if err := os.Symlink(filepath.Join(dir, "elsewhere"), path); err != nil {
		t.Fatal(err)
	}
	if unlock, err := lock(path); err == nil {
		unlock()
		t.Error("a link was followed")
	}
	file := filepath.Join(dir, "new")
	unlock, err := lock(file)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	if info, err := os.Lstat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

// TestClosedConnectionsDoNotCount checks that the limit of the public port counts open connections
// alone, and that the oldest of several is closed.
func TestClosedConnectionsDoNotCount(t *testing.T) {
	hook := closeOldest(2)
	conns := map[string]*countedConn{}
	on := func(state http.ConnState, name string) {
		if conns[name] == nil {
			conns[name] = &countedConn{}
		}
		hook(conns[name], state)
	}
	on(http.StateNew, "first")
	for _, name := range []string{"second", "third"} {
		on(http.StateNew, name)
		on(http.StateClosed, name)
	}
	on(http.StateNew, "fourth")
	for name, c := range conns {
		if c.closed > 0 {
			t.Errorf("%s was closed with two open", name)
		}
	}
	on(http.StateNew, "fifth")
	if conns["first"].closed != 1 || conns["fourth"].closed != 0 || conns["fifth"].closed != 0 {
		t.Errorf("closed: first %d, fourth %d, fifth %d", conns["first"].closed, conns["fourth"].closed, conns["fifth"].closed)
	}
}

type countedConn struct {
	net.Conn
	closed int
}

func (c *countedConn) Close() error { c.closed++; return nil }

// TestReadyzOfADisabledDriver checks that a driver that is still registered while it is withdrawn
// is not ready.
func TestReadyzOfADisabledDriver(t *testing.T) {
	d := absentDriver("a.csi.example")
	d.Registration, d.State = status.Registered, status.Disabled
	if code, body, _ := do(PublicHandler(newDaemon(d)), "GET", "/readyz/a.csi.example"); code != http.StatusServiceUnavailable {
		t.Errorf("%d %s", code, body)
	}
}

// firstGone is a listener that notes whether its file was removed before it was closed.
type firstGone struct {
	net.Listener
	path string
	gone bool
}

func (l *firstGone) Close() error {
	_, err := os.Lstat(l.path)
	l.gone = errors.Is(err, fs.ErrNotExist)
	return l.Listener.Close()
}

// TestFileGoesBeforeItsListener checks the order of Close: a client must not connect to a socket
// that is about to close.
func TestFileGoesBeforeItsListener(t *testing.T) {
	ln, err := Listen(t.Context(), filepath.Join(fake.ShortDir(t), "control.sock"))
	if err != nil {
		t.Fatal(err)
	}
	own := ln.(*ownListener)
	checked := &firstGone{Listener: own.Listener, path: own.Addr().String()}
	own.Listener = checked
	if err := own.Close(); err != nil || !checked.gone {
		t.Errorf("%v, file removed before: %t", err, checked.gone)
	}
}

// TestAbandonedConnectionIsClosed checks that a client whose context ends while it connects leaves
// no connection.
func TestAbandonedConnectionIsClosed(t *testing.T) {
	path := filepath.Join(fake.ShortDir(t), "control.sock")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	fake.CheckLeaks(t)
	ctx, end := context.WithCancel(t.Context())
	end()
	for range 50 {
		if c, err := NewClient(path).dial(ctx); err == nil { // it was faster
			c.Close()
		}
	}
}

// pipeListener accepts one connection.
type pipeListener chan net.Conn

func (l pipeListener) Accept() (net.Conn, error) {
	if c, ok := <-l; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}
func (l pipeListener) Close() error { return nil }
func (pipeListener) Addr() net.Addr { return &net.UnixAddr{Name: "/s", Net: "unix"} }

// TestPublicConnectionsEndAfterFiveSeconds checks that a client of the public port that does not
// read its answer, or does not send its request, is left after five seconds.
func TestPublicConnectionsEndAfterFiveSeconds(t *testing.T) {
	const request = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
	for name, sent := range map[string]string{"reads no answer": request + "\r\n", "sends no body": request + "Content-Length: 9\r\n\r\n"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client, server := net.Pipe()
				l := make(pipeListener, 1)
				l <- server
				ctx, stop := context.WithCancel(t.Context())
				var ended atomic.Int64 // time.Duration
				begun := time.Now()
				h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					_, err := io.ReadAll(r.Body)
					_, _ = w.Write(make([]byte, 1<<20))
					if name == "sends no body" && err == nil {
						t.Error("the body was read")
					}
					ended.Store(int64(time.Since(begun)))
				})
				var serving sync.WaitGroup
				serving.Go(func() { _ = ServePublic(ctx, l, h, discard()) })
				if _, err := io.WriteString(client, sent); err != nil {
					t.Error(err)
				}
				time.Sleep(time.Minute)
				if after := time.Duration(ended.Load()); after != 5*time.Second {
					t.Errorf("ended after %s", after)
				}
				close(l)
				stop()
				serving.Wait()
				client.Close()
			})
		})
	}
}
