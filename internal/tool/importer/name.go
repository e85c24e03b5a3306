package importer

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/sys/safetext"
)

// GivenName is a driver's name from the command line.
type GivenName struct {
	// NAME or NAMESPACE/NAME, with :CONTAINER if it has several; empty: the only one.
	Workload string
	Driver   string
}

// ParseName parses [WORKLOAD=]NAME.
func ParseName(s string) GivenName {
	if workload, name, ok := strings.Cut(s, "="); ok {
		return GivenName{workload, name}
	}
	return GivenName{Driver: s}
}

// matches reports whether the name is meant for this registrar.
func (g GivenName) matches(r *registration) bool {
	workload, container, ok := strings.Cut(g.Workload, ":")
	return (workload == r.Name || workload == r.workload.name()) && (!ok || container == r.container.Name)
}

// errName is the reason if the driver's name cannot be derived.
var errName = errors.New("the driver's name is not in the manifest")

// findNames sets the driver of each registration, or the error if the name is not known.
func findNames(rs []*registration, drivers []csiDriver, given []GivenName) {
	known, releases := map[string]bool{}, map[string][]string{}
	for _, d := range drivers {
		known[d.name] = true
		releases[d.helmRelease] = append(releases[d.helmRelease], d.name)
	}
	for _, r := range rs {
		if i := slices.IndexFunc(given, func(g GivenName) bool { return g.Workload == "" || g.matches(r) }); i >= 0 {
			r.driver = given[i].Driver
		} else {
			r.ownName(known, releases)
		}
	}
	// The other registrations may have the names of the other CSIDriver objects: first those of the
	// same file, then all.
	eliminate(rs, drivers, func(file string) string { return file })
	eliminate(rs, drivers, func(string) string { return "" })
	for _, r := range rs {
		if r.driver == "" {
			r.err = nameError(r.candidates)
		}
	}
}

// eliminate names each registration for which exactly one CSIDriver object in scope is left, unless
// another driver could have that name as well.
func eliminate(rs []*registration, drivers []csiDriver, scope func(file string) string) {
	taken := map[string]bool{}
	for _, r := range rs {
		taken[r.driver] = true
	}
	left := map[string][]string{} // names that are not taken, by scope
	for _, d := range drivers {
		if s := scope(d.file); !taken[d.name] && !slices.Contains(left[s], d.name) {
			left[s] = append(left[s], d.name)
		}
	}
	var unnamed []*registration
	for _, r := range rs {
		if r.driver == "" && len(r.candidates) == 0 {
			r.candidates = left[scope(r.file)]
			unnamed = append(unnamed, r)
		}
	}
	for _, r := range unnamed {
		another := func(o *registration) bool { return slices.Equal(o.candidates, r.candidates) && o.socket != r.socket }
		if len(r.candidates) == 1 && !slices.ContainsFunc(unnamed, another) {
			r.driver = r.candidates[0]
		}
	}
}

// nameError returns errName with the possible names.
func nameError(names []string) error {
	if len(names) == 0 {
		return errName
	}
	var words []string
	for _, n := range names {
		words = append(words, safetext.Word(n))
	}
	return fmt.Errorf("%w: it may be one of %s", errName, safetext.Some(words, 10))
}

// nameFlags are the flags with which published drivers set their name.
var nameFlags = []string{
	"drivername", "driver-name", "driver_name", "csi-driver-name", "driverName", "csi-name", "override-driver-name",
}

// ownName derives the driver's name from the flag of a container of the pod, the CSIDriver object
// with the name of a directory on the socket's path, or the CSIDriver object of the same Helm
// release. It sets the candidates if there are several names.
func (r *registration) ownName(known map[string]bool, releases map[string][]string) {
	var names []string
	for _, c := range r.pod.all() {
		if c.isRegistrar() {
			continue
		}
		for _, flag := range nameFlags {
			// If the flags of one container cannot be read, another may have the name.
			if v, found, err := c.flag(flag); err == nil && found && !slices.Contains(names, v) {
				names = append(names, v)
			}
		}
	}
	// It need not be the last directory: TopoLVM's socket is in topolvm.io/node.
	dir, inPath := r.directory(), path.Dir(r.endpoint)
	for inPath != "/" && !known[path.Base(inPath)] {
		inPath = path.Dir(inPath)
	}
	switch {
	case len(names) == 1:
		r.driver = names[0]
	case slices.Contains(names, dir):
		r.driver = dir
	case len(names) == 0 && inPath != "/":
		r.driver = path.Base(inPath)
	case len(names) > 1:
		slices.Sort(names)
		r.candidates = names
	case r.helmRelease() != "":
		if names := releases[r.helmRelease()]; len(names) == 1 {
			r.driver = names[0]
		}
	}
}

// directory is the name of the directory of the driver's socket. By custom it is the driver's name.
func (r *registration) directory() string { return path.Base(path.Dir(r.endpoint)) }

// nameHint returns how to find the name, and a possible name.
func (r *registration) nameHint(alone bool) string {
	option := "--name NAME"
	if !alone {
		option = "--name " + safetext.ShellWord(r.workload.name()+"=") + "NAME"
	}
	hint := "import the manifest of the driver's CSIDriver object as well, or add " + option +
		" with the name that GetPluginInfo returns; `kubectl get csidrivers` lists the names"
	dir := r.directory()
	switch {
	case len(r.candidates) > 0: // the error has them
		hint = "add " + option + " with the name that GetPluginInfo returns"
	case strings.Contains(dir, ".") && csiname.CheckName(dir) == nil:
		hint += fmt.Sprintf("; it may be %s, like the directory of its socket", dir)
	}
	return hint
}
