package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/test/fake"
)

// TestNoCommandHangs: whichever directory does not answer, each command ends with an answer or an
// error, and those that wait for something end when they are told to.
func TestNoCommandHangs(t *testing.T) {
	manifest, err := filepath.Abs("../tool/importer/testdata/good/alone.yaml")
	if err != nil {
		t.Fatal(err)
	}
	const (
		soon = 30 * time.Second // if emulated; some wait 3 s for each of several directories
		long = time.Minute
	)
	commands := []struct {
		args  string // ROOT is --config-root and its value
		waits bool   // until it is told to end
		limit time.Duration
	}{
		{"status ROOT", false, soon},
		{"status ROOT --json", false, soon},
		{"status ROOT d0.example", false, soon},
		{"wait ROOT --timeout 1s", false, soon},
		{"wait ROOT none.example", true, soon},
		{"reload ROOT", false, soon},
		{"reregister ROOT d0.example", false, soon},
		{"doctor ROOT", false, long},
		{"doctor ROOT --json d0.example", false, long},
		{"bugreport ROOT --output TMP/report.tar.gz", false, long},
		{"config check ROOT", false, soon},
		{"config show ROOT", false, soon},
		{"cleanup --ask ROOT", false, soon},
		{"cleanup --if-stopped ROOT", false, soon},
		{"supervise --socket DRIVER", true, soon},
		{"import MANIFEST --output ETC/conf.d", false, soon},
		{"version", false, soon},
		{"help status", false, soon},
	}
	for _, place := range []string{"etc/csi-registrar", "run/csi-registrar", "k", "hang"} {
		t.Run(place, func(t *testing.T) {
			t.Parallel() // it mostly waits
			n := newHangingNode(t, 2)
			n.start()
			n.registered(n.names)
			fs := n.fs
			if place != "hang" {
				var err error
				if fs, err = fake.MountHangFS(filepath.Join(n.root, place)); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					if err := fs.Close(); err != nil {
						t.Error(err)
					}
				})
			}
			if err := fs.Hang(); err != nil {
				t.Fatal(err)
			}
			words := strings.NewReplacer("ROOT", "--config-root "+n.root, "TMP", t.TempDir(), "MANIFEST", manifest,
				"DRIVER", filepath.Join(n.root, "hang", n.names[0]), "ETC", filepath.Join(n.root, "etc/csi-registrar"))
			var all sync.WaitGroup
			for _, c := range commands {
				all.Go(func() {
					if err := runHanging(t.Context(), c.limit, c.waits, strings.Fields(words.Replace(c.args))); err != nil {
						t.Errorf("%s: %v", c.args, err)
					}
				})
			}
			all.Wait()
			if err := fs.Resume(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// runHanging runs a command as a process of its own. One that waits is told to end after a second;
// on a busy machine it has not begun to catch signals then, and is killed.
func runHanging(ctx context.Context, limit time.Duration, waits bool, args []string) error {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), asProgram+"=1", fmt.Sprintf("MAINPID=%d", os.Getpid()))
	out := newOutput()
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	var term <-chan time.Time
	terminated := false
	if waits {
		term = time.After(time.Second)
	}
	late := time.After(limit)
	for {
		select {
		case err := <-ended:
			if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() < 0 && !(terminated && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGTERM) {
				return fmt.Errorf("%w\n%s", err, out)
			}
			return nil
		case <-term:
			if err := cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
				return err
			}
			terminated = true
			late = time.After(limit)
		case <-late:
			// Its end is not awaited: a process that waits for another's lookup of the same name
			// ends only when the file system answers, which is after all commands.
			return fmt.Errorf("hangs; so far it printed:\n%s", errors.Join(errors.New(out.String()), cmd.Process.Kill()))
		case <-ctx.Done():
			return errors.Join(ctx.Err(), cmd.Process.Kill(), <-ended)
		}
	}
}
