package config

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

func TestWatch(t *testing.T) {
	if got, want := (Source{}).Watch(), []string{
		"/etc/csi-registrar/config.toml", "/etc/csi-registrar/conf.d",
		"/run/csi-registrar/config.toml", "/run/csi-registrar/conf.d",
		"/usr/lib/csi-registrar/config.toml", "/usr/lib/csi-registrar/conf.d",
	}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := (Source{Root: "/x/"}).Watch()[0]; got != "/x/etc/csi-registrar/config.toml" {
		t.Error(got)
	}
	if got := (Source{Root: "/x", File: "/y"}).Watch(); !slices.Equal(got, []string{"/y"}) {
		t.Errorf("%q", got)
	}
}

// TestTrust checks that files that others than root can write are errors: their content decides
// what the daemon does as root.
func TestTrust(t *testing.T) {
	good := "[driver.a]\nsocket = \"/a\"\n"
	files := map[string]string{
		inEtc + "conf.d/10-group.toml": good, inEtc + "conf.d/20-others.toml": good,
		inEtc + "conf.d/30-sticky.toml": good, inEtc + "conf.d/40-empty.toml": "",
		inEtc + "conf.d/50-right.toml": good,
	}
	s := tree(t, files)
	for name, mode := range map[string]os.FileMode{
		"10-group": 0o664, "20-others": 0o602, "30-sticky": 0o622, "40-empty": 0o666, "50-right": 0o640,
	} {
		if err := os.Chmod(filepath.Join(s.Root, inEtc, "conf.d", name+".toml"), mode); err != nil {
			t.Fatal(err)
		}
	}
	r := Load(s)
	var want []string
	for _, f := range []string{"10-group.toml|0664", "20-others.toml|0602", "30-sticky.toml|0622", "40-empty.toml|0666"} {
		name, mode, _ := strings.Cut(f, "|")
		path := "/etc/csi-registrar/conf.d/" + name
		want = append(want, fmt.Sprintf("%s: may be written by its group or others (mode %s) (check its contents, then run chmod go-w %[1]s)", path, mode))
	}
	s.check(t, r, strings.Join(want, "\n"))
	if len(r.Config.Drivers) != 1 || s.filesOf(r) != "/etc/csi-registrar/conf.d/50-right.toml" {
		t.Errorf("files %q, drivers %+v", r.Files, r.Config.Drivers)
	}

	// A file named on the command line is its user's own affair.
	r = Load(Source{File: filepath.Join(s.Root, inEtc, "conf.d/10-group.toml")})
	if r.Errors != nil || len(r.Config.Drivers) != 1 {
		t.Errorf("--config: %v", r.Errors)
	}
}

func TestOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give files away")
	}
	s := tree(t, map[string]string{
		inEtc + "config.toml":       "[log]\nlevel = \"warn\"\n",
		inEtc + "conf.d/10-a.toml":  "-> /dev/null",
		inEtc + "conf.d/20-ok.toml": "[log]\nlevel = \"debug\"\n",
	})
	for _, name := range []string{"config.toml", "conf.d/10-a.toml"} {
		if err := os.Lchown(filepath.Join(s.Root, inEtc, name), 12345, 12345); err != nil {
			t.Fatal(err)
		}
	}
	r := Load(s)
	s.check(t, r, `/etc/csi-registrar/config.toml: belongs to uid 12345, not to root (check its contents, then run chown -h root /etc/csi-registrar/config.toml)
/etc/csi-registrar/conf.d/10-a.toml: belongs to uid 12345, not to root (check its contents, then run rm /etc/csi-registrar/conf.d/10-a.toml)`)
	if r.Config.Log.Level != "debug" {
		t.Error(r.Config.Log.Level)
	}
}

func TestTrustedUsers(t *testing.T) {
	for _, root := range []string{"", "/", "//"} {
		if got := (Source{Root: root}).rule().Owners; !slices.Equal(got, []uint32{0}) {
			t.Errorf("%q: %v", root, got)
		}
	}
	if got := (Source{Root: "/x"}).rule().Owners; !slices.Contains(got, uint32(os.Geteuid())) {
		t.Errorf("another root: %v", got)
	}
}

// TestUnreadable: reading ends with an error that names the kind of file, whatever is in place of a
// configuration file.
func TestUnreadable(t *testing.T) {
	dir := t.TempDir()
	pipe, large, directory := filepath.Join(dir, "pipe"), filepath.Join(dir, "large"), filepath.Join(dir, "new\nline")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(large, make([]byte, maxFile+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(directory, 0o700); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		pipe:           "/pipe: is not a regular file",
		large:          "/large: is larger than 1 MiB",
		dir + "/none":  "/none: cannot be read: no such file or directory (create the file, or remove the link to it)",
		pipe + "/none": "/pipe/none: cannot be read: not a directory",
		"/dev/zero":    "/dev/zero: is not a regular file",
		os.DevNull:     "",
	} {
		r := Load(Source{File: path})
		if got := strings.ReplaceAll(r.Errors.Error(), dir, ""); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
		if !r.Config.Equal(Default()) {
			t.Errorf("%s: %+v", path, r.Config)
		}
	}
	if got := Load(Source{File: directory}).Errors.Error(); strings.Contains(got, "\n") {
		t.Errorf("more than one line: %s", got)
	}
}

// TestNotADirectory: a file where a directory belongs is named, and the other places are read.
func TestNotADirectory(t *testing.T) {
	s := tree(t, map[string]string{
		inEtc + "conf.d":           "a file",
		inLib + "conf.d/10-a.toml": "[log]\nlevel = \"warn\"\n",
	})
	r := Load(s)
	s.check(t, r, "/etc/csi-registrar/conf.d: cannot be read: not a directory")
	if r.Config.Log.Level != "warn" {
		t.Error("the other places do not count")
	}
}

func TestNoDescriptorLeft(t *testing.T) {
	open := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip(err)
		}
		return len(fds)
	}
	s := tree(t, map[string]string{inEtc + "config.toml": "x", inEtc + "conf.d/a.toml/x": "", inEtc + "conf.d/b.toml": "-> nowhere"})
	Load(s)
	before := open()
	for range 10 {
		Load(s)
	}
	if after := open(); after > before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}
