package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
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
