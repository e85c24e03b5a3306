package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/mountinfo"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/worker"
)

// mountOf returns the mount that a path is on; the zero Mount if that is the root file system, or
// not known.
func (x *diagnosis) mountOf(ctx context.Context, file string) (m mountinfo.Mount) {
	all, err := look(ctx, x, x.proc(), func() ([]mountinfo.Mount, error) { return mountinfo.Read(x.proc(), "self") })
	if err != nil {
		return m
	}
	for _, other := range all { // a later one covers an earlier one at the same point
		if other.Point != "/" && rootdir.Within(file, other.Point) && len(other.Point) >= len(m.Point) {
			m = other
		}
	}
	return m
}

// unmounted returns the mount point in /etc/fstab that a path is on and that is not mounted; empty
// if there is none.
func (x *diagnosis) unmounted(ctx context.Context, file string) string {
	fstab := filepath.Join("/", x.o.Source.Root, "etc/fstab")
	text, _ := look(ctx, x, fstab, func() ([]byte, error) { return readSome(fstab, maxProcFile) })
	mounted := x.mountOf(ctx, file).Point
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) > 2 && f[0][0] != '#' && path.IsAbs(f[1]) && len(f[1]) > max(len(mounted), 1) && rootdir.Within(file, f[1]) {
			return f[1]
		}
	}
	return ""
}

// maxNames limits the number of names and links on a path.
const maxNames = 100

// hanging follows a path and its symbolic links, and returns the first name whose file system does
// not answer; empty if all do.
func (x *diagnosis) hanging(ctx context.Context, file string) string {
	done, rest := "/", strings.Split(strings.Trim(path.Clean(file), "/"), "/")
	for range maxNames {
		if len(rest) == 0 {
			return ""
		}
		next := path.Join(done, rest[0])
		rest = rest[1:]
		target, err := look(ctx, x, next, func() (string, error) {
			info, err := os.Lstat(next)
			if err != nil || info.Mode()&fs.ModeSymlink == 0 {
				return "", err
			}
			return os.Readlink(next)
		})
		switch {
		case errors.As(err, new(*worker.NotAnswering)):
			return next
		case err != nil:
			return ""
		case target == "":
			done = next
			continue
		case path.IsAbs(target):
			done = "/"
		}
		rest = append(strings.Split(strings.Trim(path.Clean(target), "/"), "/"), rest...)
	}
	return ""
}

// unreadable explains why a path cannot be read if its file system does not answer: the mount, as
// the rest of a sentence, and how to unmount it. For any other error both are empty.
func (x *diagnosis) unreadable(ctx context.Context, file string, err error) (where string, fix []Fix) {
	if !errors.As(err, new(*worker.NotAnswering)) {
		return "", nil
	}
	return x.unmount(ctx, cmp.Or(x.hanging(ctx, file), file))
}

// unmount returns the mount of a path, as the rest of a sentence, and how to unmount it.
func (x *diagnosis) unmount(ctx context.Context, file string) (where string, fix []Fix) {
	m := x.mountOf(ctx, file)
	if m.Point == "" {
		return "", []Fix{note("bring back the file system that does not answer"), run("findmnt")}
	}
	where = fmt.Sprintf(": that is %s, type %s, from %s", safetext.Word(m.Point), safetext.Word(m.Type), safetext.Word(m.Source))
	if !x.rootOnly(ctx, m.Point) {
		return where, []Fix{note("bring its server back, or unmount %s by hand: another user can change a directory on its path", safetext.ShellWord(m.Point))}
	}
	return where, []Fix{note("if its server does not come back"), run("umount", "--force", "--lazy", m.Point)}
}

// readOnly is what unwritable returns for a file system that is mounted read-only.
const readOnly = "read-only"

// unwritable returns readOnly, or "space" or "inodes" if the file system has none left.
func unwritable(dir string) (string, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return "", &fs.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return lacking(st), nil
}

func lacking(st unix.Statfs_t) string {
	switch {
	case st.Flags&unix.ST_RDONLY != 0:
		return readOnly
	case st.Blocks > 0 && st.Bavail == 0 && st.Bfree == 0:
		return "space"
	case st.Files > 0 && st.Ffree == 0:
		return "inodes"
	}
	return ""
}

const right, enter = 0o300, 0o100 // the owner of a directory may create files in it, or enter it

// locked returns why root cannot create files in a directory, or enter those on its path: a mode,
// chattr +i, or a file in place of one, and the command that permits it; why is empty if it can.
func (x *diagnosis) locked(ctx context.Context, dir string, need uint16) (why string, fix Fix) {
	at, err := x.stat(ctx, dir)
	switch {
	case len(dir) < 2 || err == nil && !x.rootOnly(ctx, dir):
		return "", Fix{}
	case err != nil:
		return x.locked(ctx, path.Dir(dir), need)
	case !at.IsDir():
		return safetext.Word(dir) + " is " + at.Kind() + ", not a directory", run("mv", "-n", dir, dir+".old")
	case need == right && x.immutable(ctx, dir):
		return safetext.Word(dir) + " is immutable (chattr +i)", run("chattr", "-i", dir)
	case at.UID == 0 && at.Mode&need != need:
		return fmt.Sprintf("%s has mode %04o, which keeps its owner out", safetext.Word(dir), at.Mode&0o777), run("chmod", "0750", dir)
	}
	return x.locked(ctx, path.Dir(dir), enter)
}

// space checks that a registration socket can be created. A kubelet does not start either on a file
// system that is full or read-only.
func (x *diagnosis) space(ctx context.Context, dir string) {
	if why, fix := x.locked(ctx, dir, right); why != "" {
		x.finding("", "file system", "file-system-read-only", why+": no registration socket can be created or removed",
			"mode 0750, and not immutable: the daemon is root without capabilities", fix)
		return
	}
	for _, d := range []string{dir, filepath.Join(x.o.Root, "run")} {
		lacks, err := look(ctx, x, d, func() (string, error) { return unwritable(d) })
		if err == nil && lacks == readOnly {
			x.finding("", "file system", "file-system-read-only", fmt.Sprintf("the file system of %s is read-only: no registration socket can be created", safetext.Word(d)),
				"it is writable", x.remount(ctx, d)...)
			return
		}
		if err == nil && lacks != "" {
			point := cmp.Or(x.mountOf(ctx, d).Point, "/")
			text, file := x.largest(ctx, point, lacks)
			fix := []Fix{run("df", "-h", d), run("df", "-i", d), run("du", "-xah", "-t", "1M", point), run("du", "-x", "--inodes", "-t", "100", point), note("remove files that are not needed from that file system")}
			if file != "" && x.rootOnly(ctx, file) {
				fix = append(fix, optional(run("rm", file)))
			}
			x.finding("", "file system", "file-system-full", fmt.Sprintf("the file system of %s has no %s left: no registration socket can be created%s", safetext.Word(d), lacks, text), "space and inodes are free", fix...)
			return
		}
	}
	x.checked("", "file system", OK, "writable, with space and inodes left")
}

// largest names the largest of the first files on a file system that lacks space, or the directory
// with most of them if it lacks inodes, as the rest of a sentence, and the file; empty if there is
// none, or the file system does not answer.
func (x *diagnosis) largest(ctx context.Context, point, lacks string) (text, file string) {
	uses, files := map[string]int64{}, 0 // KiB of files, or files in directories
	err := x.check(ctx, point, func() error {
		var top, at unix.Stat_t
		if err := unix.Lstat(point, &top); err != nil {
			return err
		}
		return filepath.WalkDir(point, func(file string, e fs.DirEntry, err error) error {
			switch files++; {
			case files > 10*maxEntries:
				return filepath.SkipAll
			case err != nil || unix.Lstat(file, &at) != nil: // it was removed meanwhile
			case at.Dev != top.Dev && e.IsDir():
				return filepath.SkipDir
			case lacks == "inodes":
				uses[path.Dir(file)]++
			case at.Dev == top.Dev && e.Type().IsRegular():
				uses[file] = at.Blocks / 2
			}
			return nil
		})
	})
	if err != nil || len(uses) == 0 {
		return "", ""
	}
	most := slices.MaxFunc(sortedKeys(uses), func(a, b string) int { return cmp.Compare(uses[a], uses[b]) })
	if lacks == "inodes" {
		return fmt.Sprintf("; most of them are in %s (%s)", safetext.Word(most), count(int(uses[most]), "file")), ""
	}
	return fmt.Sprintf("; its largest file is %s (%d KiB)", safetext.Word(most), uses[most]), most
}

// remount mounts the file system of a directory writable.
func (x *diagnosis) remount(ctx context.Context, dir string) []Fix {
	fix := []Fix{run("findmnt", "--target", dir), note("if dmesg shows no error of the disk: repair that first")}
	return append(append(fix, x.writable(ctx, dir)...), systemctl("restart", serviceUnit))
}

func (x *diagnosis) writable(ctx context.Context, dir string) []Fix {
	point := cmp.Or(x.mountOf(ctx, dir).Point, "/")
	if x.rootOnly(ctx, point) {
		// The mount can be read-only, or its file system; the line that does not apply may fail.
		return []Fix{run("mount", "-o", "remount,bind,rw", point), run("mount", "-o", "remount,rw", point)}
	}
	return []Fix{note("mount %s writable by hand: another user can change a directory on its path", safetext.ShellWord(point))}
}
