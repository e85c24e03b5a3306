package compat

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
func Import(manifests []Manifest, names []GivenName) Result {
	var objs objects
	for _, m := range manifests {
		objs.read(m)
	}
	res := Result{Refused: objs.refused}
	rs := objs.registrations(&res)
	if len(rs)+len(res.Refused) == 0 {
		res.Refused = append(res.Refused, noRegistrar(manifests, objs.operators, len(res.Notes) > 0))
		return res
	}
	res.checkNames(rs, names)
	findNames(slices.DeleteFunc(slices.Clone(rs), func(r *registration) bool { return r.err != nil }), objs.drivers, names)
	for _, r := range rs {
		registrar, err := r.registrar(objs.drivers)
		switch {
		case errors.Is(err, errAmbiguous): // checkNames has refused it
		case err != nil:
			res.Refused = append(res.Refused, r.refusal(err, len(rs) == 1))
		default:
			res.add(registrar)
		}
	}
	res.refuseConflicts()
	res.refuseOtherRoots()
	res.addEdits(objs.workloads, rs)
	slices.SortFunc(res.Registrars, func(a, b Registrar) int { return cmp.Compare(a.Driver.Name, b.Driver.Name) })
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

func (r Registrar) from() string { return strings.Join(r.Workloads, ", ") }

// add adds a registrar, or its workload to an equal one: there may be a DaemonSet for each
// architecture.
func (res *Result) add(r Registrar) {
	i := slices.IndexFunc(res.Registrars, func(o Registrar) bool { return o.Driver.Equal(r.Driver) && o.RootDir == r.RootDir })
	if i < 0 {
		res.Registrars = append(res.Registrars, r)
		return
	}
	if o := &res.Registrars[i]; !slices.Contains(o.Workloads, r.Workloads[0]) {
		o.Workloads = append(o.Workloads, r.Workloads...)
	}
}

// refuseConflicts refuses all registrars that cannot be in one configuration, because it cannot
// know which one is intended.
func (res *Result) refuseConflicts() {
	conflict := func(a, b Registrar) string {
		shared := sharedPath(a.Driver, b.Driver)
		switch {
		case a.Driver.Name == b.Driver.Name:
			return fmt.Sprintf("%s is also registered by %s, with other values", a.Driver.Name, b.from())
		case shared != "":
			return fmt.Sprintf("%s uses %s, as does %s of %s", a.Driver.Name, safetext.Word(shared), b.Driver.Name, b.from())
		}
		return ""
	}
	all := slices.Clone(res.Registrars)
	res.Registrars = slices.DeleteFunc(res.Registrars, func(r Registrar) bool {
		for _, o := range all {
			same := o.Driver.Equal(r.Driver) && o.RootDir == r.RootDir
			if reason := conflict(r, o); !same && reason != "" {
				res.refuse(r.from(), hintOne, "%s", reason)
				return true
			}
		}
		return false
	})
}

// refuseOtherRoots keeps the registrars for the kubelet that most of them register with.
func (res *Result) refuseOtherRoots() {
	if len(res.Registrars) == 0 {
		return
	}
	count := map[string]int{}
	for _, r := range res.Registrars {
		count[r.RootDir]++
	}
	most := slices.MaxFunc(res.Registrars, func(a, b Registrar) int { return cmp.Compare(count[a.RootDir], count[b.RootDir]) })
	res.Registrars = slices.DeleteFunc(res.Registrars, func(r Registrar) bool {
		if r.RootDir == most.RootDir {
			return false
		}
		res.refuse(r.from(), "a node has one kubelet: import only what is for this kind of node",
			"it registers with the kubelet in %s, but %s with the one in %s", safetext.Word(r.RootDir), most.from(), safetext.Word(most.RootDir))
		return true
	})
}

// sharedPath returns a path that both drivers use, if any.
func sharedPath(a, b config.Driver) string {
	for _, p := range []string{a.Socket, a.Endpoint} {
		if p == b.Socket || p == b.Endpoint {
			return p
		}
	}
	return ""
}

func noRegistrar(manifests []Manifest, operators []string, forWindows bool) Refusal {
	var names []string
	for _, m := range manifests {
		names = append(names, m.Name)
	}
	r := Refusal{strings.Join(names, ", "), "there is no workload with a node-driver-registrar",
		"import the manifest of the driver's node plugin, or " + hintCluster}
	switch {
	case forWindows:
		r.Reason, r.Hint = "the only node-driver-registrar is for Windows", "import the manifest of the driver's node plugin for Linux"
	case len(operators) > 0:
		r.Hint = fmt.Sprintf("an operator (%s) creates it: %s; for how to remove the sidecar there, see from-the-sidecar.md",
			strings.Join(operators, ", "), hintCluster)
	}
	return r
}
