package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/daemon"
	"csi-registrar/internal/test/fake"
)

// leftBehind creates the registration socket of a killed daemon, and its record.
func leftBehind(t *testing.T) (root, socket string) {
	t.Helper()
	root = fake.ShortDir(t)
	registry := filepath.Join(root, "plugins_registry")
	if err := os.Mkdir(registry, 0o755); err != nil {
		t.Fatal(err)
	}
	socket = filepath.Join(registry, "a.example-reg.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, socket, 0, unix.STATX_INO|unix.STATX_BTIME, &st); err != nil {
		t.Fatal(err)
	}
	record, err := json.Marshal(map[string]any{
		"path": socket, "cookie": 1, "dev": unix.Mkdev(st.Dev_major, st.Dev_minor), "ino": st.Ino,
		"born": st.Btime.Sec*1e9 + int64(st.Btime.Nsec),
	})
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(root, "run/csi-registrar/registrations")
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.Mkdir(filepath.Join(root, "run/csi-registrar/state"), 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "a.example.json"), record, 0o600); err != nil {
		t.Fatal(err)
	}
	return root, socket
}

func TestCleanup(t *testing.T) {
	for _, c := range []struct {
		name    string
		stopped bool
		err     error
		removed bool
	}{
		{name: "stopped", stopped: true, removed: true},
		{name: "restarted, or crashed"},
		{name: "no answer", stopped: true, err: errors.New("no answer in time")},
	} {
		t.Run(c.name, func(t *testing.T) {
			root, socket := leftBehind(t)
			var stdout, stderr bytes.Buffer
			e := &env{stdout: &stdout, stderr: &stderr}
			runDir := filepath.Join(root, "run/csi-registrar")
			// The answer of an earlier stop does not count.
			if err := os.WriteFile(daemon.StoppedFile(runDir), nil, stoppedMode); err != nil {
				t.Fatal(err)
			}
			_, err := askIfStopped(t.Context(), e, runDir, func(context.Context) (bool, error) { return c.stopped, c.err })
			if err := errors.Join(err, removeIfStopped(t.Context(), e, runDir)); err != nil {
				t.Error(err)
			}
			if _, err := os.Lstat(socket); errors.Is(err, os.ErrNotExist) != c.removed {
				t.Errorf("removed: %v, want %v", !c.removed, c.removed)
			}
			if got := strings.Contains(stdout.String(), socket); got != c.removed {
				t.Errorf("printed %q", stdout.String())
			}
			if got := stderr.Len() > 0; got != (c.err != nil) {
				t.Errorf("warned %q", stderr.String())
			}
		})
	}
}

// A stop while volumes are in use removes the sockets, with a warning.
func TestCleanupWarnsAboutVolumes(t *testing.T) {
	root, socket := leftBehind(t)
	pod := filepath.Join(root, "pods/p/volumes/kubernetes.io~csi/pv")
	if err := errors.Join(os.MkdirAll(pod, 0o755),
		os.WriteFile(filepath.Join(pod, "vol_data.json"), []byte(`{"driverName":"a.example","volumeHandle":"v"}`), 0o644)); err != nil {
		t.Fatal(err)
	}
	var stdout, stderr bytes.Buffer
	e := &env{stdout: &stdout, stderr: &stderr}
	runDir := filepath.Join(root, "run/csi-registrar")
	_, err := askIfStopped(t.Context(), e, runDir, func(context.Context) (bool, error) { return true, nil })
	if err := errors.Join(err, removeIfStopped(t.Context(), e, runDir)); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(socket); err == nil {
		t.Error("the socket is still there")
	}
	if want := "warning: volumes of a.example are in use (1 published, 0 staged);"; !strings.HasPrefix(stderr.String(), want) {
		t.Errorf("got %q, want %q", stderr.String(), want)
	}
}

// TestCleanupAfterAStart: the daemon was started while the question was asked, and
// removed the file.
func TestCleanupAfterAStart(t *testing.T) {
	root, socket := leftBehind(t)
	var out bytes.Buffer
	e := &env{stdout: &out, stderr: &out}
	runDir := filepath.Join(root, "run/csi-registrar")
	_, err := askIfStopped(t.Context(), e, runDir, func(context.Context) (bool, error) {
		return true, os.Remove(daemon.StoppedFile(runDir))
	})
	if err := errors.Join(err, removeIfStopped(t.Context(), e, runDir)); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(socket); err != nil {
		t.Error(err)
	}
}

// TestCleanupFollowsNoLink: a link in place of the answer is not followed.
func TestCleanupFollowsNoLink(t *testing.T) {
	root, _ := leftBehind(t)
	victim, runDir := filepath.Join(root, "victim"), filepath.Join(root, "run/csi-registrar")
	if err := errors.Join(os.WriteFile(victim, []byte("precious"), 0o600), os.Symlink(victim, daemon.StoppedFile(runDir))); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	_, err := askIfStopped(t.Context(), &env{stdout: &out, stderr: &out}, runDir, func(context.Context) (bool, error) { return true, nil })
	if text, readErr := os.ReadFile(victim); string(text) != "precious" || err != nil || readErr != nil {
		t.Error(string(text), err, readErr)
	}
}

// The answer is also stored on a full /run.
func TestCleanupOnAFullFileSystem(t *testing.T) {
	root, socket := leftBehind(t)
	runDir := filepath.Join(root, "run/csi-registrar")
	var stdout, stderr bytes.Buffer
	e := &env{stdout: &stdout, stderr: &stderr}
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &before); err != nil {
		t.Fatal(err)
	}
	full := func(context.Context) (bool, error) {
		// From here on no byte can be written to a file, as on a full file system.
		return true, unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Max: before.Max})
	}
	signal.Ignore(unix.SIGXFSZ)
	_, err := askIfStopped(t.Context(), e, runDir, full)
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &before); err != nil {
		t.Fatal(err)
	}
	signal.Reset(unix.SIGXFSZ)
	if err := errors.Join(err, removeIfStopped(t.Context(), e, runDir)); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(socket); err == nil {
		t.Error("the socket is still there")
	}
}

// The next sandbox opens only what exists. A directory that exists keeps its mode.
func TestDirectoriesForTheNextSandbox(t *testing.T) {
	root := filepath.Join(t.TempDir(), "kubelet")
	modes := func() (all []os.FileMode) {
		for _, dir := range []string{"", "plugins_registry"} {
			st, err := os.Stat(filepath.Join(root, dir))
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, st.Mode().Perm())
		}
		return all
	}
	defer unix.Umask(unix.Umask(0o077)) // the unit's
	if err := createDirectories(t.Context(), root); err != nil {
		t.Fatal(err)
	}
	if got, want := modes(), []os.FileMode{0o750, 0o750}; !slices.Equal(got, want) {
		t.Errorf("modes %v, want %v", got, want)
	}
	if err := errors.Join(os.Chmod(root, 0o755), os.Remove(filepath.Join(root, "plugins_registry")), createDirectories(t.Context(), root)); err != nil {
		t.Fatal(err)
	}
	if got, want := modes(), []os.FileMode{0o755, 0o750}; !slices.Equal(got, want) {
		t.Errorf("modes %v, want %v", got, want)
	}
	if err := createDirectories(t.Context(), filepath.Join(root, "no", "such")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("below a directory that is missing: %v", err)
	}
}
