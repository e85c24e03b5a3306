package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"csi-registrar/internal/config"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/trust"
)

var reload = run("csi-registrar", "reload")

// loadConfig reads the files.
func (x *diagnosis) loadConfig(ctx context.Context) {
	where := cmp.Or(x.o.Source.File, filepath.Join(cmp.Or(x.o.Source.Root, "/"), "etc/csi-registrar"))
	r, err := look(ctx, x, where, func() (*config.Result, error) { return config.Load(x.o.Source), nil })
	if err != nil {
		r = &config.Result{Config: config.Default()}
		where, fix := x.unmount(ctx, where, err)
		x.problem("", StepConfiguration, ConfigurationUnreadable, err.Error()+where, "the configuration can be read", fix...)
	}
	x.config = r
}

// configuration reports the errors of the files, and drivers that were named on the command line
// and are not configured.
func (x *diagnosis) configuration(ctx context.Context) {
	before := len(x.report.Findings)
	for _, m := range x.config.Errors {
		if driver := driverOf(m.Key); driver == "" || x.selected(driver) {
			expected, fix := x.correct(ctx, m)
			x.problem(driver, StepConfiguration, ConfigurationError, fileError(m), expected, fix...)
		}
	}
	for _, name := range x.o.Drivers {
		if _, right := x.config.Config.Driver(name); !right && !slices.Contains(x.config.Faulty, name) {
			x.absent(ctx, name)
		}
	}
	if len(x.config.Config.Drivers)+len(x.config.Faulty) == 0 && !x.named && len(x.report.Findings) == before {
		x.warning("", StepConfiguration, NoDriverConfigured, "no driver is configured", `each driver has a table [driver."NAME"] with its socket`,
			note("write a file into %s, or let csi-registrar import write it from the DaemonSet of the driver", safetext.ShellWord(x.confDir())))
	}
	if len(x.report.Findings) == before && !x.problemIn(StepConfiguration) {
		x.checked("", StepConfiguration, OK, "%s, %s", count(len(x.config.Files), "file"), count(len(x.config.Config.Drivers), "driver"))
	}
}

// correct returns what is expected in place of an error, and its fix.
func (x *diagnosis) correct(ctx context.Context, m config.Error) (expected string, fix []Fix) {
	check := run("csi-registrar", "config", "check")
	root := cmp.Or(x.o.Source.Root, "/")
	_, err := look(ctx, x, m.File, func() (struct{}, error) {
		owners, err := trust.Users("root")
		if err != nil {
			return struct{}{}, err
		}
		return struct{}{}, trust.Rule{Owners: owners, Below: root, FollowLink: true}.Check(m.File)
	})
	e, ok := errors.AsType[*trust.Error](err)
	switch {
	case ok && e.Path == m.File && e.Command.Name != "":
		return "only root can change it", []Fix{note("look first what is in it"), {Command: e.Command}, check, reload}
	case ok && e.Path == m.File:
		return "only root can change it", []Fix{note("make %s a file that only root can change", safetext.ShellWord(m.File)), check, reload}
	}
	return m.Hint, []Fix{note("edit %s", safetext.ShellWord(m.File)), check, reload}
}

// fileError formats an error of the files as one line. Package config has quoted what comes from
// the files.
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

// driverOf returns the driver's name in a key such as driver."NAME".socket; empty: there is none,
// or it is no valid name.
func driverOf(key string) string {
	rest, _ := strings.CutPrefix(key, `driver."`)
	name, _, ok := strings.Cut(rest, `"`)
	if !ok || rest == key || safetext.Word(name) != name {
		return ""
	}
	return name
}

// origin returns where a key of the driver is set; if it is not set, where its table is.
func (x *diagnosis) origin(d config.Driver, key string) string {
	for _, k := range []string{key, "socket"} {
		if at := x.config.Origin(fmt.Sprintf("driver.%q.%s", d.Name, k)); at != "default" {
			return place(at)
		}
	}
	return "default"
}

// place formats an origin. Package config has quoted it where that is necessary.
func place(at string) string {
	if strings.HasPrefix(at, `"`) {
		return at
	}
	return safetext.Word(at)
}

// confDir returns the directory for the administrator's drop-ins.
func (x *diagnosis) confDir() string {
	return filepath.Join(cmp.Or(x.o.Source.Root, "/"), "etc/csi-registrar/conf.d")
}

// absent reports a driver that was named on the command line and that no file configures, or only
// a file that is hidden by another one of the same name.
func (x *diagnosis) absent(ctx context.Context, name string) {
	for _, h := range x.config.Hidden {
		there, err := look(ctx, x, h.File, func() (bool, error) {
			_, there := config.Load(config.Source{File: h.File}).Config.Driver(name)
			return there, nil
		})
		// a file system that does not answer was reported when the files were read
		if err == nil && there {
			x.problem(name, StepConfiguration, ConfigurationHidden,
				fmt.Sprintf("%s, which configures it, is hidden by %s", safetext.Word(h.File), safetext.Word(h.By)),
				"only one file has that name, or the one in /etc configures the driver", run("rm", h.By), reload)
			return
		}
	}
	x.problem(name, StepConfiguration, DriverNotConfigured, "no file configures it", fmt.Sprintf("a table [driver.%q] with its socket", name),
		note("write it into a file in %s", safetext.ShellWord(x.confDir())), reload)
}

// disabled reports a disabled driver: as a problem only if it was named on the command line.
func (x *diagnosis) disabled(d config.Driver) {
	if !x.named {
		x.checked(d.Name, StepConfiguration, Skipped, "it is disabled")
		return
	}
	at := x.origin(d, "enabled")
	x.problem(d.Name, StepConfiguration, DriverDisabled, "it is disabled: enabled = false in "+at,
		"enabled = true, or no such key", x.setDriverKey(d.Name, "enabled", "true")...)
}
