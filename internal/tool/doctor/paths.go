package doctor

import (
	"bytes"
	"cmp"
	"context"
	"errors"
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

// pathInError matches the paths in an error, but not those of URLs.
var pathInError = regexp.MustCompile(`(?:^|[\s"'‘=(\[]|unix:|::)(/[\w.@%+,~/-]*[\w~])`)

// obstacles examines the paths in an error of a unit, and returns what is wrong with one of them,
// as the rest of a sentence, and how to correct it.
func (x *diagnosis) obstacles(ctx context.Context, unit, why string) (text string, fix []Fix) {
	if text, fix = x.advised(ctx, unit, why); text != "" {
		return text, fix
	}
	for _, m := range pathInError.FindAllStringSubmatch(why, 10) {
		if at := x.follow(ctx, m[1]); at.err == nil && at.st.Mode&0o111 != 0 && at.file().IsRegular() && strings.HasPrefix(why, m[1]+":") {
			continue // the program that says so
		}
		found, correct := x.obstacle(ctx, unit, path.Clean(m[1]), why)
		if named, _ := x.placeInUnit(ctx, unit, m[1]); named == "" && cmp.Or(x.show(ctx, unit)["User"], "root") != "root" {
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

// suspect is a path in an error, and how far it leads.
type suspect struct {
	x *diagnosis
	place
	unit, path, why string
	dir             string // the last directory on it
	system          unix.Statfs_t
	point           string // where that file system is mounted
	putBack         Fix
}

// wrong returns the first of the known causes that applies; text is empty if none does.
func (x *diagnosis) wrong(ctx context.Context, unit, file, why string) (text string, fix []Fix) {
	s := &suspect{x: x, place: x.follow(ctx, file), unit: unit, path: file, why: why}
	if s.dir = s.name; s.missing() {
		s.dir = path.Dir(s.name)
	}
	s.system, _ = look(ctx, x, s.dir, func() (st unix.Statfs_t, err error) { return st, unix.Statfs(s.dir, &st) })
	s.point = cmp.Or(x.mountOf(ctx, s.dir).Point, "/")
	named, _ := x.placeInUnit(ctx, unit, file)
	named = cmp.Or(named, x.inConfig(ctx, x.show(ctx, unit)["ExecStart"], "unix://"+file), "what names it")
	s.putBack = note("put %s back, or correct %s", safetext.ShellWord(file), named)
	for _, check := range []func(context.Context) (string, []Fix){s.fileSystem, s.modes, s.content, s.program, s.absence} {
		if text, fix = check(ctx); text != "" {
			break
		}
	}
	return text, fix
}

// says reports whether the error matches a pattern, in whatever case.
func (s *suspect) says(pattern string) bool {
	return regexp.MustCompile("(?i)" + pattern).MatchString(s.why)
}

// starts reports whether the error is about the start of the program.
func (s *suspect) starts() bool {
	return strings.Contains(s.why, "spawning "+s.path) || strings.Contains(s.why, "exec "+s.path)
}

func (s *suspect) missing() bool { return errors.Is(s.err, fs.ErrNotExist) }
func (s *suspect) regular() bool { return s.err == nil && s.file().IsRegular() }
func (s *suspect) shown() string { return safetext.Word(s.name) }

// fileSystem reports that the file system does not answer, is read-only, or full.
func (s *suspect) fileSystem(ctx context.Context) (text string, fix []Fix) {
	switch lacks := lacking(s.system); {
	case errors.As(s.err, new(*worker.NotAnswering)):
		where, fix := s.x.unmount(ctx, s.name)
		return s.shown() + " does not answer" + where, fix
	case lacks == readOnly && s.says("read-only file system"):
		// The mount can be read-only, or its file system; the line that does not apply may fail.
		return s.shown() + " is on " + safetext.Word(s.point) + ", which is mounted read-only", []Fix{note("if dmesg shows no error of the disk: repair that first"),
			run("mount", "-o", "remount,bind,rw", s.point), run("mount", "-o", "remount,rw", s.point)}
	case lacks != "" && s.says("no space left"):
		return s.x.full(ctx, s.dir, lacks)
	}
	return "", nil
}

// modes reports what forbids its use to the user of the unit.
func (s *suspect) modes(ctx context.Context) (text string, fix []Fix) {
	need := uint16(use)
	made := strings.Contains(s.why, "mkdir "+s.path+":") || strings.Contains(s.why, "‘"+s.path+"’: File exists")
	if s.err != nil || s.file().IsDir() || made {
		need = right
	}
	if !s.says("not permitted|permission denied|not a directory|file exists") {
		return "", nil
	}
	return s.x.locked(ctx, s.dir, need, s.unit)
}

// content reports a directory in place of a file, and an empty file.
func (s *suspect) content(ctx context.Context) (text string, fix []Fix) {
	at, empty := s.file(), s.regular() && s.st.Size == 0
	other := ""
	if empty {
		other = s.x.backup(ctx, s.name)
	}
	switch {
	case at.IsDir() && (s.starts() || s.says("is a directory|address already in use")):
		return s.shown() + " is a directory, not a file", append(s.x.remove(ctx, s.name, at), s.putBack)
	case s.err == nil && slices.Contains([]string{"kubelet.crt", "kubelet.key"}, path.Base(s.name)) && (empty || s.says("cert|tls")):
		base := path.Join(path.Dir(s.name), "kubelet.")
		return s.shown() + " is not valid; the kubelet makes it and its key anew if they are not there", []Fix{run("rm", "-f", base+"crt", base+"key")}
	case other != "":
		return s.shown() + " is empty, and " + safetext.Word(other) + " is not", []Fix{run("mv", other, s.name)}
	case empty && !strings.Contains(path.Base(s.name), "lock") && !s.says("permission denied"):
		return s.shown() + " is empty", []Fix{note("%s has no content: install its package again, or copy it there again", safetext.ShellWord(s.name))}
	}
	return "", nil
}

// program reports why systemd cannot start a program that is there.
func (s *suspect) program(ctx context.Context) (text string, fix []Fix) {
	if !s.regular() || !s.starts() {
		return "", nil
	}
	head, _ := look(ctx, s.x, s.name, func() ([]byte, error) { return readSome(s.name, 4096) })
	own, _ := readSome("/proc/self/exe", 20) // two bytes at 18 are the machine
	loader := string(bytes.TrimRight(elfLoader.Find(head), "\x00"))
	switch _, err := s.x.stat(ctx, loader); {
	case s.st.Mode&0o111 == 0:
		return s.shown() + " is not executable", []Fix{run("chmod", "0755", s.name)}
	case s.system.Flags&unix.ST_NOEXEC != 0:
		return s.shown() + " is on " + safetext.Word(s.point) + ", which is mounted noexec", []Fix{run("mount", "-o", "remount,exec", s.point)}
	case !strings.HasPrefix(string(head), "\x7fELF"):
		return s.shown() + " is no ELF program, and no script that can be started",
			[]Fix{note("install %s again; a script must begin with #! and an interpreter that exists, without a carriage return", safetext.ShellWord(s.name)), s.putBack}
	case len(head) >= 20 && len(own) == 20 && string(head[18:20]) != string(own[18:]):
		return s.shown() + " is a program for another architecture", []Fix{note("install the %s for %s", safetext.ShellWord(s.name), runtime.GOARCH)}
	case loader != "" && errors.Is(err, fs.ErrNotExist):
		return s.shown() + " needs " + safetext.Word(loader) + ", which does not exist: it is a program for another distribution",
			[]Fix{note("install the %s for this distribution, or one that is linked statically", safetext.ShellWord(s.name)), s.putBack}
	}
	return "", nil
}

// elfLoader matches the dynamic loader that an ELF program names (PT_INTERP, elf(5)).
var elfLoader = regexp.MustCompile(`/[\w./-]*/ld[\w.-]*\.so[\w.]*\x00`)

// absence reports a file, or a directory on its path, that does not exist.
func (s *suspect) absence(ctx context.Context) (text string, fix []Fix) {
	if !s.missing() || !s.starts() && (s.link == "" || !s.says("file exists")) && !s.says("no such file|does not exist|unmet condition") {
		return "", nil
	}
	other, m := s.x.backup(ctx, s.name), s.x.mountOf(ctx, s.dir)
	covered := s.shown() + " does not exist; what is mounted at " + safetext.Word(s.point) + ", type " + safetext.Word(m.Type) + ", can cover it"
	switch point := s.x.unmounted(ctx, s.name); {
	case point != "":
		return s.shown() + " is below " + safetext.Word(point) + " of /etc/fstab, which is not mounted", []Fix{run("mount", point)}
	case other != "":
		return s.shown() + " does not exist, but " + safetext.Word(other) + " does", []Fix{run("mv", "-n", other, s.name)}
	case s.link != "":
		fix = []Fix{note("create %s, or remove the link to it: rm %s", safetext.ShellWord(s.target), safetext.ShellWord(s.link))}
		if s.inside || s.says("mkdir") {
			fix = []Fix{run("mkdir", "-p", s.target)}
		}
		return safetext.Word(s.link) + " is a link to " + safetext.Word(s.target) + ", which does not exist", fix
	case m.Point != "" && (s.x.vacant(ctx, s.point) || s.x.covers(ctx, m)):
		return covered, []Fix{note("it is empty, or covers mounts that were there before: it was mounted by mistake, or too late"), run("umount", s.point)}
	case strings.Count(s.point, "/") > 1:
		return covered, []Fix{s.putBack, note("or, if that mount covers it:"), optional(run("umount", s.point))}
	case s.says("bind:") && s.inside:
		return s.shown() + " does not exist", []Fix{run("mkdir", "-p", path.Dir(s.path))}
	}
	return s.shown() + " does not exist", []Fix{s.putBack}
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
