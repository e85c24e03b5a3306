package fake

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// registrar serves one registration socket.
type registrar struct {
	registration.UnimplementedRegistrationServer
	info   *registration.PluginInfo
	status chan *registration.RegistrationStatus // one for each notification
}

func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return r.info, nil
}

func (r *registrar) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	r.status <- s
	return &registration.RegistrationStatusResponse{}, nil
}

// serve serves the registrar at the path until the returned function is called, which leaves
// the socket to the caller.
func (r *registrar) serve(t *testing.T, path string) (stop func()) {
	t.Helper()
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, r)
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	return func() {
		server.GracefulStop() // answers the kubelet's last call
		if err := <-done; err != nil {
			t.Errorf("Serve = %v", err)
		}
	}
}

// events are the events of a kubelet, in order.
type events chan Event

// startKubelet runs a kubelet on the directory until the test ends.
func startKubelet(t *testing.T, dir string) events {
	t.Helper()
	all := make(events, 1000)
	k, err := StartKubelet(dir, NewAPIServer(), func(e Event) { all <- e })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := k.Stop(); err != nil {
			t.Error(err)
		}
	})
	return all
}

// next returns the next event of the kubelet, except Reconciled.
func (all events) next(t *testing.T) Event {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		select {
		case e := <-all:
			if e.What != Reconciled {
				return e
			}
		case <-deadline:
			t.Fatal("the kubelet does nothing")
		}
	}
}

// nothing checks that the kubelet reconciles twice and does nothing.
func (all events) nothing(t *testing.T) {
	t.Helper()
	for range 2 {
		if e := <-all; e.What != Reconciled {
			t.Errorf("%s %s %s without a cause", e.Socket, e.What, e.Reason)
		}
	}
}

// startDriver runs a healthy driver until the test ends.
func startDriver(t *testing.T) *Driver {
	t.Helper()
	d := NewDriver(filepath.Join(ShortDir(t), "csi.sock"), Healthy("a.example"))
	if _, err := d.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Kill)
	return d
}

func TestKubeletRegistersWhatAppearsAndDeregistersWhatIsRemoved(t *testing.T) {
	t.Parallel()
	registry := ShortDir(t)
	socket := filepath.Join(registry, "a.example-reg.sock")
	r := &registrar{status: make(chan *registration.RegistrationStatus, 8), info: &registration.PluginInfo{
		Type: registration.CSIPlugin, Name: "a.example", Endpoint: startDriver(t).Socket, SupportedVersions: []string{"1.0.0"},
	}}
	all := startKubelet(t, registry)
	stop := r.serve(t, socket)
	if e := all.next(t); e.What != Registered || e.Driver != "a.example" || e.NodeID != "id-of-a.example" {
		t.Errorf("%+v", e)
	}
	if s := <-r.status; !s.GetPluginRegistered() || s.GetError() != "" {
		t.Errorf("was notified of %v", s)
	}

	// The kubelet does not see that a registrar has died.
	stop()
	all.nothing(t)

	// Another socket at the path: deregistered, and registered again.
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	stop = r.serve(t, socket)
	defer stop()
	for _, want := range []Action{Deregistered, Registered} {
		if e := all.next(t); e.What != want {
			t.Errorf("%s, want %s", e.What, want)
		}
	}
	<-r.status
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	if e := all.next(t); e.What != Deregistered {
		t.Errorf("%+v", e)
	}
}

func TestKubeletRefuses(t *testing.T) {
	t.Parallel()
	driver := startDriver(t).Socket
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
			registry := ShortDir(t)
			r := &registrar{info: tt.info, status: make(chan *registration.RegistrationStatus, 8)}
			// before the kubelet, which also registers existing sockets
			defer r.serve(t, filepath.Join(registry, "a.example-reg.sock"))()
			all := startKubelet(t, registry)
			if e := all.next(t); e.What != Refused || !strings.Contains(e.Reason, tt.want) {
				t.Errorf("%s: %s, want %q", e.What, e.Reason, tt.want)
			}
			if s := <-r.status; s.GetPluginRegistered() || !strings.Contains(s.GetError(), tt.want) {
				t.Errorf("was notified of %v", s)
			}
		})
	}
}

func TestKubeletIgnoresHiddenSocketsAndFiles(t *testing.T) {
	t.Parallel()
	registry := ShortDir(t)
	r := &registrar{info: &registration.PluginInfo{Type: registration.CSIPlugin}}
	all := startKubelet(t, registry)
	defer r.serve(t, filepath.Join(registry, ".a-reg.sock"))()
	if err := os.WriteFile(filepath.Join(registry, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	all.nothing(t)
}
