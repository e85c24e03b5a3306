package demo

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/demo/sampledriver"

	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// plug is a registrar that serves one registration socket.
type plug struct {
	registration.UnimplementedRegistrationServer
	info   *registration.PluginInfo
	status chan *registration.RegistrationStatus // one for each notification
}

func (p *plug) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return p.info, nil
}

func (p *plug) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	p.status <- s
	return &registration.RegistrationStatusResponse{}, nil
}

// serve serves the plug at the path until the returned function is called, which leaves
// the path to the caller.
func serve(t *testing.T, p *plug, path string) (stop func()) {
	t.Helper()
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, p)
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	return func() {
		server.Stop()
		if err := <-done; err != nil {
			t.Errorf("Serve = %v", err)
		}
	}
}

func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "x")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// startKubelet runs a stand-in kubelet on the folder until the test ends.
func startKubelet(t *testing.T, dir string) *chronicle {
	t.Helper()
	events := newChronicle()
	k, err := NewKubelet(dir, events.add)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- k.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run = %v", err)
		}
	})
	return events
}

// startDriver runs a sample driver until the test ends.
func startDriver(t *testing.T, dir string) (socket string) {
	t.Helper()
	socket = filepath.Join(dir, "csi.sock")
	d := &sampledriver.Driver{Name: "a.example", Version: "1", NodeID: "n1", Data: dir, Log: slog.New(slog.DiscardHandler)}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Serve(ctx, socket) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve = %v", err)
		}
	})
	for deadline := time.Now().Add(5 * time.Second); ; {
		if _, err := os.Stat(socket); err == nil {
			return socket
		} else if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
}

func await(t *testing.T, c *chronicle, place int, match func(Event) bool) Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	e, err := c.await(ctx, place, match)
	if err != nil {
		t.Fatalf("%v; there was %v", err, c.since(place))
	}
	return e
}

func TestKubeletRegisters(t *testing.T) {
	t.Parallel()
	registry := shortDir(t)
	socket := filepath.Join(registry, "a.example-reg.sock")
	p := &plug{status: make(chan *registration.RegistrationStatus, 8), info: &registration.PluginInfo{
		Type: registration.CSIPlugin, Name: "a.example", Endpoint: startDriver(t, shortDir(t)), SupportedVersions: []string{"1.0.0"},
	}}
	events := startKubelet(t, registry)
	stop := serve(t, p, socket)

	got := await(t, events, 0, is(Registered, socket))
	if got.Driver != "a.example" || got.NodeID != "n1" {
		t.Errorf("registered %q on %q", got.Driver, got.NodeID)
	}
	if s := <-p.status; !s.GetPluginRegistered() || s.GetError() != "" {
		t.Errorf("was notified of %v", s)
	}

	// A registrar that is dead or alive is nothing that a kubelet sees.
	place := events.now()
	stop()
	for range 2 {
		await(t, events, events.now(), is(Reconciled, ""))
	}
	for _, e := range events.since(place) {
		if e.What != Reconciled {
			t.Errorf("%s without cause", e.What)
		}
	}

	// Another socket at the path: away, and registered anew.
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	stop = serve(t, p, socket)
	defer stop()
	await(t, events, place, is(Registered, socket))
	place = events.now()
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	await(t, events, place, is(Deregistered, socket))
	happened := map[Happening]int{}
	for _, e := range events.since(0) {
		happened[e.What]++
	}
	if happened[Registered] != 2 || happened[Deregistered] != 2 {
		t.Errorf("%d registrations and %d deregistrations, want 2 and 2", happened[Registered], happened[Deregistered])
	}
}

func TestKubeletRefuses(t *testing.T) {
	t.Parallel()
	driver := startDriver(t, shortDir(t))
	for name, tt := range map[string]struct {
		info *registration.PluginInfo
		want string
	}{
		"no CSI plugin": {&registration.PluginInfo{Type: registration.DevicePlugin, Name: "a.example", Endpoint: driver, SupportedVersions: []string{"1.0.0"}}, "not a CSI plugin"},
		"version 2":     {&registration.PluginInfo{Type: registration.CSIPlugin, Name: "a.example", Endpoint: driver, SupportedVersions: []string{"2.0.0"}}, "no version"},
		"no endpoint":   {&registration.PluginInfo{Type: registration.CSIPlugin, Name: "a.example", Endpoint: "/nowhere/csi.sock", SupportedVersions: []string{"1.0.0"}}, "cannot see"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			registry := shortDir(t)
			socket := filepath.Join(registry, "a.example-reg.sock")
			p := &plug{info: tt.info, status: make(chan *registration.RegistrationStatus, 8)}
			defer serve(t, p, socket)() // before the kubelet: it looks at what is there already
			events := startKubelet(t, registry)
			if got := await(t, events, 0, is(Refused, socket)); !strings.Contains(got.Err.Error(), tt.want) {
				t.Errorf("refused: %v, want %q", got.Err, tt.want)
			}
			if s := <-p.status; s.GetPluginRegistered() || !strings.Contains(s.GetError(), tt.want) {
				t.Errorf("was notified of %v", s)
			}
		})
	}
}

func TestKubeletIgnores(t *testing.T) {
	t.Parallel()
	registry := shortDir(t)
	p := &plug{status: make(chan *registration.RegistrationStatus, 8), info: &registration.PluginInfo{Type: registration.CSIPlugin}}
	events := startKubelet(t, registry)
	defer serve(t, p, filepath.Join(registry, ".a-reg.sock"))()
	if err := os.WriteFile(filepath.Join(registry, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		await(t, events, events.now(), is(Reconciled, ""))
	}
	for _, e := range events.since(0) {
		if e.What != Reconciled {
			t.Errorf("%s %s", e.Socket, e.What)
		}
	}
}

func TestKubeletNeedsItsFolder(t *testing.T) {
	_, err := NewKubelet(filepath.Join(t.TempDir(), "missing"), func(Event) {})
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("NewKubelet = %v", err)
	}
}
