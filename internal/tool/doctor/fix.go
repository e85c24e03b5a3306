package doctor

import (
	"context"
	"fmt"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"

	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
)

// Fix is a line of the script that fixes a finding: a command for root's shell, or a comment. The
// lines can be pasted as they are. A comment explains the next line, names an alternative, or
// describes a step for which there is no command.
type Fix struct {
	Command safetext.Command
	Then    []safetext.Command // run if Command succeeds
	Comment string             // in place of Command
}

// IsComment reports whether the line does nothing.
func (f Fix) IsComment() bool { return f.Command.Name == "" }

// String returns the line as it is pasted.
func (f Fix) String() string {
	if f.IsComment() {
		return "# " + f.Comment
	}
	line := f.Command.String()
	for _, c := range f.Then {
		line += " && " + c.String()
	}
	return line
}

// MarshalText returns the line as it is pasted.
func (f Fix) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// run returns the line of a command.
func run(name string, args ...string) Fix { return Fix{Command: safetext.Run(name, args...)} }

// note returns a comment. It must be harmless in a shell that does not take # for a comment (zsh):
// its values are words of ShellWord, names that were checked, or numbers.
func note(format string, args ...any) Fix {
	return Fix{Comment: safetext.Clean(fmt.Sprintf(format, args...), maxText)}
}

// write returns the line that writes lines into a file.
func write(file string, lines ...string) Fix {
	f := run("printf", append([]string{`%s\n`}, lines...)...)
	f.Command.Stdout = file
	return f
}

// systemctl returns the line of a systemctl command.
func systemctl(verb, unit string) Fix { return run("systemctl", verb, unit) }

// logOf shows the last lines in the journal of a unit. A pager would read the lines that are pasted
// after the command.
func logOf(unit string) Fix { return run("journalctl", "--no-pager", "-u", unit, "-n", "50") }

// stateOf shows the state of a unit.
func stateOf(unit string) Fix { return run("systemctl", "--no-pager", "status", unit) }

// reloadUnits applies changed unit files. The service restarts its sockets, which cannot be started
// beside it.
func reloadUnits() []Fix {
	return []Fix{run("systemctl", "daemon-reload"), systemctl("restart", serviceUnit)}
}

// rootOnly reports whether only root can change the directories and links on a path, so that a
// command with that path still affects the same file when it is run later.
func (x *diagnosis) rootOnly(ctx context.Context, file string) bool {
	dir := path.Dir(path.Clean(file)) // the file itself may not answer
	return x.check(ctx, dir, func() error { return trust.SocketOwner("root").Path(dir) }) == nil
}

// remove returns the line that removes a file.
func (x *diagnosis) remove(ctx context.Context, file string, at unixsock.File) Fix {
	switch {
	case !x.rootOnly(ctx, file):
		return note("remove %s by hand: another user can change a directory on its path, so check first what is there", safetext.ShellWord(file))
	case at.IsDir():
		return run("rmdir", file)
	}
	return run("rm", file)
}

// dropInPrefix begins the names of the configuration files that fixes write.
const dropInPrefix = "99-doctor-"

// setKey sets a key of the configuration in a separate file that overrides all others. what names
// the file; origin is the place where the key is set now.
func (x *diagnosis) setKey(what, table, line, origin string) []Fix {
	file := filepath.Join(x.confDir(), dropInPrefix+what+".toml")
	now, _, _ := strings.Cut(origin, ".toml:")
	switch {
	case x.o.Source.File != "":
		return []Fix{note("write %s under %s in %s", safetext.ShellWord(line), safetext.ShellWord(table), safetext.ShellWord(x.o.Source.File))}
	case strings.ContainsFunc(line, unicode.IsControl):
		return []Fix{note("rename it: a configuration should not have control characters")}
	case filepath.Base(now+".toml") > filepath.Base(file) && strings.Contains(now, "/conf.d/"):
		return []Fix{note("write %s under %s in %s", safetext.ShellWord(line), safetext.ShellWord(table), safetext.ShellWord(now+".toml"))}
	}
	return []Fix{run("mkdir", "-p", x.confDir()), write(file, table, line)}
}

// setDriverKey sets a key of a driver.
func (x *diagnosis) setDriverKey(driver, key, value string) []Fix {
	return append(x.setKey(driver+"-"+key, fmt.Sprintf("[driver.%q]", driver), key+" = "+value, x.origin(driver, key)), reload)
}

// installDropIn puts the lines of systemd.DropIn in place.
func installDropIn(rootDir string) []Fix {
	if strings.ContainsFunc(rootDir, unicode.IsControl) { // it could be lines of a unit file
		return []Fix{note("give the kubelet a root directory without control characters in its name")}
	}
	unit, service := systemd.DropInLines(rootDir)
	if unit == "" {
		return append([]Fix{run("rm", "-f", systemd.DropInFile)}, reloadUnits()...)
	}
	return writeDropIn(systemd.DropInFile, append([]string{"[Unit]", unit, "[Service]"}, service...)...)
}

// writeDropIn writes a drop-in of the service and applies it.
func writeDropIn(file string, lines ...string) []Fix {
	return slices.Concat([]Fix{run("mkdir", "-p", path.Dir(file)), write(file, lines...)}, reloadUnits())
}

// shipped are the directives that doctor restores, as in the unit files.
var shipped = map[string][]string{
	"FileDescriptorStoreMax": {"FileDescriptorStoreMax=4096", "Environment=CSI_REGISTRAR_FDSTORE=4096"},
	"WatchdogSec":            {"WatchdogSec=20s"},
	"ExecStart":              {"ExecStart=", "ExecStart=/usr/bin/csi-registrar run --keep-sockets"},
	"ListenStream":           {"ListenStream=", "ListenStream=127.0.0.1:9809"},
}

// restore undoes the change of one directive of a unit and keeps all other changes: it removes the
// directive from the last drop-in that sets it, or overrides it where that drop-in is unknown or
// must not be edited.
func (x *diagnosis) restore(ctx context.Context, unit, section, directive string) []Fix {
	sets := regexp.MustCompile(`(?m)^[ \t]*` + directive + `[ \t]*=`)
	for _, file := range slices.Backward(x.dropIns(ctx, unit)) {
		data, err := look(ctx, x, file, func() ([]byte, error) { return readSome(filepath.Join(x.o.Root, file), maxProcFile) })
		if err != nil || !sets.Match(data) {
			continue
		}
		if strings.HasPrefix(file, "/usr/") || strings.Contains(string(data), "\\\n") || !x.rootOnly(ctx, filepath.Join(x.o.Root, file)) {
			break
		}
		return slices.Concat([]Fix{note("%s= is set in %s", directive, safetext.ShellWord(file)),
			run("sed", "-i", "/^[[:blank:]]*"+directive+"[[:blank:]]*=/d", file)}, reloadUnits())
	}
	return override(unit, section, directive)
}

// override sets one directive of a unit as shipped, in a drop-in that is read after those with
// usual names.
func override(unit, section, directive string) []Fix {
	file := "/etc/systemd/system/" + unit + ".d/zz-doctor-" + strings.ToLower(directive) + ".conf"
	return slices.Concat([]Fix{run("mkdir", "-p", path.Dir(file)),
		write(file, append([]string{"[" + section + "]"}, shipped[directive]...)...)}, reloadUnits())
}

// dropIns returns the drop-ins of a unit in the order in which systemd reads them.
func (x *diagnosis) dropIns(ctx context.Context, unit string) []string {
	p, _ := x.o.Units.Show(ctx, unit, "DropInPaths") // a finding already reports the error
	return strings.Fields(p["DropInPaths"])
}
