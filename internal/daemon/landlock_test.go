package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	ll "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/sys/worker"
)

// TestConfine runs itself in a separate process, which stays confined until it ends.
func TestConfine(t *testing.T) {
	if dir := os.Getenv("TEST_CONFINE"); dir != "" {
		tryConfined(dir)
		return
	}
	abi, err := ll.LandlockGetABIVersion()
	if err != nil || abi < minLandlock {
		t.Skipf("this kernel has Landlock %d: %v", abi, err)
	}
	dir := t.TempDir()
	root, run := filepath.Join(dir, "kubelet"), filepath.Join(dir, "run")
	for _, d := range []string{filepath.Join(root, "plugins_registry"), filepath.Join(run, "state"), filepath.Join(run, "registrations")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(root, "config.yaml"), []byte("kind: KubeletConfiguration\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestConfine$")
	cmd.Env = append(os.Environ(), "TEST_CONFINE="+dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	got, _, _ := strings.Cut(string(out), "PASS")
	refused := func(ok bool) string {
		if ok {
			return "refused"
		}
		return "done"
	}
	errata, err := ll.LandlockGetErrata()
	want := fmt.Sprintf(`abi %d
a record: done
the state: done
a socket between two directories: done
an endpoint link: done
reading: done
root_dir: refused
the kubelet's configuration: refused
truncating it: %s
renaming it: refused
a signal to another process: %s
a signal to itself: done
`, abi, refused(abi >= 3), refused(abi >= 6 && err == nil && errata&2 != 0))
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func tryConfined(dir string) {
	root, run := filepath.Join(dir, "kubelet"), filepath.Join(dir, "run")
	registry, links := filepath.Join(root, "plugins_registry"), filepath.Join(root, "plugins", "csi-registrar")
	config := filepath.Join(root, "config.yaml")
	abi, err := Confine(Writable(run, root)...)
	if err != nil {
		fmt.Println("not confined:", err)
	}
	fmt.Println("abi", abi)
	write := func(path string) error { return os.WriteFile(path, nil, 0o600) }
	for _, c := range []struct {
		what string
		err  error
	}{
		{"a record", write(filepath.Join(run, "registrations", "x"))},
		{"the state", write(filepath.Join(run, "state", "x"))},
		{"a socket between two directories", errors.Join(write(filepath.Join(links, "x")), os.Rename(filepath.Join(links, "x"), filepath.Join(registry, "x")))},
		{"an endpoint link", errors.Join(os.Symlink("/x", filepath.Join(links, "y")), os.Remove(filepath.Join(links, "y")))},
		{"reading", func() error { _, err := os.ReadFile(config); return err }()},
		{"root_dir", write(filepath.Join(root, "x"))},
		{"the kubelet's configuration", func() error { _, err := os.OpenFile(config, os.O_APPEND|os.O_WRONLY, 0); return err }()},
		{"truncating it", unix.Truncate(config, 0)},
		{"renaming it", os.Rename(config, filepath.Join(registry, "config.yaml"))},
		{"a signal to another process", unix.Kill(os.Getppid(), 0)},
		{"a signal to itself", unix.Kill(os.Getpid(), 0)},
	} {
		word := "done"
		if errors.Is(c.err, os.ErrPermission) || errors.Is(c.err, unix.EXDEV) {
			word = "refused"
		} else if c.err != nil {
			word = c.err.Error()
		}
		fmt.Printf("%s: %s\n", c.what, word)
	}
}

// All threads take part in the call, so it would wait for one that waits for a file system.
func TestConfineWaitsForNoFileSystem(t *testing.T) {
	getenv := map[string]string{"NOTIFY_SOCKET": "/x", landlockVariable: "1"}
	options := Options{KeepSockets: true, Getenv: func(name string) string { return getenv[name] }}
	options.Source.Root = t.TempDir()
	pool, answer := worker.NewPool(), make(chan struct{})
	defer close(answer)
	ctx, abandon := context.WithCancel(t.Context())
	abandon()
	_, _ = worker.Do(ctx, pool.Slot("/dead", nil), time.Minute, func() bool { <-answer; return true }, nil)
	var log strings.Builder
	d := &daemon{
		options: options, pool: pool, notifier: systemd.NewNotifier(options.Getenv), handed: &descriptors{},
		log: slog.New(slog.NewTextHandler(&log, nil)),
	}
	d.confine(t.Context(), t.TempDir())
	if d.landlock != 0 || !strings.Contains(log.String(), "/dead does not answer") {
		t.Errorf("abi %d: %s", d.landlock, log.String())
	}
}
