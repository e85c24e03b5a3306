package doctor

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/safetext"
)

var (
	reload = run("csi-registrar", "reload")
	giveUp = run("csi-registrar", "reload", "--force") // volumes that are in use
)

// loadConfig reads the files.
func (x *diagnosis) loadConfig(ctx context.Context) {
	where := cmp.Or(x.o.Source.File, filepath.Join(cmp.Or(x.o.Source.Root, "/"), "etc/csi-registrar"))
	r, err := look(ctx, x, where, func() (*config.Result, error) { return config.Load(x.o.Source), nil })
	if err != nil {
		r = &config.Result{Config: config.Default()}
		where, fix := x.unreadable(ctx, where, err)
		x.finding("", "configuration", "configuration-unreadable", err.Error()+where, "the configuration can be read", fix...)
	}
	x.config = r
}

// configuration reports the errors in the files, and drivers that were named on the command line
// but are not configured.
func (x *diagnosis) configuration(ctx context.Context) {
	for _, m := range x.config.Errors {
		if driver := driverOf(m.Key); driver == "" || x.selected(driver) {
			expected, fix := x.correct(ctx, m)
			m.Hint = "" // it is in expected
			x.finding(driver, "configuration", "configuration-error", m.Error(), expected, fix...)
		}
	}
	for _, name := range x.o.Drivers {
		if st, _ := x.daemon.Driver(name); st.NoTable {
			continue // see withoutTable
		}
		if _, ok := x.config.Config.Driver(name); !ok && !slices.Contains(x.config.Faulty, name) {
			x.absent(ctx, name)
		}
	}
	if len(x.config.Config.Drivers)+len(x.config.Faulty) == 0 && !x.named() && len(x.report.Findings) == 0 {
		x.finding("", "configuration", "no-driver-configured", "no driver is configured", `each driver has a table [driver."NAME"] with its socket`,
			note("write a file into %s, or let csi-registrar import write it from the DaemonSet of the driver", safetext.ShellWord(x.confDir())))
	}
	if len(x.report.Findings) == 0 {
		x.checked("", "configuration", OK, "%s, %s", safetext.Count(len(x.config.Files), "file"), safetext.Count(len(x.config.Config.Drivers), "driver"))
	}
}

// correct returns what is expected in place of an error, and its fix.
func (x *diagnosis) correct(ctx context.Context, m config.Error) (expected string, fix []Fix) {
	check := run("csi-registrar", "config", "check")
	if m.Command.Name != "" {
		fix := Fix{Command: m.Command}
		if dir := "/etc/csi-registrar"; m.Command.Name == "chown" && rootdir.Within(m.File, dir) {
			fix = run("chown", "-Rh", "root:root", dir)
		}
		return "only root can change it", []Fix{note("check its contents first"), fix, check, reload}
	}
	at, err := x.stat(ctx, m.File)
	switch {
	case err == nil && at.IsRegular() && filepath.Base(m.File) == "conf.d":
		return "a directory, for files with tables of drivers", []Fix{run("mv", "-n", m.File, m.File+".old"), run("mkdir", m.File), check}
	case err == nil && at.IsDir():
		return "a file, not a directory", append(x.remove(ctx, m.File, at), check)
	}
	fix = []Fix{note("edit %s, which the daemon reads within a second", safetext.ShellWord(m.File))}
	text, _ := look(ctx, x, m.File, func() ([]byte, error) { return readSome(m.File, maxProcFile) })
	lines := strings.Split(string(text), "\n")
	if _, link := x.obstacle(ctx, "", m.File, "no such file"); link != nil {
		fix = link
	}
	if m.Line < 1 || m.Line > len(lines) || !x.rootOnly(ctx, m.File) {
		return m.Hint, append(fix, check)
	}
	if driver := driverOf(m.Key); driver != "" && strings.Contains(m.Problem, ", which is also ") {
		disable := x.setDriverKey(driver, "enabled", "false")
		return m.Hint, append([]Fix{note("if %s is another driver, give it its own path in line %d of %s, else leave it out:", driver, m.Line, safetext.ShellWord(m.File))}, disable...)
	}
	if driver := driverOf(m.Key); driver != "" && strings.HasSuffix(m.Key, ".socket") {
		if socket := x.usualSocket(ctx, driver); socket != "" {
			right := x.setKey(driver+"-socket", fmt.Sprintf("[driver.%q]", driver), "socket = "+safetext.Quote(socket), fmt.Sprintf("%s:%d", m.File, m.Line))
			return "the driver listens on " + safetext.Word(socket), append(right, check)
		}
	}
	line := strings.TrimSpace(lines[m.Line-1])
	key, _, _ := strings.Cut(line, "=")
	name := strings.TrimSuffix(strings.TrimPrefix(line, "[driver."), "]")
	switch {
	case strings.Contains(m.Problem, "UTF-16"):
		convert := run("iconv", "-f", "UTF-16", "-t", "UTF-8", m.File+".utf16")
		convert.Command.Stdout = m.File
		fix = []Fix{run("mv", "-n", m.File, m.File+".utf16"), convert}
	case conflictMarker.MatchString(line):
		var at []int
		for i, l := range lines {
			if conflictMarker.MatchString(strings.TrimSpace(l)) {
				at = append(at, i+1)
			}
		}
		m.Hint = "one of the two versions between the conflict markers of git, which are in the lines " + strings.Trim(fmt.Sprint(at), "[]")
		if len(at) == 3 {
			fix = []Fix{note("to keep the first version:"), optional(run("sed", "-i", fmt.Sprintf("%dd;%d,%dd", at[0], at[1], at[2]), m.File)),
				note("or to keep the second version:"), optional(run("sed", "-i", fmt.Sprintf("%d,%dd;%dd", at[0], at[1], at[2]), m.File))}
		}
	case strings.ContainsAny(line, "“”"):
		fix = []Fix{run("sed", "-i", `/^ *#/!s/\xe2\x80\x9c\|\xe2\x80\x9d/"/g`, m.File)}
	case strings.Contains(m.Problem, "already been defined"):
		first := slices.IndexFunc(lines, func(l string) bool { return strings.TrimSpace(l) == line })
		again := table(lines[m.Line-1:])
		if first < m.Line-1 && slices.Equal(table(lines[first:]), again) {
			fix = []Fix{note("the same table begins in line %d", first+1), run("sed", "-i", fmt.Sprintf("%d,%dd", m.Line, m.Line+len(again)-1), m.File)}
		} else {
			fix = append(fix, note("the other table begins in line %d: keep one of the two", first+1))
		}
	case strings.HasPrefix(line, "[drivers."):
		fix = []Fix{run("sed", "-i", fmt.Sprintf(`%ds/\[drivers\./[driver./`, m.Line), m.File)}
	case len(line) == len("[driver.]")+len(name) && csiname.CheckName(name) == nil:
		fix = []Fix{run("sed", "-i", fmt.Sprintf("%ds/.*/[driver.%q]/", m.Line, name), m.File)}
	case strings.TrimSpace(key) != "socket" && regexp.MustCompile(`^[\w."-]+ *=.*[^\[(,"']["']?$`).MatchString(line):
		fix = append(fix, note("or take the line out, so that the default holds"), run("sed", "-i", fmt.Sprintf("%ds/^/# /", m.Line), m.File))
	}
	return m.Hint, append(fix, note("or set the file aside:"), optional(setAside(m.File)), check)
}

// conflictMarker matches the lines that git writes around the two versions of a merge conflict.
var conflictMarker = regexp.MustCompile(`^(<<<<<<<|[|]{7}|=======|>>>>>>>)( |$)`)

// table returns the first table in lines, which begin with its header.
func table(lines []string) []string {
	end := slices.IndexFunc(lines[1:], func(l string) bool { return strings.HasPrefix(strings.TrimSpace(l), "[") })
	if end < 0 {
		end = len(lines) - 1
	}
	lines = lines[:end+1]
	for len(lines) > 1 && strings.TrimSpace(lines[len(lines)-1]) == "" {
		lines = lines[:len(lines)-1]
	}
	return lines
}

// driverOf returns the driver's name in a key such as driver."NAME".socket; empty if there is none,
// or no valid one.
func driverOf(key string) string {
	rest, _ := strings.CutPrefix(key, `driver."`)
	name, _, ok := strings.Cut(rest, `"`)
	if !ok || rest == key || safetext.Word(name) != name {
		return ""
	}
	return name
}

// origin returns the place where a key of a driver is set.
func (x *diagnosis) origin(driver, key string) string {
	return x.config.Origin(fmt.Sprintf("driver.%q.%s", driver, key))
}

// confDir returns the directory for the administrator's drop-ins.
func (x *diagnosis) confDir() string {
	return filepath.Join(cmp.Or(x.o.Source.Root, "/"), "etc/csi-registrar/conf.d")
}

// absent reports a driver that was named on the command line and that no file configures, or only
// a file that another one of the same name hides.
func (x *diagnosis) absent(ctx context.Context, name string) {
	if why, fix := x.hiddenFile(ctx, name); why != "" {
		x.finding(name, "configuration", "configuration-hidden", why, "only one file has that name, or the one in /etc configures the driver", fix...)
		return
	}
	why, fix := x.lookalike(ctx, name)
	x.finding(name, "configuration", "driver-not-configured", "no file configures it"+why, fmt.Sprintf("a table [driver.%q] with its socket", name), fix...)
}

// hiddenFile finds a file with a table of the driver that another file of the same name hides; why
// is empty if there is none.
func (x *diagnosis) hiddenFile(ctx context.Context, driver string) (why string, fix []Fix) {
	for _, h := range x.config.Hidden {
		there, err := look(ctx, x, h.File, func() (bool, error) {
			_, there := config.Load(config.Source{File: h.File}).Config.Driver(driver)
			return there, nil
		})
		// A file system that does not answer was reported when the files were read.
		if err == nil && there { // in conf.d both files count with different names
			return fmt.Sprintf("%s, which configures it, is hidden by %s", safetext.Word(h.File), safetext.Word(h.By)),
				[]Fix{run("mv", "-n", h.By, strings.TrimSuffix(h.By, ".toml")+"_too.toml"), reload}
		}
	}
	return "", nil
}

// disabled reports a disabled driver: as a problem only if it was named on the command line.
func (x *diagnosis) disabled(d config.Driver) {
	if !x.named() {
		x.checked(d.Name, "configuration", Skipped, "it is disabled")
		return
	}
	x.finding(d.Name, "configuration", "driver-disabled", "it is disabled: enabled = false in "+x.origin(d.Name, "enabled"),
		"enabled = true, or no such key", x.setDriverKey(d.Name, "enabled", "true")...)
}

// withoutTable reports drivers whose volumes are in use and that have no enabled table: the kubelet
// cannot unmount the volumes of one that nobody registers, and the daemon withdraws one that it
// still registers as soon as they are unmounted.
func (x *diagnosis) withoutTable(ctx context.Context) {
	names := map[string]bool{}
	for _, v := range x.volumes {
		d, _ := x.config.Config.Driver(v.Driver)
		invalid := slices.Contains(x.config.Faulty, v.Driver) // which is reported
		if x.selected(v.Driver) && csiname.CheckName(v.Driver) == nil && !d.Enabled && !invalid {
			names[v.Driver] = true
		}
	}
	for _, name := range sortedKeys(names) {
		inUse := safetext.Count(x.volumesOf(name), "volume") + " in use, "
		_, disabled := x.config.Config.Driver(name)
		switch st, _ := x.daemon.Driver(name); {
		case st.NoTable:
			why, fix := x.lookalike(ctx, name)
			x.finding(name, "configuration", "driver-without-table", inUse+"and no table: it is withdrawn when they are unmounted"+why,
				"a table, or no volumes", fix...)
		case len(x.served[name]) > 0:
		default:
			why, fix := ", whose table has enabled = false in "+x.origin(name, "enabled"), x.setDriverKey(name, "enabled", "true")
			if !disabled {
				why, fix = x.lookalike(ctx, name)
			}
			x.finding(name, "volumes", "volumes-unregistered", inUse+"which the kubelet cannot unmount: nobody registers the driver"+why,
				"the driver is registered until they are unmounted", fix...)
		}
	}
}

// lookalike finds a file that has a table of the driver and is not read because of its name, or the
// socket at which the driver answers. It returns a part of a sentence, which can be empty, and the
// fix.
func (x *diagnosis) lookalike(ctx context.Context, driver string) (why string, fix []Fix) {
	if why, fix = x.hiddenFile(ctx, driver); why != "" {
		return "; " + why, fix
	}
	for _, dir := range x.o.Source.Watch() {
		if filepath.Base(dir) != "conf.d" {
			continue
		}
		if broken, link := x.obstacle(ctx, "", dir, "file exists"); link != nil {
			return "; " + broken, append(link, reload)
		}
		if m := x.mountOf(ctx, dir); m.Point == dir && x.vacant(ctx, dir) {
			return "; the file system that is mounted at " + safetext.Word(dir) + " is empty", []Fix{run("umount", dir), reload}
		}
		found, err := look(ctx, x, dir, func() ([2]string, error) { return ignoredTable(dir, driver) })
		file, empty := found[0], found[1]
		if empty != "" {
			why = "; " + safetext.Word(empty) + " is empty"
		}
		if err != nil || file == "" {
			continue
		}
		name, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(file), "."), ".toml")
		name = strings.TrimSuffix(name, ".conf") + ".toml"
		return "; " + safetext.Word(file) + " has a table for it, and is not read: its name does not end in .toml or begins with a dot",
			[]Fix{run("mv", "-n", file, filepath.Join(dir, name)), reload}
	}
	if socket := x.usualSocket(ctx, driver); socket != "" {
		return why + "; it listens on " + safetext.Word(socket), x.setDriverKey(driver, "socket", safetext.Quote(socket))
	}
	return why, []Fix{note("write a table for %s with its socket into a file in %s", safetext.ShellWord(driver), safetext.ShellWord(x.confDir()))}
}

// usualSocket returns the socket at which a driver without a valid table answers; empty if it is
// not where drivers usually listen.
func (x *diagnosis) usualSocket(ctx context.Context, driver string) string {
	usual := filepath.Join(x.config.Config.Kubelet.RootDir, "plugins", driver, "csi.sock")
	return x.nearby(ctx, config.DefaultDriver(driver, usual))
}

// ignoredTable returns a file in dir with a table of the driver that config.Load ignores, and a
// configuration file of which nothing was written, as on a full disk.
func ignoredTable(dir, driver string) (found [2]string, err error) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		name, file := e.Name(), filepath.Join(dir, e.Name())
		if !e.Type().IsRegular() || strings.HasSuffix(name, ".toml") && !strings.HasPrefix(name, ".") {
			if at, err := e.Info(); err == nil && at.Mode().IsRegular() && at.Size() == 0 {
				found[1] = file
			}
			continue
		}
		r := config.Load(config.Source{File: file})
		if _, ok := r.Config.Driver(driver); ok || slices.Contains(r.Faulty, driver) {
			found[0] = file
		}
	}
	return found, err
}
