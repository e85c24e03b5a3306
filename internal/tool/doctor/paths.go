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
	"regexp"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

// maxNames limits the number of names and links on a path.
const maxNames = 100

// place is how far a path leads.
type place struct {
	name         string // where it ends, or leads no further, without links before
	st           unix.Statx_t
	link, target string // the last symbolic link before that
	inside       bool   // the path goes on below name
	err          error  // why it leads no further
}

// follow follows a path and its symbolic links, and opens nothing.
func (x *diagnosis) follow(ctx context.Context, file string) (p place) {
	done, rest := "/", strings.Split(strings.Trim(path.Clean(file), "/"), "/")
	for range maxNames {
		name := path.Join(done, rest[0])
		next, err := look(ctx, x, name, func() (n place, err error) {
			err = unix.Statx(unix.AT_FDCWD, name, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, unix.STATX_BASIC_STATS, &n.st)
			if err == nil && n.file().IsLink() {
				n.target, err = os.Readlink(name)
			}
			return n, err
		})
		rest = rest[1:]
		p.name, p.st, p.inside, p.err = name, next.st, len(rest) > 0, err
		switch {
		case err == nil && next.target != "":
			if !path.IsAbs(next.target) {
				next.target = path.Join(done, next.target)
			}
			p.link, p.target, done = name, next.target, "/"
			rest = append(strings.Split(strings.Trim(path.Clean(next.target), "/"), "/"), rest...)
			continue
		case err == nil && p.inside && !p.file().IsDir():
			p.err = unix.ENOTDIR
		}
		if p.err != nil || !p.inside {
			return p
		}
		done = name
	}
	p.err = unix.ELOOP
	return p
}

func (p place) file() unixsock.File { return unixsock.File{Mode: p.st.Mode, UID: p.st.Uid} }

// hanging returns the first name on a path whose file system does not answer; empty if all do.
func (x *diagnosis) hanging(ctx context.Context, file string) string {
	if p := x.follow(ctx, file); errors.As(p.err, new(*worker.NotAnswering)) {
		return p.name
	}
	return ""
}

// pathInError matches the paths in an error, but not those of URLs.
var pathInError = regexp.MustCompile(`(?:^|[\s"'‘=(\[]|unix:|::)(/[\w.@%+,~/-]*[\w~])`)

// obstacles examines the paths in an error of a unit, and returns what is wrong with one of them,
// as the rest of a sentence, and how to correct it.
func (x *diagnosis) obstacles(ctx context.Context, unit, why string) (text string, fix []Fix) {
	for _, m := range pathInError.FindAllStringSubmatch(why, 10) {
		found, correct := x.obstacle(ctx, unit, path.Clean(m[1]), why)
		if named, _ := x.placeInUnit(ctx, unit, m[1]); named == "" && x.userOf(ctx, unit) != "root" {
			correct = []Fix{note("correct that, if it is for %s: its program, of another user, can name any file", unit)}
		}
		if found == "" || text != "" && !certain(correct) {
			continue
		}
		if text, fix = "; "+found, correct; certain(fix) {
			break
		}
	}
	return text, fix
}

// certain reports whether a fix has a command.
func certain(fix []Fix) bool { return !fix[len(fix)-1].IsComment() }

// obstacle returns what is wrong with a path that an error of a unit names, and how to correct it.
// What can be intended, such as a read-only /usr, counts only if the error is about it.
func (x *diagnosis) obstacle(ctx context.Context, unit, file, why string) (text string, fix []Fix) {
	text, fix = x.wrong(ctx, unit, file, why)
	for i, f := range fix {
		if args := f.Command.Args; len(args) > 0 && !x.rootOnly(ctx, args[len(args)-1]) {
			fix[i] = note("correct %s by hand: another user can change a directory on its path", safetext.ShellWord(args[len(args)-1]))
		}
	}
	return text, fix
}

// userOf returns the user of a unit.
func (x *diagnosis) userOf(ctx context.Context, unit string) string {
	return cmp.Or(x.show(ctx, unit, "User")["User"], "root")
}

func (x *diagnosis) wrong(ctx context.Context, unit, file, why string) (text string, fix []Fix) {
	says := func(words string) bool { return regexp.MustCompile("(?i)" + words).MatchString(why) }
	p := x.follow(ctx, file)
	at, dir, missing := p.file(), p.name, errors.Is(p.err, fs.ErrNotExist)
	if missing {
		dir = path.Dir(p.name)
	}
	st, _ := look(ctx, x, dir, func() (st unix.Statfs_t, err error) { return st, unix.Statfs(dir, &st) })
	lacks, m, other := lacking(st), x.mountOf(ctx, dir), ""
	point := cmp.Or(m.Point, "/")
	shown, word, mount := safetext.Word(p.name), safetext.ShellWord(p.name), safetext.Word(point)
	covered := shown + " does not exist; what is mounted at " + mount + ", type " + safetext.Word(m.Type) + ", can cover it"
	empty := p.err == nil && at.IsRegular() && p.st.Size == 0
	place, _ := x.placeInUnit(ctx, unit, file)
	exec := strings.Contains(why, "spawning "+file) || strings.Contains(why, "exec "+file)
	put := note("put %s back, or correct %s", safetext.ShellWord(file), cmp.Or(place, "what names it"))
	var head []byte
	own, _ := readSome("/proc/self/exe", 20) // two bytes at 18 are the machine
	switch {
	case empty || missing:
		other = x.backup(ctx, p.name)
	case exec && at.IsRegular():
		head, _ = look(ctx, x, p.name, func() ([]byte, error) { return readSome(p.name, 20) })
	}
	need, barred, permit := uint16(use), "", []Fix(nil)
	if p.err != nil || at.IsDir() || says("file exists") {
		need = right
	}
	if says("not permitted|permission denied|not a directory|file exists") {
		barred, permit = x.locked(ctx, dir, need, unit)
	}
	switch {
	case errors.As(p.err, new(*worker.NotAnswering)):
		text, fix = x.unmount(ctx, p.name)
		return shown + " does not answer" + text, fix
	case lacks == readOnly && says("read-only file system"):
		// The mount can be read-only, or its file system; the line that does not apply may fail.
		return shown + " is on " + mount + ", which is mounted read-only", []Fix{note("if dmesg shows no error of the disk: repair that first"),
			run("mount", "-o", "remount,bind,rw", point), run("mount", "-o", "remount,rw", point)}
	case lacks != "" && says("no space left"):
		return x.full(ctx, dir, lacks)
	case barred != "":
		return barred, permit
	case at.IsDir() && (exec || says("is a directory|address already in use")):
		return shown + " is a directory, not a file", append(x.remove(ctx, p.name, at), put)
	case p.err == nil && slices.Contains([]string{"kubelet.crt", "kubelet.key"}, path.Base(p.name)) && (empty || says("cert|tls")):
		base := path.Join(path.Dir(dir), "kubelet.")
		return shown + " is not valid; the kubelet makes it and its key anew if they are not there", []Fix{run("rm", "-f", base+"crt", base+"key")}
	case empty && other != "":
		return shown + " is empty, and " + safetext.Word(other) + " is not", []Fix{run("mv", other, p.name)}
	case empty && !strings.Contains(path.Base(p.name), "lock") && !says("permission denied"):
		return shown + " is empty", []Fix{note("%s has no content: install its package again, or copy it there again", word)}
	case exec && at.IsRegular() && at.Mode&0o111 == 0:
		return shown + " is not executable", []Fix{run("chmod", "0755", p.name)}
	case exec && at.IsRegular() && st.Flags&unix.ST_NOEXEC != 0:
		return shown + " is on " + mount + ", which is mounted noexec", []Fix{run("mount", "-o", "remount,exec", point)}
	case exec && at.IsRegular() && !strings.HasPrefix(string(head), "\x7fELF"):
		return shown + " is a script that cannot be started", []Fix{note("the first line of %s must be #! and an interpreter that exists, without a carriage return", word), put}
	case exec && len(own) == len(head) && string(head[18:]) != string(own[18:]):
		return shown + " is a program for another architecture", []Fix{note("install the %s for %s", word, runtime.GOARCH)}
	case !missing || !exec && (p.link == "" || !says("file exists")) && !says("no such file|does not exist|unmet condition"):
		return "", nil
	case x.unmounted(ctx, p.name) != "":
		point = x.unmounted(ctx, p.name)
		return shown + " is below " + safetext.Word(point) + " of /etc/fstab, which is not mounted", []Fix{run("mount", point)}
	case other != "":
		return shown + " does not exist, but " + safetext.Word(other) + " does", []Fix{run("mv", "-n", other, p.name)}
	case p.link != "":
		fix = []Fix{note("create %s, or remove the link to it: rm %s", safetext.ShellWord(p.target), safetext.ShellWord(p.link))}
		if p.inside || says("mkdir") {
			fix = []Fix{run("mkdir", "-p", p.target)}
		}
		return safetext.Word(p.link) + " is a link to " + safetext.Word(p.target) + ", which does not exist", fix
	case m.Point != "" && (x.vacant(ctx, point) || x.covers(ctx, m)):
		return covered, []Fix{note("it is empty, or covers mounts that were there before: it was mounted by mistake, or too late"), run("umount", point)}
	case strings.Count(point, "/") > 1:
		return covered, []Fix{put, note("or, if that mount covers it:"), optional(run("umount", point))}
	case says("bind:") && p.inside:
		return shown + " does not exist", []Fix{run("mkdir", "-p", path.Dir(file))}
	}
	return shown + " does not exist", []Fix{put}
}

// The owner needs these modes to create files in a directory, to enter it, and to read a file.
const right, enter, use = 0o300, 0o100, 0o400

// locked returns why the user of a unit cannot use a file, or enter those on its path: a mode,
// chattr +i, or a file in place of a directory, and how to permit it; why is empty if it can. Root
// is without capabilities.
func (x *diagnosis) locked(ctx context.Context, file string, need uint16, unit string) (why string, fix []Fix) {
	p := x.follow(ctx, file)
	at := p.file()
	user := x.userOf(ctx, unit)
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
	return fmt.Sprintf("%s has mode %04o and belongs to %s, which keeps %s out", shown, at.Mode&0o777, trust.Who(at.UID), safetext.Word(user)),
		[]Fix{note("if %s is for %s, give it to that user", safetext.ShellWord(file), safetext.ShellWord(user))}
}

// aside matches what is appended to the name of a file that is set aside.
var aside = regexp.MustCompile(`(?i)^(~|[._-](bak|backup|old|orig|sav|rpmsave|rpmorig|dpkg-|off|disabled|good|prev|copy|[0-9]{4}).*)$`)

// backup returns a file beside a missing or empty one that was set aside from it; empty if there is
// none, or several.
func (x *diagnosis) backup(ctx context.Context, file string) string {
	found, _ := look(ctx, x, path.Dir(file), func() ([]string, error) { return filepath.Glob(file + "*") })
	found = slices.DeleteFunc(found, func(f string) bool { return !aside.MatchString(f[len(file):]) })
	if len(found) != 1 || x.follow(ctx, found[0]).st.Size == 0 {
		return ""
	}
	return found[0]
}

// vacant reports whether a directory is empty, but for what mkfs creates.
func (x *diagnosis) vacant(ctx context.Context, dir string) bool {
	entries, err := look(ctx, x, dir, func() ([]os.DirEntry, error) { return os.ReadDir(dir) })
	return err == nil && !slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() != "lost+found" })
}
