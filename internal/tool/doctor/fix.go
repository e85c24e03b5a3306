package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
)

// Fix is a line of the script that fixes a finding: a command for root's shell, or a comment. The
// lines can be pasted as they are. A comment explains the next line, names an alternative, or
// describes a step for which there is no command.
type Fix struct {
	Command  safetext.Command
	Comment  string // in place of Command
	Optional bool   // Command is commented out: a person decides whether to run it
}

// IsComment reports whether the line does nothing.
func (f Fix) IsComment() bool { return f.Command.Name == "" || f.Optional }

// String returns the line as it is pasted.
func (f Fix) String() string {
	text := cmp.Or(f.Comment, f.Command.String())
	if f.IsComment() {
		return "# " + text
	}
	return text
}

// optional returns the line of a command that a person may run.
func optional(f Fix) Fix {
	f.Optional = true
	return f
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

// stop ends a process, and keeps systemd from starting it again.
func (p process) stop() Fix {
	if strings.HasSuffix(p.unit, ".service") {
		return run("systemctl", "disable", "--now", p.unit)
	}
	return run("kill", strconv.Itoa(p.pid))
}

// logOf shows the last warnings in the journal of a unit. Other programs than csi-registrar have
// no priorities: their lines have one of some words, or klog's prefix. A pager would read the lines
// that are pasted after the command.
func logOf(unit string) Fix {
	if strings.HasPrefix(unit, "csi-registrar") {
		return run("journalctl", "--no-pager", "-b", "-u", unit, "-n", "20", "-p", "warning")
	}
	return run("journalctl", "--no-pager", "-b", "-u", unit, "-n", "20", "--grep", "warn|^w[0-9]|"+errorWords)
}

// errorWords are in the last line of a program that ends because of an error.
const errorWords = "error|fail|fatal|panic|unknown|invalid|no such|cannot|denied|refused|timed out|unreachable|not (defined|found|ready|answer)|^[ef][0-9]"

// reloadUnits applies changed unit files. The service restarts its sockets, which cannot be started
// beside it.
func reloadUnits() []Fix {
	return []Fix{run("systemctl", "daemon-reload"), systemctl("restart", serviceUnit)}
}

// rootOnly reports whether only root can change the directories and links on a path, so that a
// command with that path still affects the same file when it is run later.
func (x *diagnosis) rootOnly(ctx context.Context, file string) bool {
	return x.trusted(ctx, path.Dir(path.Clean(file))) == nil // the file itself may not answer
}

// remove returns the lines that remove a file.
func (x *diagnosis) remove(ctx context.Context, file string, at unixsock.File) (fix []Fix) {
	if !x.rootOnly(ctx, file) {
		return []Fix{note("remove %s by hand: another user can change a directory on its path, so check first what is there", safetext.ShellWord(file))}
	}
	_, fix = x.obstacle(ctx, "", file, "read-only file system, not permitted")
	switch {
	case at.IsDir() && !x.vacant(ctx, file):
		return append(fix, run("mv", "-n", file, path.Dir(file)+"-"+path.Base(file)+".old"))
	case at.IsDir():
		return append(fix, run("rmdir", file))
	}
	return append(fix, run("rm", file))
}

// dropInPrefix begins the names of the configuration files that fixes write.
const dropInPrefix = "99-doctor-"

// setKey sets a key of the configuration in a separate file that overrides all others. what names
// the file; origin is the place where the key is set now.
func (x *diagnosis) setKey(what, table, line, origin string) []Fix {
	file := filepath.Join(x.confDir(), dropInPrefix+what+".toml")
	now, number, _ := strings.Cut(origin, ".toml:")
	switch {
	case path.Dir(now) == x.confDir() && plainSetting.MatchString(line):
		// The line may have more: the rest of a dotted key, of an inline table, a comment.
		key, _, _ := strings.Cut(line, " ")
		return []Fix{run("sed", "-i", "-E", number+`s@\b`+key+` *= *("[^"]*"|[^],}# ]*)@`+line+"@", now+".toml")}
	case x.o.Source.File != "":
		return []Fix{note("write %s under %s in %s", safetext.ShellWord(line), safetext.ShellWord(table), safetext.ShellWord(x.o.Source.File))}
	case strings.ContainsFunc(line, unicode.IsControl):
		return []Fix{note("rename it: a configuration should not have control characters")}
	}
	return []Fix{run("mkdir", "-p", x.confDir()), write(file, table, line)}
}

// plainSetting matches a line of a configuration with nothing that is special for sed.
var plainSetting = regexp.MustCompile(`^\w+ = [\w"./:-]+$`)

// setDriverKey sets a key of a driver.
func (x *diagnosis) setDriverKey(driver, key, value string) []Fix {
	fix := x.setKey(driver+"-"+key, fmt.Sprintf("[driver.%q]", driver), key+" = "+value, x.origin(driver, key))
	if fix[0].IsComment() { // which asks for an edit
		return fix
	}
	return append(fix, reload)
}

// installDropIn puts the lines of rootdir.DropIn in place.
func installDropIn(rootDir string) []Fix {
	if strings.ContainsFunc(rootDir, unicode.IsControl) { // it could be lines of a unit file
		return []Fix{note("give the kubelet a root directory without control characters in its name")}
	}
	unit, service := rootdir.DropInLines(rootDir)
	if unit == "" {
		return append([]Fix{run("rm", "-f", rootdir.DropInFile)}, reloadUnits()...)
	}
	return writeDropIn(rootdir.DropInFile, append([]string{"[Unit]", unit, "[Service]"}, service...)...)
}

// writeDropIn writes a drop-in of the service and applies it.
func writeDropIn(file string, lines ...string) []Fix {
	return slices.Concat([]Fix{run("mkdir", "-p", path.Dir(file)), write(file, lines...)}, reloadUnits())
}

// shipped are the directives that doctor overrides, as in the unit files.
var shipped = map[string][]string{
	"FileDescriptorStoreMax": {"FileDescriptorStoreMax=4096", "Environment=CSI_REGISTRAR_FDSTORE=4096"},
	"WatchdogSec":            {"WatchdogSec=20s"},
	"User":                   {"User=", "DynamicUser=no"},
	"ListenStream":           {"ListenStream=", "ListenStream=/run/csi-registrar/control.sock"},
	"ReadWritePaths":         {"ReadWritePaths=-/var/lib/kubelet/plugins_registry"},
	"LimitNOFILE":            {"LimitNOFILE=262144"},
	"ExecStart":              {"ExecStart=", "ExecStart=/usr/bin/csi-registrar run --keep-sockets"},
}

// override sets one directive of a unit as shipped, in a drop-in that is read after those with
// usual names.
func override(unit, section, directive string) []Fix {
	return writeDropIn("/etc/systemd/system/"+unit+".d/zz-doctor-"+strings.ToLower(directive)+".conf",
		append([]string{"[" + section + "]"}, shipped[directive]...)...)
}

// dropIns returns what the administrator's drop-ins of a unit set, as the rest of a sentence, and
// how to take that back. A daemon that does not run, or cannot be restarted, starts as shipped: its
// drop-ins, and a copy of its unit, are set aside. Only the drop-in for another root_dir stays.
func (x *diagnosis) dropIns(ctx context.Context, unit string) (set string, fix []Fix) {
	p := x.show(ctx, unit)
	aside := unit == serviceUnit && (errors.Is(x.daemon.err, control.ErrNotRunning) || x.properties["LoadState"] != "loaded")
	_, err := x.stat(ctx, filepath.Join("/", x.o.Source.Root, "usr/lib/systemd/system", serviceUnit))
	if own := p["FragmentPath"]; aside && err == nil && !ofPackage(own) {
		set, fix = "; "+safetext.Word(own)+" is in place of the unit of the package", []Fix{setAside(own)}
	}
	for _, file := range elements(p["DropInPaths"]) {
		text := x.readFile(ctx, file)
		if text == nil || ofPackage(file) || aside && file == rootdir.DropInFile {
			continue
		}
		var directives []string
		first := 0
		for i, line := range strings.Split(string(text), "\n") {
			if line = strings.TrimSpace(line); line != "" && !strings.ContainsAny(line[:1], "#;[") {
				directives, first = append(directives, line), cmp.Or(first, i+1)
			}
		}
		set += fmt.Sprintf("; %s:%d sets %s", safetext.Word(file), first, safetext.Quote(strings.Join(directives, " ")))
		if aside {
			fix = append(fix, setAside(file))
		} else {
			fix = append(fix, note("if that is the cause, correct it, or set it aside:"), optional(setAside(file)))
		}
	}
	if len(fix) > 0 {
		fix = append(fix, run("systemctl", "daemon-reload"))
	}
	return set + x.changed(ctx, unit), fix
}

// ofPackage reports whether a unit file is a package's. Debian 12 names those in /usr/lib by /lib.
func ofPackage(file string) bool { return strings.HasPrefix(strings.TrimPrefix(file, "/usr"), "/lib/") }

// setAside renames a file of a unit, so that systemd does not read it.
func setAside(file string) Fix { return run("mv", "-n", file, file+".off") }

// placeInUnit returns the last line of a unit's files that has a text, which counts, and its place
// as FILE:LINE; both are empty if there is none.
func (x *diagnosis) placeInUnit(ctx context.Context, unit, text string) (place, line string) {
	if unit == "" {
		return "", ""
	}
	for _, file := range x.unitFiles(ctx, unit) {
		for i, l := range strings.Split(string(x.readFile(ctx, file)), "\n") {
			if strings.Contains(l, text) {
				place, line = fmt.Sprintf("%s:%d", safetext.ShellWord(file), i+1), l
			}
		}
	}
	return place, line
}

// repair returns why the daemon's unit does not start, and the fix: it starts as shipped. The
// journal's last error has more than LoadError.
func (x *diagnosis) repair(ctx context.Context, text string) (why string, fix []Fix) {
	if text = cmp.Or(x.lastError(ctx, serviceUnit, x.properties), text); text != "" {
		why = ": " + safetext.Quote(text)
	}
	set, fix := x.dropIns(ctx, serviceUnit)
	// What the daemon itself has logged may name any path.
	wrong, correct := x.obstacles(ctx, serviceUnit, x.lastLine(ctx, serviceUnit, true, "_PID=1", "--priority=err"))
	return why + wrong + set, slices.Concat([]Fix{logOf(serviceUnit)}, correct, fix, []Fix{systemctl("restart", serviceUnit)})
}

// setBy returns the drop-in of a unit that has a directive ending so, as the rest of a sentence.
func (x *diagnosis) setBy(ctx context.Context, unit, directive string) string {
	place, line := x.placeInUnit(ctx, unit, directive+"=")
	if name, _, _ := strings.Cut(line, "="); place != "" && !ofPackage(place) && !strings.HasPrefix(line, "#") {
		return ", because of " + safetext.Word(name) + "= in " + place
	}
	return ""
}
