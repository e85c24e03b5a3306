package trust

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const stranger = 65533 // a user that nobody has

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// tempDir is a real directory, of which a/b/f is a file.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	must(t, os.MkdirAll(dir+"/a/b", 0o755))
	must(t, os.WriteFile(dir+"/a/b/f", []byte("text"), 0o644))
	return dir
}

func mine(dir string) Rule { return Rule{Owners: []uint32{uint32(os.Geteuid()), 0}, Below: dir} }

func TestCheck(t *testing.T) {
	for _, test := range []struct {
		name string
		make func(dir string) error
		path string // below the directory; empty: a/b/f
		want string // empty: trusted
	}{
		{name: "good", make: func(string) error { return nil }},
		{name: "nothing there", make: func(string) error { return nil }, path: "a/none/f"},
		{name: "below a file", make: func(string) error { return nil }, path: "a/b/f/x"},
		{name: "the mode of a file does not count", make: func(d string) error { return os.Chmod(d+"/a/b/f", 0o666) }},
		{name: "open directory", make: func(d string) error { return os.Chmod(d+"/a", 0o702) }, want: "/a may be written by its group or others (mode 0702)"},
		{name: "sticky on the way", make: func(d string) error { return os.Chmod(d+"/a", 0o777|os.ModeSticky) }},
		{name: "sticky at the end", make: func(d string) error { return os.Chmod(d+"/a/b", 0o777|os.ModeSticky) }, path: "a/b",
			want: "/a/b may be written by its group or others (mode 1777)"},
		{name: "sticky at the end, with a slash", make: func(d string) error { return os.Chmod(d+"/a/b", 0o777|os.ModeSticky) }, path: "a/b/", want: "mode 1777"},
		{name: "through an open directory and back", make: func(d string) error {
			must(t, os.Mkdir(d+"/open", 0o700))
			must(t, os.Chmod(d+"/open", 0o777))
			return os.Symlink("../open/../a/b/f", d+"/a/l")
		}, path: "a/l", want: "/open may be written by"},
		{name: "through a name that gives advice", make: func(d string) error {
			must(t, os.Mkdir(d+"/x; run $(id)", 0o700))
			must(t, os.Chmod(d+"/x; run $(id)", 0o777))
			return os.Symlink("../x; run $(id)/f", d+"/a/l")
		}, path: "a/l", want: `/x; run $(id)" may be written by`},
		{name: "by an absolute link", make: func(d string) error {
			must(t, os.Chmod(d+"/a/b", 0o777))
			return os.Symlink(d+"/a/b/f", d+"/l")
		}, path: "l", want: "/a/b may be written by"},
		{name: "a loop", make: func(d string) error { return os.Symlink("l", d+"/l") }, path: "l", want: "too many levels of symbolic links"},
		{name: "above", make: func(d string) error { return os.Chmod(d, 0o777) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := tempDir(t)
			must(t, test.make(dir))
			path := dir + "/" + test.path
			if test.path == "" {
				path = dir + "/a/b/f"
			}
			checked := make(chan error, 1)
			go func() { checked <- mine(dir).Check(path) }()
			var err error
			select {
			case err = <-checked:
			case <-time.After(30 * time.Second):
				t.Fatal("it does not end")
			}
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
			if err := (Rule{}).Check(path); err != nil {
				t.Errorf("the zero Rule: %v", err)
			}
		})
	}
}

// Without Below the root directory is checked, too: its owner can replace /run.
func TestCheckBeginsAtTheRoot(t *testing.T) {
	nobody := Rule{Owners: []uint32{stranger}}
	e, ok := errors.AsType[*Error](nobody.Check("/none"))
	if !ok || e.Path != "/" {
		t.Errorf("%v", e)
	}
	nobody.Below = "/"
	if err := nobody.Check("/none"); err != nil {
		t.Error(err)
	}
}

func TestWhoseFiles(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("other users' files need root")
	}
	dir := tempDir(t)
	rule := Rule{Owners: []uint32{0}, Below: dir}
	for name, command := range map[string]string{"a": "chown -h root ", "a/b": "chown -h root ", "a/b/f": "chown -h root ", "l": "rm "} {
		must(t, errors.Join(os.RemoveAll(dir+"/l"), os.Symlink("a/b/f", dir+"/l")))
		must(t, os.Lchown(filepath.Join(dir, name), stranger, 0))
		path := filepath.Join(dir, name)
		e, ok := errors.AsType[*Error](rule.Check(dir + "/l"))
		if !ok || e.Path != path || e.Owner != "65533" || e.Problem != "belongs to uid 65533, not to root" || e.Command.String() != command+path {
			t.Errorf("%s: %+v", name, e)
		}
		if err := (Rule{Owners: []uint32{stranger, 0}, Below: dir}).Check(dir + "/a/b/f"); err != nil {
			t.Errorf("%s, of a trusted user: %v", name, err)
		}
		must(t, os.Lchown(path, 0, 0))
	}
	// A trusted user's link out of its own directories.
	must(t, os.Lchown(dir+"/l", stranger, 0))
	e, ok := errors.AsType[*Error](Rule{Owners: []uint32{stranger, 0}, Below: dir}.Check(dir + "/l"))
	if !ok || e.Path != dir+"/l" || e.Owner != "" || e.Command.String() != "rm "+dir+"/l" {
		t.Errorf("%+v", e)
	}
	must(t, os.Chown(dir+"/a/b", stranger, 0))
	if err := (Rule{Owners: []uint32{stranger, 0}, Below: dir}).Check(dir + "/l"); err != nil {
		t.Error(err)
	}
}

// TestNoCommandIfAnotherUserCouldRedirectIt checks that root is not told to run a command on a path
// that a trusted user other than root can change, or has chosen by a link.
func TestNoCommandIfAnotherUserCouldRedirectIt(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("other users' files need root")
	}
	link := func(target, path string) error {
		return errors.Join(os.Symlink(target, path), os.Lchown(path, stranger, 0))
	}
	for name, test := range map[string]struct {
		make func(dir string) error
		path string // below the directory
		want string // the path of the Error; empty: trusted
		run  string // the command without its path
	}{
		"an open directory of root": {func(d string) error { return os.Chmod(d+"/a", 0o777) }, "a/b/f", "a", "chmod go-w "},
		"an open directory of the user": {func(d string) error {
			return errors.Join(os.Chmod(d+"/a", 0o777), os.Chown(d+"/a", stranger, 0))
		}, "a/b/f", "a", ""},
		"an open directory in one of the user": {func(d string) error {
			return errors.Join(os.Chown(d+"/a", stranger, 0), os.Chmod(d+"/a/b", 0o777))
		}, "a/b/f", "a/b", ""},
		"an open directory that the user chose": {func(d string) error {
			return errors.Join(os.Chmod(d+"/a", 0o777), link("a/b/f", d+"/l"))
		}, "l", "a", ""},
		"a link to a file of root": {func(d string) error { return link("a/b/f", d+"/l") }, "l", "l", "rm "},
		"a link in a directory of the user": {func(d string) error {
			return errors.Join(os.Chown(d+"/a", stranger, 0), link("b/f", d+"/a/l"))
		}, "a/l", "a/l", ""},
		"a link to a directory": {func(d string) error { return link("a/b", d+"/l") }, "l", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := tempDir(t)
			must(t, test.make(dir))
			err := Rule{Owners: []uint32{stranger, 0}, Below: dir}.Check(dir + "/" + test.path)
			if test.want == "" {
				must(t, err)
				return
			}
			e, ok := errors.AsType[*Error](err)
			if path := dir + "/" + test.want; !ok || e.Path != path || (test.run == "") != (e.Command.Name == "") ||
				test.run != "" && e.Command.String() != test.run+path {
				t.Errorf("%v: %s", err, e.Command)
			}
		})
	}
}

// TestCheckOfASocket checks the owner of a socket, which others can connect to.
func TestCheckOfASocket(t *testing.T) {
	dir := tempDir(t)
	must(t, unix.Mknod(dir+"/s", unix.S_IFSOCK|0o666, 0))
	for _, file := range []string{"s", "a/b/f"} {
		if err := mine(dir).Check(dir + "/" + file); err != nil {
			t.Error(err)
		}
		other := Rule{Owners: []uint32{stranger}, Below: filepath.Dir(dir + "/" + file)}
		if err := other.Check(dir + "/" + file); !errors.As(err, new(*Error)) {
			t.Errorf("%s of another user: %v", file, err)
		}
	}
}

func TestReadFile(t *testing.T) {
	dir := tempDir(t)
	file := dir + "/a/b/f"
	must(t, os.Symlink("a/b/f", dir+"/l"))
	must(t, unix.Mkfifo(dir+"/fifo", 0o600))
	must(t, os.WriteFile(dir+"/open", []byte("text"), 0o600))
	must(t, os.Chmod(dir+"/open", 0o620))
	must(t, os.WriteFile(dir+"/large", make([]byte, 2<<20+1), 0o600))
	must(t, os.WriteFile(dir+"/full", make([]byte, 2<<20), 0o600))
	for _, test := range []struct {
		path   string
		follow bool
		text   int // its length
		want   string
	}{
		{path: file, text: 4},
		{path: dir + "/l", want: "is not a regular file"},
		{path: dir + "/l", follow: true, text: 4},
		{path: dir + "/fifo", want: "is not a regular file"},
		{path: dir, want: "is not a regular file"},
		{path: "/dev/zero", follow: true, want: "is not a regular file"},
		{path: dir + "/open", text: 4, want: "may be written by its group or others (mode 0620)"},
		{path: dir + "/large", want: "is larger than 2 MiB"},
		{path: dir + "/full", text: 2 << 20},
	} {
		rule := mine("")
		rule.FollowLink = test.follow
		data, err := rule.ReadFile(test.path, 2<<20)
		e, _ := errors.AsType[*Error](err)
		if len(data) != test.text || (err == nil) != (test.want == "") || e != nil && (e.Path != test.path || e.Problem != test.want) {
			t.Errorf("%s: %d bytes, %v", test.path, len(data), err)
		}
	}
	if _, err := mine("").ReadFile(dir+"/none", 1); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	if data, err := (Rule{}).ReadFile(dir+"/open", 4); err != nil || string(data) != "text" {
		t.Errorf("the zero Rule: %q, %v", data, err)
	}
	if _, err := (Rule{}).ReadFile(file+"/x", 1); !errors.Is(err, syscall.ENOTDIR) {
		t.Error(err)
	}
}
