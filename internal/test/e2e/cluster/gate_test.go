package cluster

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"

	"csi-registrar/internal/test/e2e/controlplane"
)

// gate is a proxy between the kubelet and the API server that can hold one write of the kubelet,
// before the API server gets it or before the kubelet gets the answer.
type gate struct {
	server *httptest.Server

	mu   sync.Mutex
	held *hold // the next write to hold, or the one that is held
}

// hold describes a write that is to be held.
type hold struct {
	resource string // "nodes", "csinodes"
	text     string // in the body
	answered bool   // hold the answer, not the request

	reached chan struct{} // closed when it is held
	release chan struct{} // closed when it may continue
}

type holdKey struct{}

// newGate starts a gate in the control plane's network, which ends with the test.
func newGate(t *testing.T, c *controlplane.ControlPlane) *gate {
	t.Helper()
	var listener net.Listener
	var err error
	if inside := c.Do(func() { listener, err = net.Listen("tcp", "127.0.0.1:0") }); inside != nil || err != nil {
		t.Fatal(inside, err)
	}
	g := &gate{}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "https", Host: "127.0.0.1:" + controlplane.Port})
	proxy.FlushInterval = -1 // watches
	proxy.Transport = &http.Transport{DialContext: c.Dial, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	proxy.ErrorLog = log.New(io.Discard, "", 0) // a kubelet that is killed breaks its requests
	proxy.ModifyResponse = func(resp *http.Response) error {
		if h, ok := resp.Request.Context().Value(holdKey{}).(*hold); ok {
			h.wait(resp.Request.Context())
		}
		return nil
	}
	g.server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h, err := g.match(r)
		switch {
		case err != nil:
			return // the kubelet has closed the connection
		case h != nil && h.answered:
			r = r.WithContext(context.WithValue(r.Context(), holdKey{}, h))
		case h != nil && !h.wait(r.Context()):
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	g.server.Listener.Close()
	g.server.Listener = listener
	g.server.Config.ErrorLog = proxy.ErrorLog
	g.server.StartTLS()
	t.Cleanup(func() {
		g.server.CloseClientConnections()
		g.server.Close()
	})
	return g
}

// match returns the hold that matches a request. Each hold matches once.
func (g *gate) match(r *http.Request) (*hold, error) {
	switch r.Method {
	case http.MethodGet, http.MethodDelete:
		return nil, nil
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	g.mu.Lock()
	defer g.mu.Unlock()
	h := g.held
	if h == nil || !strings.Contains(r.URL.Path, "/"+h.resource+"/"+nodeName) || !bytes.Contains(body, []byte(h.text)) {
		return nil, nil
	}
	g.held = nil
	return h, nil
}

// wait waits until the request may continue. It returns false if the kubelet has closed the
// connection.
func (h *hold) wait(ctx context.Context) bool {
	close(h.reached)
	select {
	case <-h.release:
		return true
	case <-ctx.Done():
		return false
	}
}

// hold holds the next write of the resource with a text in its body.
func (g *gate) hold(resource, text string, answered bool) *hold {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held = &hold{resource: resource, text: text, answered: answered, reached: make(chan struct{}), release: make(chan struct{})}
	return g.held
}
