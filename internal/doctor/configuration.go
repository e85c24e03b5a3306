package doctor

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"csi-registrar/internal/config"
	"csi-registrar/internal/safetext"
)

var reload = run("csi-registrar", "reload")

// loadConfig reads the files, and the drivers that are only in hidden ones.
func (x *exam) loadConfig(ctx context.Context) {
	where := cmp.Or(x.o.Source.File, filepath.Join(cmp.Or(x.o.Source.Root, "/"), "etc/csi-registrar"))
	r, err := look(ctx, x, where, func() (*config.Result, error) { return config.Load(x.o.Source), nil })
	if err != nil {
		r = &config.Result{Config: config.Default()}
		x.problem("", StepConfiguration, err.Error(), "the configuration can be read")
	}
	x.config = r
}

// configuration reports the errors of the files, and drivers that are asked for and
// not in them.
func (x *exam) configuration(ctx context.Context) {
	before := len(x.report.Findings)
	for _, m := range x.config.Errors {
		if driver := driverOf(m.Key); driver == "" || x.wanted(driver) {
			x.problem(driver, StepConfiguration, fileError(m), m.Hint,
				text("edit %s", safetext.Word(m.File)), run("csi-registrar", "config", "check"), reload)
		}
	}
	for _, m := range x.config.Warnings {
		if driver := driverOf(m.Key); driver == "" || x.wanted(driver) {
			x.warning(driver, StepConfiguration, fileError(m), m.Hint)
		}
	}
	hidden := x.hidden(ctx)
	x.absent(ctx, hidden)
	if len(x.config.Config.Drivers)+len(x.config.Faulty)+len(hidden) == 0 && !x.named && len(x.report.Findings) == before {
		x.warning("", StepConfiguration, "no driver is configured", `each driver has a table [driver."NAME"] with its socket`,
			text("csi-registrar import MANIFEST, or write a file into %s", safetext.Word(x.confDir())))
	}
	if len(x.report.Findings) == before && !x.problemIn(StepConfiguration) {
		x.checked("", StepConfiguration, OK, "%s, %s", count(len(x.config.Files), "file"), count(len(x.config.Config.Drivers), "driver"))
	}
}

// fileError is an error of the files in one line. The texts in it are config's; it quotes what
// it cites.
func fileError(m config.Error) string {
	s := safetext.Word(m.File)
	if m.Line > 0 {
		s += fmt.Sprintf(":%d", m.Line)
	}
	if m.Key != "" {
		s += ": " + m.Key
	}
	return s + ": " + m.Problem
}

// driverOf takes the driver's name out of a key: driver."NAME".socket. It is empty if that
// can be no driver's name.
func driverOf(key string) string {
	rest, _ := strings.CutPrefix(key, `driver."`)
	name, _, ok := strings.Cut(rest, `"`)
	if !ok || rest == key || safetext.Word(name) != name {
		return ""
	}
	return name
}

// origin is the place where a key of the driver is written; where it is not, the table's.
func (x *exam) origin(d config.Driver, key string) string {
	for _, k := range []string{key, "socket"} {
		if at := x.config.Origin(fmt.Sprintf("driver.%q.%s", d.Name, k)); at != "default" {
			return place(at)
		}
	}
	return "default"
}

// place shows an origin, which config has quoted if it could not be shown otherwise.
func place(at string) string {
	if strings.HasPrefix(at, `"`) {
		return at
	}
	return safetext.Word(at)
}

// confDir is where administrators write.
func (x *exam) confDir() string {
	return filepath.Join(cmp.Or(x.o.Source.Root, "/"), "etc/csi-registrar/conf.d")
}

// hiding is a drop-in that does not count because of another one with its name.
type hiding struct {
	config.Hidden
	driver config.Driver
	masked bool // the other one is empty
}

// hidden finds, by driver, the drop-ins that would configure a driver which no other
// file configures.
func (x *exam) hidden(ctx context.Context) map[string]hiding {
	out, _ := look(ctx, x, x.confDir(), func() (map[string]hiding, error) {
		out := map[string]hiding{}
		for _, h := range x.config.Hidden {
			info, err := os.Stat(h.By)
			for _, d := range config.Load(config.Source{File: h.File}).Config.Drivers {
				if _, configured := x.config.Config.Driver(d.Name); !configured && !slices.Contains(x.config.Faulty, d.Name) {
					out[d.Name] = hiding{h, d, err == nil && info.Size() == 0}
				}
			}
		}
		return out, nil
	})
	return out // nil if the file system does not answer: that was found when the files were read
}

// absent reports drivers that no file configures: those that were named, and those whose
// drop-in is masked although they run and nobody else registers them.
func (x *exam) absent(ctx context.Context, hidden map[string]hiding) {
	names := x.o.Drivers
	if !x.named {
		names = sortedKeys(hidden)
	}
	for _, name := range names {
		_, configured := x.config.Config.Driver(name)
		if configured || slices.Contains(x.config.Faulty, name) {
			continue
		}
		h, isHidden := hidden[name]
		file, by := safetext.Word(h.File), safetext.Word(h.By)
		switch {
		case !isHidden:
			x.problem(name, StepConfiguration, "no file configures it", fmt.Sprintf("a table [driver.%q] with its socket", name),
				text("write it into a file in %s", safetext.Word(x.confDir())), reload)
		case !x.named && (len(x.served[name]) > 0 || !x.listening(ctx, h.driver.Socket)):
			x.checked(name, StepConfiguration, Skipped, "%s is hidden by %s", file, by)
		case h.masked:
			x.problem(name, StepConfiguration, fmt.Sprintf("%s, which configures it, is masked by the empty %s", file, by), "it is not masked", run("rm", h.By), reload)
		default:
			x.problem(name, StepConfiguration, fmt.Sprintf("%s, which configures it, is hidden by %s", file, by),
				"only one file has that name, or the one in /etc configures the driver", run("rm", h.By), reload)
		}
	}
}

// disabled reports it where somebody asked, or where it looks like an error: the driver
// runs and nobody registers it.
func (x *exam) disabled(ctx context.Context, d config.Driver) {
	if !x.named && (len(x.served[d.Name]) > 0 || !x.listening(ctx, d.Socket)) {
		x.checked(d.Name, StepConfiguration, Skipped, "it is disabled")
		return
	}
	at := x.origin(d, "enabled")
	x.problem(d.Name, StepConfiguration, "it is disabled: enabled = false in "+at, "enabled = true, or no such key", text("edit %s", at), reload)
}

func (x *exam) listening(ctx context.Context, path string) bool {
	c, _, err := x.dial(ctx, path)
	if err == nil {
		c.Close()
	}
	return err == nil
}
