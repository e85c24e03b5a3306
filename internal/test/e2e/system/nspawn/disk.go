package nspawn

import (
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
)

// Write writes a file on the disk. The machine may be on or off.
func (m *Machine) Write(path, content string) {
	m.t.Helper()
	m.WriteMode(path, content, 0o644)
}

// WriteMode writes a file with a mode, whatever the umask.
func (m *Machine) WriteMode(path, content string, mode os.FileMode) {
	m.t.Helper()
	full := m.Path(path)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(full, []byte(content), mode); err != nil {
		m.t.Fatal(err)
	}
	if err := os.Chmod(full, mode); err != nil {
		m.t.Fatal(err)
	}
}

// Read returns the content of a file on the disk, or "" if it does not exist.
func (m *Machine) Read(path string) string {
	m.t.Helper()
	b, err := os.ReadFile(m.Path(path))
	if err != nil && !os.IsNotExist(err) {
		m.t.Fatal(err)
	}
	return string(b)
}

// Chroot runs a command on the disk of a machine that is off.
func (m *Machine) Chroot(args ...string) string {
	m.t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Path = lookIn(m.Disk, args[0])
	cmd.Err = nil
	cmd.Dir = "/"
	cmd.Env = environment
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: m.Disk}
	out, err := cmd.CombinedOutput()
	if err != nil {
		m.t.Fatalf("%s: %q in the chroot: %v\n%s", m.Suite, args, err, out)
	}
	return string(out)
}

func lookIn(root, name string) string {
	for _, dir := range []string{"/usr/bin", "/usr/sbin", "/bin", "/sbin"} {
		if _, err := os.Stat(filepath.Join(root, dir, name)); err == nil {
			return filepath.Join(dir, name)
		}
	}
	return name
}
