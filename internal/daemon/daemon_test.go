package daemon

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"csi-registrar/internal/core/agent"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/sys/worker"
)

// The answer to an earlier stop is not about this process.
func TestAnswerToAnEarlierStopIsRemoved(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	file := StoppedFile(RunDir(n.root))
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	c, _ := n.run()
	n.await(c, "the daemon", serves)
	if _, err := os.Lstat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s: %v", file, err)
	}
}

// A driver that is disabled is not asked whether it is alive.
func TestLiveOfADisabledDriver(t *testing.T) {
	c := config.Default()
	c.Drivers = []config.Driver{config.DefaultDriver("a.example", "/none")}
	c.Drivers[0].Enabled = false
	a := agent.New(slog.New(slog.DiscardHandler), nil, "test")
	if err := a.Apply(t.Context(), c, nil); err != nil {
		t.Fatal(err)
	}
	var calls sync.WaitGroup
	b := backend{Agent: a, d: &daemon{pool: worker.NewPool(), live: newLiveness(t.Context(), calls.Go)}}
	for _, name := range []string{"a.example", "b.example"} {
		if err := b.Live(t.Context(), name); err == nil || !strings.Contains(err.Error(), "no enabled driver") {
			t.Errorf("%s: %v", name, err)
		}
	}
	calls.Wait()
}

// The IDs of messages are for the journal.
func TestTextLogHasNoMessageID(t *testing.T) {
	var b bytes.Buffer
	log := slog.New(newTextHandler(&b, slog.LevelInfo, "text"))
	log.Info("ready", systemd.MessageID, messageReady, "driver", "a.example")
	if got := b.String(); strings.Contains(got, messageReady) || !strings.Contains(got, "driver=a.example") {
		t.Error(got)
	}
}

// TestHealthOfASidecar checks when the liveness probe of a pod succeeds: it must not restart a
// registrar that cannot do better.
func TestHealthOfASidecar(t *testing.T) {
	for registration, want := range map[status.RegistrationState]bool{
		status.Published: true, status.Registered: true, status.Refused: true, status.Conflict: false, status.None: false,
	} {
		if err := health(status.Driver{Registration: registration}); (err == nil) != want {
			t.Errorf("%s: %v", registration, err)
		}
	}
	if err := health(status.Driver{Registration: status.Conflict, Yields: true}); err != nil {
		t.Errorf("beside the host's csi-registrar: %v", err)
	}
}

// By default, SIGHUP would end the process before its sockets are in the descriptor store.
func TestHangupWhileStopping(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	d := &daemon{}
	d.onHangup(ctx, func() {})
	stop()
	d.work.Wait()
	if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
}
