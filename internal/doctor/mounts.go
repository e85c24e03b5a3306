package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/systemd"
	"csi-registrar/internal/worker"
)

// mount is a line of /proc/PID/mountinfo.
type mount struct {
	point, fstype, source string
}

// String names it for people.
func (m mount) String() string {
	return fmt.Sprintf("%s, type %s, from %s", safetext.Word(m.point), safetext.Word(m.fstype), safetext.Word(m.source))
}

const maxMounts = 8 << 20 // bytes of mountinfo

// mounts reads this process's mounts, in the order in which they were made.
func (x *diagnosis) mounts() ([]mount, error) {
	data, err := readSome(filepath.Join(x.proc(), "self/mountinfo"), maxMounts)
	if err != nil {
		return nil, err
	}
	return parseMounts(string(data)), nil
}

// parseMounts reads mountinfo (proc(5)).
func parseMounts(text string) (all []mount) {
	for line := range strings.Lines(text) {
		before, after, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
		fields, rest := strings.Fields(before), strings.Fields(after)
		if ok && len(fields) >= 6 && len(rest) >= 2 {
			all = append(all, mount{unescape(fields[4]), rest[0], unescape(rest[1])})
		}
	}
	return all
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// mountOf returns the mount that a path is on; not ok if that is the root file system, or not
// known.
func mountOf(all []mount, file string) (m mount, ok bool) {
	for _, candidate := range all { // a later one covers an earlier one at the same point
		if candidate.point != "/" && systemd.Within(file, candidate.point) && len(candidate.point) >= len(m.point) {
			m, ok = candidate, true
		}
	}
	return m, ok
}

// maxNames is how many names and links are followed on the way to a path.
const maxNames = 100

// hanging follows a path name by name and returns the first that does not answer, after symbolic
// links; empty if all do.
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

// unmount returns the mount that a path hangs on, as the rest of a sentence, and how to unmount
// it. Both are empty if err is another error than a file system that does not answer.
func (x *diagnosis) unmount(ctx context.Context, file string, err error) (where string, fix []Fix) {
	if !errors.As(err, new(*worker.NotAnswering)) {
		return "", nil
	}
	name := x.hanging(ctx, file)
	if name == "" {
		name = file
	}
	all, err := look(ctx, x, x.proc(), x.mounts)
	m, ok := mountOf(all, name)
	if err != nil || !ok {
		return "", []Fix{note("bring the file system back that does not answer"), run("findmnt")}
	}
	if !x.rootOnly(ctx, m.point) {
		return ": that is " + m.String(), []Fix{note("bring its server back, or unmount %s by hand: another user can change a directory on its path", safetext.ShellWord(m.point))}
	}
	return ": that is " + m.String(), []Fix{note("if its server does not come back"), run("umount", "--force", "--lazy", m.point)}
}

// full returns "space" or "inodes" if the file system has none left; else empty.
func full(dir string) (string, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return "", &fs.PathError{Op: "statfs", Path: dir, Err: err}
	}
	switch {
	case st.Blocks > 0 && st.Bavail == 0 && st.Bfree == 0:
		return "space", nil
	case st.Files > 0 && st.Ffree == 0:
		return "inodes", nil
	}
	return "", nil
}
