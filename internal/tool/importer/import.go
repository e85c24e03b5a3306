// Package importer imports manifests that contain node-driver-registrar into drop-ins for
// csi-registrar, and says what to change in the manifests.
package importer

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/sys/safetext"
)

// Registrar replaces a node-driver-registrar of a manifest.
type Registrar struct {
	Driver    config.Driver
	RootDir   string   // of the kubelet that it registers with
	Workloads []string // those that contain it, as in Edits
	Comments  []string // for the reader of the drop-in
}

// Refusal is a file or a workload that cannot be imported, and why.
type Refusal struct {
	Where  string // the file, and the workload if it is one
	Reason string
	Hint   string // may be empty
}

// Result is the outcome of Import.
type Result struct {
	Registrars []Registrar // by driver; none twice
	Edits      []Edits     // what to change in the workloads of the registrars
	Refused    []Refusal
	Notes      []string // what was ignored intentionally
}

// Import reads manifests and derives what replaces the registrars in them. names are the drivers'
// names from the command line. A registrar that cannot be imported does not prevent the import of
// the others.
func Import(manifests []File, names []GivenName) Result {
	var objs objects
	objs.found = objs.register
	for _, m := range manifests {
		objs.read(m)
	}
	res := Result{Refused: objs.refused, Notes: objs.notes}
	rs := objs.registrations
	if len(rs) > maxRegistrars {
		res.refuse(rs[len(rs)-1].file, "import only what is for one kind of node", "there are more than %d node-driver-registrars", maxRegistrars)
		return res
	}
	if len(rs)+len(res.Refused) == 0 {
		res.Refused = append(res.Refused, noRegistrar(manifests, len(res.Notes) > 0))
		return res
	}
	res.checkNames(rs, names)
	findNames(slices.DeleteFunc(slices.Clone(rs), func(r *registration) bool { return r.err != nil }), objs.drivers, names)
	drivers := map[string]csiDriver{}
	for _, d := range objs.drivers {
		d.updated = d.updated || drivers[d.name].updated
		d.prevents = d.prevents || drivers[d.name].prevents
		drivers[d.name] = d
	}
	for _, r := range rs {
		registrar, err := r.registrar(drivers[r.driver].updated)
		switch {
		case errors.Is(err, errAmbiguous): // checkNames has refused it
		case err != nil:
			hint := hintFor(err)
			if errors.Is(err, errName) {
				hint = r.nameHint(len(rs) == 1)
			}
			res.refuse(fmt.Sprintf("%s, container %s", r.workload, safetext.Word(r.container.Name)), hint, "%s", err)
		default:
			res.add(registrar)
		}
	}
	res.refuseConflicts()
	res.addEdits(rs)
	slices.SortFunc(res.Registrars, func(a, b Registrar) int { return cmp.Compare(a.Driver.Name, b.Driver.Name) })
	for _, r := range res.Registrars {
		if drivers[r.Driver.Name].prevents {
			res.Notes = append(res.Notes, fmt.Sprintf("the CSIDriver object of %s sets preventPodSchedulingIfMissing: the scheduler of Kubernetes 1.37 refuses a node while "+
				"its registration changes hands, and a pod can wait for minutes. Before: kubectl cordon NODE. After `csi-registrar wait %[1]s` there: kubectl uncordon NODE", r.Driver.Name))
		}
	}
	return res
}

// checkNames refuses names that match no registrar, or more than one.
func (res *Result) checkNames(rs []*registration, names []GivenName) {
	for _, g := range names {
		found := slices.DeleteFunc(slices.Clone(rs), func(r *registration) bool { return g.Workload != "" && !g.matches(r) })
		several := slices.ContainsFunc(found, func(r *registration) bool { return r.socket != found[0].socket })
		switch {
		case len(found) == 0:
			res.refuse("--name "+safetext.Word(g.Workload), "name one of: "+workloadNames(rs), "no workload of this name has a node-driver-registrar")
		case several:
			hint := "write --name WORKLOAD=NAME, with one of: " + workloadNames(rs)
			if g.Workload != "" {
				hint = "write --name WORKLOAD:CONTAINER=NAME"
			}
			res.refuse("--name "+safetext.Word(g.Driver), hint, "it matches more than one registrar")
			for _, r := range found {
				r.err = cmp.Or(r.err, errAmbiguous)
			}
		}
	}
}

// errAmbiguous is the error of a registrar whose given name also matches others.
var errAmbiguous = errors.New("the given name also matches other registrars")

// workloadNames lists the workloads with a registrar.
func workloadNames(rs []*registration) string {
	var names []string
	for _, r := range rs {
		if n := safetext.Word(r.workload.name()); !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	return strings.Join(names, ", ")
}

func (res *Result) refuse(where, hint, format string, args ...any) {
	res.Refused = append(res.Refused, Refusal{Where: where, Reason: fmt.Sprintf(format, args...), Hint: hint})
}

// from names the first workloads of a registrar.
func (r Registrar) from() string { return safetext.Some(r.Workloads, 5) }

func (r Registrar) equal(o Registrar) bool {
	return o.Driver.Name == r.Driver.Name && o.RootDir == r.RootDir && o.Driver.Equal(r.Driver)
}

// add adds a registrar, or its workload to an equal one: there may be a DaemonSet for each
// architecture.
func (res *Result) add(r Registrar) {
	if i := slices.IndexFunc(res.Registrars, r.equal); i >= 0 {
		o := &res.Registrars[i]
		// The registrars of a workload follow each other.
		if o.Workloads[len(o.Workloads)-1] != r.Workloads[0] {
			o.Workloads = append(o.Workloads, r.Workloads...)
		}
		return
	}
	res.Registrars = append(res.Registrars, r)
}

// refuseConflicts refuses all registrars that cannot be in one configuration, because it cannot
// know which one is intended, and those for another kubelet than that of the first one.
func (res *Result) refuseConflicts() {
	all := slices.Clone(res.Registrars)
	conflict := func(r Registrar) string {
		for _, o := range all {
			paths := []string{r.Driver.Socket, r.Driver.Endpoint}
			i := slices.IndexFunc(paths, func(p string) bool { return p == o.Driver.Socket || p == o.Driver.Endpoint })
			switch {
			case r.equal(o):
			case r.Driver.Name == o.Driver.Name:
				return fmt.Sprintf("%s is also registered by %s, with other values", r.Driver.Name, o.from())
			case i >= 0:
				return fmt.Sprintf("%s uses %s, as does %s of %s", r.Driver.Name, safetext.Word(paths[i]), o.Driver.Name, o.from())
			}
		}
		if first := all[0]; r.RootDir != first.RootDir {
			return fmt.Sprintf("it registers with the kubelet in %s, but %s with the one in %s", safetext.Word(r.RootDir), first.from(), safetext.Word(first.RootDir))
		}
		return ""
	}
	res.Registrars = slices.DeleteFunc(res.Registrars, func(r Registrar) bool {
		reason := conflict(r)
		if reason != "" {
			res.refuse(r.from(), hintOne, "%s", reason)
		}
		return reason != ""
	})
}

func noRegistrar(manifests []File, forWindows bool) Refusal {
	var names []string
	for _, m := range manifests {
		names = append(names, m.Name)
	}
	r := Refusal{strings.Join(names, ", "), "there is no workload with a node-driver-registrar",
		"import the manifest of the driver's node plugin; if an operator creates it, " + hintCluster}
	if forWindows {
		r.Reason, r.Hint = "the only node-driver-registrar is for Windows", "import the manifest of the driver's node plugin for Linux"
	}
	return r
}
