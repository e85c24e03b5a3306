package pluginreg

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/test/fake"
)

// The kubelet ignores names that begin with a dot, and everything below such a directory.
func TestSocketsThatTheKubeletSees(t *testing.T) {
	dir := fake.ShortDir(t)
	for _, name := range []string{"sub/deeper", ".hidden"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"a.sock", "sub/deeper/b.sock", ".c.sock", ".hidden/d.sock"} {
		l, err := net.Listen("unix", filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("a.sock", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	got, err := Sockets(dir)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(got)
	want := []string{filepath.Join(dir, "a.sock"), filepath.Join(dir, "link"), filepath.Join(dir, "sub/deeper/b.sock")}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got, err := Sockets(dir + "/missing"); got != nil || err != nil {
		t.Errorf("a missing directory has %q: %v", got, err)
	}
	if got, err := Sockets(dir + "/file"); got != nil || !errors.Is(err, syscall.ENOTDIR) {
		t.Errorf("a directory that cannot be read has %q: %v", got, err)
	}
}

// other is a registrar with a large answer.
type other struct {
	registerapi.UnimplementedRegistrationServer
	name   string
	header string
}

func (o *other) GetInfo(ctx context.Context, _ *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	if err := grpc.SetHeader(ctx, metadata.Pairs("x", o.header)); err != nil {
		return nil, err
	}
	return &registerapi.PluginInfo{Type: registerapi.CSIPlugin, Name: o.name}, nil
}

// A registrar whose answer exceeds 64 KiB, or whose headers exceed 16 KiB, has not answered. The
// sizes are those that are promised, not the constants.
func TestLimitAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		answer, header int
		ok             bool
	}{
		"answer just below":  {answer: 64<<10 - 100, ok: true},
		"answer just above":  {answer: 64 << 10},
		"headers just below": {header: 16<<10 - 500, ok: true},
		"headers just above": {header: 16 << 10},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(fake.ShortDir(t), "s")
			l, err := net.Listen("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			server := grpc.NewServer()
			registerapi.RegisterRegistrationServer(server, &other{name: strings.Repeat("n", c.answer), header: strings.Repeat("h", c.header)})
			served := make(chan error, 1)
			go func() { served <- server.Serve(l) }()
			defer func() { server.Stop(); <-served }()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			info, cred, err := GetInfo(ctx, path)
			if (err == nil) != c.ok || cred.PID != os.Getpid() || c.ok && len(info.Name) != c.answer {
				t.Errorf("%d bytes of %v, error %v", len(info.Name), cred, err)
			}
		})
	}
}
