package doctor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"csi-registrar/internal/config"
)

// configuration reports the mistakes of the files, and drivers that are asked for and
// not in them.
func (x *exam) configuration() {
	before := len(x.report.Findings)
	for _, m := range x.config.Errors {
		driver := driverOf(m.Key)
		if driver != "" && !x.wanted(driver) {
			continue
		}
		x.found(&Finding{Driver: driver, Step: StepConfiguration, Severity: Problem, explains: true,
			Is: config.Error{File: m.File, Line: m.Line, Key: m.Key, Problem: m.Problem}.Error(), Should: m.Hint,
			Fix: []string{"mend " + m.File + ", then: csi-registrar config check && csi-registrar reload"}})
	}
	for _, m := range x.config.Warnings {
		if driver := driverOf(m.Key); driver == "" || x.wanted(driver) {
			x.found(&Finding{Driver: driver, Step: StepConfiguration, Severity: Warning,
				Is: config.Error{File: m.File, Line: m.Line, Key: m.Key, Problem: m.Problem}.Error(), Should: m.Hint})
		}
	}
	hidden := x.hidden()
	x.absent(hidden)
	if len(x.config.Config.Drivers)+len(x.config.Faulty)+len(hidden) == 0 && !x.named {
		x.found(&Finding{Step: StepConfiguration, Severity: Warning,
			Is:     "no driver is configured",
			Should: "each driver has a table [driver.\"NAME\"] with its socket",
			Fix:    []string{"csi-registrar import MANIFEST, or write a file into " + x.folder("etc")}})
	}
	if len(x.report.Findings) == before {
		x.checked("", StepConfiguration, OK, count(len(x.config.Files), "file")+", "+count(len(x.config.Config.Drivers), "driver"))
	}
}

// driverOf takes the driver's name out of a key: driver."NAME".socket.
func driverOf(key string) string {
	rest, ok := strings.CutPrefix(key, `driver."`)
	if !ok {
		return ""
	}
	name, _, _ := strings.Cut(rest, `"`)
	return name
}

// folder is the conf.d of one of the places: etc, run or usr/lib.
func (x *exam) folder(place string) string {
	root := x.o.Source.Root
	if root == "" {
		root = "/"
	}
	return filepath.Join(root, place, "csi-registrar/conf.d")
}

// hiding is a drop-in that does not count because of another one with its name.
type hiding struct{ file, by string }

// hidden finds, by driver, the drop-ins that would configure a driver which no other
// file configures.
func (x *exam) hidden() map[string]hiding {
	out := map[string]hiding{}
	if x.o.Source.File != "" {
		return out
	}
	winner := map[string]string{}
	for _, place := range []string{"etc", "run", "usr/lib"} {
		files, _ := filepath.Glob(filepath.Join(x.folder(place), "*.toml"))
		for _, file := range files {
			by, isHidden := winner[filepath.Base(file)]
			if !isHidden {
				winner[filepath.Base(file)] = file
				continue
			}
			for _, d := range config.Load(config.Source{File: file}).Config.Drivers {
				if _, configured := x.config.Config.Driver(d.Name); !configured && !slices.Contains(x.config.Faulty, d.Name) {
					out[d.Name] = hiding{file, by}
				}
			}
		}
	}
	return out
}

// absent reports drivers that no file configures: those that were named, and those whose
// drop-in is masked although they run and nobody else registers them.
func (x *exam) absent(hidden map[string]hiding) {
	names := slices.Clone(x.o.Drivers)
	if !x.named {
		names = sortedKeys(hidden)
	}
	for _, name := range names {
		_, configured := x.config.Config.Driver(name)
		if configured || slices.Contains(x.config.Faulty, name) {
			continue
		}
		f := Finding{Driver: name, Step: StepConfiguration, Severity: Problem, explains: true,
			Is:     "no file configures it",
			Should: fmt.Sprintf("a table [driver.%q] with its socket", name),
			Fix:    []string{"write it into a file in " + x.folder("etc") + ", then: csi-registrar reload"}}
		if h, ok := hidden[name]; ok {
			if !x.named && !x.unregisteredButAlive(h.file, name) {
				x.checked(name, StepConfiguration, Skipped, fmt.Sprintf("%s is hidden by %s", h.file, h.by))
				continue
			}
			f.Is = fmt.Sprintf("%s, which configures it, is hidden by %s", h.file, h.by)
			f.Should = "only one file has that name, or the one in /etc says what is meant"
			if info, err := os.Stat(h.by); err == nil && info.Size() == 0 {
				f.Is = fmt.Sprintf("%s, which configures it, is masked by the empty %s", h.file, h.by)
				f.Should = "it is not masked"
			}
			f.Fix = []string{"rm " + shellQuote(h.by), "csi-registrar reload"}
		}
		x.found(&f)
	}
}

func (x *exam) unregisteredButAlive(file, name string) bool {
	d, ok := config.Load(config.Source{File: file}).Config.Driver(name)
	return ok && len(x.served[name]) == 0 && listening(context.Background(), d.Socket)
}

// disabled says so where somebody asked, or where it looks like a mistake: the driver
// runs and nobody registers it.
func (x *exam) disabled(ctx context.Context, d config.Driver) {
	if !x.named && (len(x.served[d.Name]) > 0 || !listening(ctx, d.Socket)) {
		x.checked(d.Name, StepConfiguration, Skipped, "it is disabled")
		return
	}
	at := x.config.Origin(fmt.Sprintf("driver.%q.enabled", d.Name))
	x.found(&Finding{Driver: d.Name, Step: StepConfiguration, Severity: Problem, explains: true,
		Is:     "it is disabled: enabled = false in " + at,
		Should: "enabled = true, or no such key",
		Fix:    []string{"mend " + at + ", then: csi-registrar reload"}})
}
