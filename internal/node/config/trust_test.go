package config

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A user who can write to a directory can create files there.
func TestWritableDirectoryIsAnError(t *testing.T) {
	for _, dir := range []string{"etc", inEtc, inEtc + "conf.d", inLib} {
		s := tree(t, map[string]string{inEtc + "conf.d/50-a.toml": goodTable, inLib + "config.toml": ""})
		path := filepath.Join(s.Root, dir)
		for mode, want := range map[os.FileMode]string{0o777: "0777", 0o775: "0775", 0o702: "0702"} {
			if err := os.Chmod(path, mode); err != nil {
				t.Fatal(err)
			}
			want := path + ": may be written by its group or others (mode " + want + ")"
			if got := Load(s).Errors.Error(); !strings.HasPrefix(got, want) || strings.Contains(got, "\n") {
				t.Errorf("%s: got %q, want %q", dir, got, want)
			}
		}
		if err := os.Chmod(path, 0o755); err != nil {
			t.Fatal(err)
		}
		s.check(t, Load(s), "")
	}
}

// Everybody may make files in a sticky directory.
func TestStickyDropInDirectoryIsAnError(t *testing.T) {
	s := tree(t, map[string]string{inEtc + "conf.d/50-a.toml": goodTable})
	dir := filepath.Join(s.Root, inEtc, "conf.d")
	if err := os.Chmod(dir, 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	if r := Load(s); len(r.Errors) != 1 || r.Errors[0].File != dir || len(r.Config.Drivers) > 0 {
		t.Errorf("%v, drivers %+v", r.Errors, r.Config.Drivers)
	}
}

// A pipe in place of conf.d does not block.
func TestPipeInsteadOfADirectory(t *testing.T) {
	s := tree(t, map[string]string{inEtc + "config.toml": goodTable})
	if err := syscall.Mkfifo(filepath.Join(s.Root, inEtc, "conf.d"), 0o600); err != nil {
		t.Fatal(err)
	}
	loaded := make(chan *Result, 1)
	go func() { loaded <- Load(s) }()
	select {
	case r := <-loaded:
		s.check(t, r, "/"+inEtc+"conf.d: cannot be read: not a directory")
	case <-time.After(30 * time.Second):
		t.Fatal("it blocks")
	}
}

// Opening a pipe lets go who waits for its other end, and opening a device can do anything.
func TestOnlyRegularFilesAreOpened(t *testing.T) {
	s := tree(t, map[string]string{inEtc + "conf.d/60-a.toml": goodTable})
	pipe := filepath.Join(s.Root, inEtc, "conf.d/50-pipe.toml")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.InotifyAddWatch(fd, pipe, unix.IN_OPEN); err != nil {
		t.Fatal(err)
	}
	s.check(t, Load(s), "/"+inEtc+"conf.d/50-pipe.toml: is not a regular file")
	if n, err := unix.Read(fd, make([]byte, 4096)); err != unix.EAGAIN {
		t.Errorf("the pipe was opened: %d %v", n, err)
	}
}

// Links are followed as the kernel follows them, and each step is checked.
func TestWay(t *testing.T) {
	s := tree(t, map[string]string{
		"opt/x/a.toml":               goodTable,
		"opt/l":                      "-> ./x/../x",
		inEtc + "conf.d/50-a.toml":   "-> ../../../opt/l/a.toml",
		inEtc + "conf.d/60-own.toml": "-> 60-own.toml",
	})
	loop := "/" + inEtc + "conf.d/60-own.toml: cannot be read: too many levels of symbolic links"
	s.check(t, Load(s), loop)
	if err := os.Chmod(filepath.Join(s.Root, "opt/x"), 0o777); err != nil {
		t.Fatal(err)
	}
	s.check(t, Load(s), "/opt/x: may be written by its group or others (mode 0777) (check its contents, then run chmod go-w /opt/x)\n"+loop)
	// In a sticky directory nobody can replace what is root's.
	if err := os.Chmod(filepath.Join(s.Root, "opt/x"), 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	s.check(t, Load(s), loop)
	// Directories above the root are the user's responsibility.
	if err := os.Chmod(filepath.Join(s.Root, "opt/x"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(s.Root, 0o777); err != nil {
		t.Fatal(err)
	}
	s.check(t, Load(s), loop)
	if os.Geteuid() == 0 {
		if err := os.Lchown(filepath.Join(s.Root, "opt/l"), 12345, 12345); err != nil {
			t.Fatal(err)
		}
		s.check(t, Load(s), "/opt/l: belongs to uid 12345, not to root (check its contents, then run rm /opt/l)\n"+loop)
	}
}
