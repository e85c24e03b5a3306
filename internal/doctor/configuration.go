package doctor

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"csi-registrar/internal/config"
	"csi-registrar/internal/safetext"
)

var reload = run("csi-registrar", "reload")

// loadConfig reads the files.
func (x *diagnosis) loadConfig(ctx context.Context) {
	where := cmp.Or(x.o.Source.File, filepath.Join(cmp.Or(x.o.Source.Root, "/"), "etc/csi-registrar"))
	r, err := look(ctx, x, where, func() (*config.Result, error) { return config.Load(x.o.Source), nil })
	if err != nil {
		r = &config.Result{Config: config.Default()}
		x.problem("", StepConfiguration, ConfigurationUnreadable, err.Error(), "the configuration can be read")
	}
	x.config = r
}

// configuration reports the errors of the files, and drivers that are asked for and
// not in them.
func (x *diagnosis) configuration(ctx context.Context) {
	before := len(x.report.Findings)
	for _, m := range x.config.Errors {
		if driver := driverOf(m.Key); driver == "" || x.wanted(driver) {
			x.problem(driver, StepConfiguration, ConfigurationError, fileError(m), m.Hint,
				text("edit %s", safetext.Word(m.File)), run("csi-registrar", "config", "check"), reload)
		}
	}
	for _, name := range x.o.Drivers {
		if _, right := x.config.Config.Driver(name); !right && !slices.Contains(x.config.Faulty, name) {
			x.absent(ctx, name)
		}
	}
	if len(x.config.Config.Drivers)+len(x.config.Faulty) == 0 && !x.named && len(x.report.Findings) == before {
		x.warning("", StepConfiguration, NoDriverConfigured, "no driver is configured", `each driver has a table [driver."NAME"] with its socket`,
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
func (x *diagnosis) origin(d config.Driver, key string) string {
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
func (x *diagnosis) confDir() string {
	return filepath.Join(cmp.Or(x.o.Source.Root, "/"), "etc/csi-registrar/conf.d")
}

// absent reports a driver that somebody asked for and no file configures, unless one that is
// hidden by a file of the same name.
func (x *diagnosis) absent(ctx context.Context, name string) {
	for _, h := range x.config.Hidden {
		there, err := look(ctx, x, h.File, func() (bool, error) {
			_, there := config.Load(config.Source{File: h.File}).Config.Driver(name)
			return there, nil
		})
		if err == nil && there { // that a file system does not answer was found when the files were read
			x.problem(name, StepConfiguration, ConfigurationHidden,
				fmt.Sprintf("%s, which configures it, is hidden by %s", safetext.Word(h.File), safetext.Word(h.By)),
				"only one file has that name, or the one in /etc configures the driver", run("rm", h.By), reload)
			return
		}
	}
	x.problem(name, StepConfiguration, DriverNotConfigured, "no file configures it", fmt.Sprintf("a table [driver.%q] with its socket", name),
		text("write it into a file in %s", safetext.Word(x.confDir())), reload)
}

// disabled reports a problem only where somebody asked for the driver.
func (x *diagnosis) disabled(d config.Driver) {
	if !x.named {
		x.checked(d.Name, StepConfiguration, Skipped, "it is disabled")
		return
	}
	at := x.origin(d, "enabled")
	x.problem(d.Name, StepConfiguration, DriverDisabled, "it is disabled: enabled = false in "+at,
		"enabled = true, or no such key", text("edit %s", at), reload)
}
