package cli

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/status"
)

// With another root_dir the daemon removes its sockets below the earlier one and ends with 75; the
// next process serves the driver below the other one. So does one that is stopped before it sees
// the change.
func TestAnotherRootDir(t *testing.T) {
	t.Parallel() // it mostly waits
	for _, running := range []bool{true, false} {
		n := newRegisteredNode(t)
		was, other := filepath.Join(n.root, "k"), filepath.Join(n.root, "l")
		conf := fmt.Sprintf("[kubelet]\nroot_dir = %q\n[driver.%q]\nsocket = %q\nsocket_owner = \"any\"\n", other, registeredName, filepath.Join(n.root, "d.sock"))
		write := func() {
			if err := errors.Join(os.Mkdir(other, 0o755), os.WriteFile(filepath.Join(n.root, "etc/csi-registrar/config.toml"), []byte(conf), 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		if running {
			write()
			notes, err := control.NewClient(control.Path(n.root)).Reload(t.Context(), false)
			if err != nil || len(notes) != 1 {
				t.Errorf("reload: %q (%v)", notes, err)
			}
			err = n.daemon.Wait()
			if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.ExitCode() != 75 {
				t.Errorf("the daemon ended with %v\n%s", err, n.log)
			}
			if left, err := os.ReadDir(filepath.Join(was, "plugins_registry")); err != nil || len(left) > 0 {
				t.Errorf("left below the earlier root_dir: %v (%v)", left, err)
			}
			n.start()
		} else {
			if err := n.daemon.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			if err := n.daemon.Wait(); err != nil {
				t.Fatal(err)
			}
			write()
			n.start()
		}
		n.eventually("the driver is published below the other root_dir", func() bool {
			d := n.state()
			return d.Registration == status.Published && string(d.RegistrationSocket) == filepath.Join(other, "plugins_registry", registeredName+"-reg.sock")
		})
		n.eventually("the kubelet below the earlier one forgets it", func() bool { return n.deregistered.Load() == 1 })
		if left, err := os.ReadDir(filepath.Join(was, "plugins_registry")); err != nil || len(left) > 0 {
			t.Errorf("left below the earlier root_dir: %v (%v)", left, err)
		}
	}
}

// A driver without a table whose volumes are in use stays registered over a reload and a restart.
func TestKeptDriverSurvivesARestart(t *testing.T) {
	n := newRegisteredNode(t)
	dir := filepath.Join(n.root, "k/pods/p/volumes/kubernetes.io~csi/pv")
	data := fmt.Sprintf(`{"driverName":%q,"volumeHandle":"v"}`, registeredName)
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "vol_data.json"), []byte(data), 0o644),
		os.WriteFile(filepath.Join(n.root, "etc/csi-registrar/config.toml"), fmt.Appendf(nil, "[kubelet]\nroot_dir = %q\n", filepath.Join(n.root, "k")), 0o644)); err != nil {
		t.Fatal(err)
	}
	s := newSession()
	if code := s.run(t.Context(), "reload", "--config-root", n.root); code != 0 || s.stderr.String() != "note: "+registeredName+
		" stays registered: 1 volume in use, no table: it is withdrawn when they are unmounted, or by csi-registrar reload --force\n" {
		t.Errorf("reload: %d %s", code, s.stderr)
	}
	n.restart(os.Interrupt)
	s = newSession()
	if code := s.run(t.Context(), "reload", "--config-root", n.root); code != 0 {
		t.Errorf("reload: %d %s", code, s.stderr)
	}
	s = newSession()
	if code := s.run(t.Context(), "status", "--config-root", n.root); code != 1 || n.state().State != string(status.Registered) || !n.state().NoTable {
		t.Errorf("status: %d %s", code, s.stdout)
	}
	if got := n.deregistered.Load(); got != 0 {
		t.Errorf("the kubelet saw the driver go %d times\n%s", got, n.log)
	}
}
