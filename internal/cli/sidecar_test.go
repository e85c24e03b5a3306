package cli

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/core/sidecar"
	"csi-registrar/internal/daemon"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/test/fake"
)

// With node-driver-registrar's flags the driver has no name until it answers. The table shows it
// nevertheless, and the directory is that of the command line.
func TestSidecarBeforeTheDriver(t *testing.T) {
	t.Parallel() // it mostly waits
	root := fake.ShortDir(t)
	registry := filepath.Join(root, "registration")
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	s := newSession()
	go func() {
		o := daemon.Options{Source: config.Source{Root: root}, Version: "test", Getenv: s.env.getenv, Stderr: s.env.stderr}
		ended <- daemon.RunSidecar(ctx, o, sidecar.Options{Socket: filepath.Join(root, "csi.sock"), Endpoint: "/e/csi.sock", RegistryDir: registry, Timeout: time.Second})
	}()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	s.stderr.await(t, "waiting for the driver")
	s.stderr.await(t, "msg=ready")

	code, stdout, stderr := try(t, "status", "--config-root", root)
	lines := strings.Split(stdout, "\n")
	if code != exitFailed || stderr != "" || !strings.HasPrefix(lines[0], "DRIVER") || !strings.HasPrefix(lines[1], "(no name yet)  absent") {
		t.Errorf("%d %q\n%s", code, stderr, stdout)
	}
	if _, stdout, _ := try(t, "status", "--json", "--config-root", root); !strings.Contains(stdout, `"plugins_registry": "`+registry+`"`) {
		t.Errorf("no %s in %s", registry, stdout)
	}
	if _, _, stderr := try(t, "wait", "--timeout", "2s", "--config-root", root); !strings.Contains(stderr, "\n  (no name yet): absent: ") {
		t.Errorf("wait says %q", stderr)
	}
}
