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
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/mountinfo"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/worker"
)

// mountOf returns the mount that a path is on; the zero Mount if that is the root file system, or
// not known.
func (x *diagnosis) mountOf(ctx context.Context, file string) (m mountinfo.Mount) {
	// A later one covers an earlier one at the same point.
	for _, other := range x.mountsOf(ctx, "self") {
		if other.Point != "/" && rootdir.Within(file, other.Point) && len(other.Point) >= len(m.Point) {
			m = other
		}
	}
	return m
}

// unmounted returns the mount point in /etc/fstab that a path is on and that is not mounted; empty
// if there is none.
func (x *diagnosis) unmounted(ctx context.Context, file string) string {
	mounted := x.mountOf(ctx, file).Point
	for line := range strings.Lines(string(x.readFile(ctx, "etc/fstab"))) {
		f := strings.Fields(line)
		if len(f) > 2 && f[0][0] != '#' && path.IsAbs(f[1]) && len(f[1]) > max(len(mounted), 1) && rootdir.Within(file, f[1]) {
			return f[1]
		}
	}
	return ""
}

// hanging returns the first name on a path whose file system does not answer; empty if all do.
func (x *diagnosis) hanging(ctx context.Context, file string) string {
	if p := x.follow(ctx, file); errors.As(p.err, new(*worker.NotAnswering)) {
		return p.name
	}
	return ""
}

// unreadable explains why a path cannot be read if its file system does not answer: the mount, as
// the rest of a sentence, and how to unmount it. For any other error both are empty.
func (x *diagnosis) unreadable(ctx context.Context, file string, err error) (where string, fix []Fix) {
	if !errors.As(err, new(*worker.NotAnswering)) {
		return "", nil
	}
	return x.unmount(ctx, x.follow(ctx, file).name)
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

// readOnly is what lacking returns for a file system that is mounted read-only.
const readOnly = "read-only"

// lacking returns readOnly, or "space" or "inodes" if a file system has none left.
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

// The owner needs these modes to create files in a directory, to enter it, and to read a file.
const right, enter, use = 0o300, 0o100, 0o400

// locked returns why the user of a unit cannot use a file, or enter those on its path: a mode,
// chattr +i, or a file in place of a directory, and how to permit it; why is empty if it can. Root
// is without capabilities.
func (x *diagnosis) locked(ctx context.Context, file string, need uint16, unit string) (why string, fix []Fix) {
	p := x.follow(ctx, file)
	at := p.file()
	user := cmp.Or(x.show(ctx, unit)["User"], "root")
	ids, unknown := trust.Users(trust.SocketOwner(user))
	bits, shown := at.Mode&0o777, safetext.Word(file)
	if len(ids) > 0 && at.UID != ids[0] {
		bits <<= 6 // those of others
	}
	switch {
	case len(file) < 2 || unknown != nil:
		return "", nil
	case p.err != nil:
		return x.locked(ctx, path.Dir(file), need, unit)
	case !at.IsDir() && need != use:
		return shown + " is " + at.Kind() + ", not a directory", []Fix{run("mv", "-n", file, file+".old"), run("mkdir", file)}
	case need != enter && p.st.Attributes&unix.STATX_ATTR_IMMUTABLE != 0:
		return shown + " is immutable (chattr +i)", []Fix{run("chattr", "-i", file)}
	case bits&need == need || at.UID != ids[0] && user == "root": // see replaceable
		return x.locked(ctx, path.Dir(file), enter, unit)
	case at.UID == ids[0]:
		return fmt.Sprintf("%s has mode %04o, which keeps its owner out", shown, at.Mode&0o777), []Fix{run("chmod", "u+rwX", file)}
	}
	return fmt.Sprintf("%s has mode %04o and belongs to %s, which keeps user %s out", shown, at.Mode&0o777, trust.Who(at.UID), safetext.Word(user)),
		[]Fix{note("if %s is for %s, give it to that user", safetext.ShellWord(file), safetext.ShellWord(user))}
}

// space checks that a registration socket can be created. A kubelet does not start either on a file
// system that is full or read-only.
func (x *diagnosis) space(ctx context.Context, dir string) {
	for _, d := range []string{dir, filepath.Join(x.o.Root, "run")} {
		why, fix := x.obstacle(ctx, "", d, "read-only file system, no space left, not permitted, permission denied")
		id := ID("file-system-read-only")
		if strings.Contains(why, " left") {
			id = "file-system-full"
		}
		if strings.Contains(why, " mounted read-only") { // the sandbox has a copy of the mount
			fix = append(fix, systemctl("restart", serviceUnit))
		}
		if why != "" {
			x.finding("", "file system", id, why+": no registration socket can be created or removed",
				"mode 0750, not immutable, on a writable file system with free space and inodes: the daemon is root without capabilities", fix...)
			return
		}
	}
	x.checked("", "file system", OK, "writable, with space and inodes left")
}

// full returns that a file system has no space or inodes left, and how to free some.
func (x *diagnosis) full(ctx context.Context, dir, lacks string) (text string, fix []Fix) {
	point := cmp.Or(x.mountOf(ctx, dir).Point, "/")
	text, file := x.largest(ctx, point, lacks)
	fix = []Fix{run("df", "-h", dir), run("df", "-i", dir), run("du", "-xah", "-t", "1M", point), run("du", "-x", "--inodes", "-t", "100", point), note("remove files that are not needed from that file system")}
	if file != "" && x.rootOnly(ctx, file) {
		fix = append(fix, optional(run("rm", file)))
	}
	return "the file system of " + safetext.Word(dir) + " has no " + lacks + " left" + text, fix
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
		return fmt.Sprintf("; most of them are in %s (%s)", safetext.Word(most), safetext.Count(int(uses[most]), "file")), ""
	}
	return fmt.Sprintf("; its largest file is %s (%d KiB)", safetext.Word(most), uses[most]), most
}

// notStarted reports pods that have run no container, and of which the kubelet has logged no error:
// it does so after 2 minutes if the driver of a volume is not registered (kubelet v1.37).
func (x *diagnosis) notStarted(ctx context.Context) {
	dir := filepath.Join(x.config.Config.Kubelet.RootDir, "pods")
	pods, _ := look(ctx, x, dir, func() (pods []string, err error) { // an error: it does not answer
		entries, err := os.ReadDir(dir)
		for _, e := range entries {
			at, err := e.Info()
			_, started := os.Lstat(filepath.Join(dir, e.Name(), "containers"))
			if err == nil && errors.Is(started, fs.ErrNotExist) && time.Since(at.ModTime()) > 20*time.Second && time.Since(at.ModTime()) < 3*time.Minute {
				pods = append(pods, safetext.Word(e.Name()))
			}
		}
		return pods, err
	})
	pods = slices.DeleteFunc(pods, func(pod string) bool {
		return slices.ContainsFunc(x.waiting, func(w podWait) bool { return w.pod == pod })
	})
	if x.kubelet != nil && len(pods) > 0 {
		x.finding("", "volumes", "pods-not-started", "pods have run no container yet, and the kubelet has logged no error: "+safetext.Some(pods, 5),
			"they run, unless an image is pulled; the kubelet logs after 2 minutes that a pod waits for a volume",
			note("with kubectl: see which pods; the PersistentVolume of each claim must name a driver that is registered on this node; else it is created again"),
			optional(run("kubectl", "get", "pods", "-A", "--field-selector", "status.phase=Pending,spec.nodeName="+x.nodeName())),
			optional(run("kubectl", strings.Fields(volumesOfClaims)...)))
	}
}
