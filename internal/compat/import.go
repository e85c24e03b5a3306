package compat

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"csi-registrar/internal/config"
	"csi-registrar/internal/pluginreg"
	"csi-registrar/internal/rootdir"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
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

// registration is a node-driver-registrar of a workload, with what is known about its driver.
type registration struct {
	*workload
	container  container
	address    string // of the driver's socket in the container
	socket     string // the same on the node
	endpoint   string
	rootDir    string // of the kubelet
	driver     string
	certain    bool     // of the driver's name
	candidates []string // if the name is not known
	err        error    // why it cannot be imported
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
	res.addEdits(rs)
	slices.SortFunc(res.Registrars, func(a, b Registrar) int { return cmp.Compare(a.Driver.Name, b.Driver.Name) })
	return res
}

// registrations returns all registrars for Linux.
func (o *objects) registrations(res *Result) []*registration {
	var rs []*registration
	for _, w := range o.workloads {
		for _, c := range w.pod.all() {
			switch {
			case !c.isRegistrar():
			case w.forWindows(c):
				res.Notes = append(res.Notes, fmt.Sprintf("%s is for Windows and was ignored", w))
			default:
				r := &registration{workload: w, container: c}
				r.err = r.locate()
				rs = append(rs, r)
			}
		}
	}
	return rs
}

// locate finds the driver's socket.
func (r *registration) locate() error {
	var err, endpointErr error
	r.address, err = r.container.path("csi-address", defaultSocket)
	r.endpoint, endpointErr = r.container.path("kubelet-registration-path", "")
	if err := cmp.Or(err, endpointErr); err != nil {
		return err
	}
	if r.socket, err = r.pod.hostPath(r.container, r.address); err != nil {
		return fmt.Errorf("the driver's socket: %w", err)
	}
	return cmp.Or(checkPath(r.socket), checkPath(r.endpoint))
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

// registrar derives the Registrar that replaces the container.
func (r *registration) registrar(drivers []csiDriver) (Registrar, error) {
	if r.err != nil {
		return Registrar{}, r.err
	}
	if err := status.CheckName(r.driver); err != nil {
		return Registrar{}, fmt.Errorf("the driver's name %s: %w", safetext.Quote(r.driver), err)
	}
	res := Registrar{
		Driver:    config.DefaultDriver(r.driver, r.socket),
		RootDir:   config.Default().Kubelet.RootDir,
		Workloads: []string{r.workload.String()},
	}
	res.Driver.Endpoint = r.endpoint
	var err error
	if res.Driver.Timeout, err = r.container.timeout(res.Driver.Timeout); err != nil {
		return Registrar{}, err
	}
	res.Driver.SocketOwner = cmp.Or(r.owner(), res.Driver.SocketOwner)
	if err := r.setRootDir(&res); err != nil {
		return Registrar{}, err
	}
	r.rootDir = res.RootDir
	if _, err := pluginreg.SocketPath(rootdir.PluginsRegistry(res.RootDir), r.driver); err != nil {
		// With the manifest's path in it.
		return Registrar{}, errors.New(safetext.Quote(err.Error()))
	}
	if slices.ContainsFunc(drivers, func(d csiDriver) bool { return d.name == r.driver && d.updatePeriod > 0 }) {
		res.Driver.WhenLimitChanges = config.Leave
		res.Comments = append(res.Comments, "The CSIDriver object sets nodeAllocatableUpdatePeriodSeconds: the kubelet (from Kubernetes 1.36 on) updates the volume limit.")
	}
	if doubt := r.doubt(); doubt != "" {
		res.Comments = append(res.Comments, doubt)
	}
	return res, nil
}

func checkPath(p string) error {
	if !utf8.ValidString(p) || strings.ContainsFunc(p, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return fmt.Errorf("the path %s has characters that are not printable", safetext.Quote(p))
	}
	if len(p) > unixsock.MaxPath {
		return fmt.Errorf("the path %s has %d bytes; that of a socket has at most %d", safetext.Word(p), len(p), unixsock.MaxPath)
	}
	return nil
}

// path returns the value of a flag that is a path.
func (c container) path(flag, byDefault string) (string, error) {
	value, found, err := c.flag(flag)
	switch {
	case err != nil:
		return "", err
	case !found && byDefault == "":
		return "", fmt.Errorf("it has no --%s", flag)
	case !found:
		value = byDefault
	}
	return absolute(flag, value)
}

// timeout returns the registrar's timeout, but at least ours.
func (c container) timeout(ours time.Duration) (time.Duration, error) {
	value, found, err := c.flag("timeout")
	if err != nil || !found {
		return ours, err
	}
	theirs, err := time.ParseDuration(value)
	if err != nil {
		return 0, fmt.Errorf("--timeout: %s is not a duration", safetext.Quote(value))
	}
	return max(ours, theirs), nil
}

// setRootDir sets the kubelet's root directory: the parent of the directory that is mounted where
// the registrar creates its socket.
func (r *registration) setRootDir(res *Registrar) error {
	dir, err := r.container.path("plugin-registration-path", defaultRegistryDir)
	if err != nil {
		return err
	}
	host, err := r.pod.hostPath(r.container, dir)
	if err != nil {
		return fmt.Errorf("the kubelet's directory: %w", err)
	}
	if path.Base(host) != rootdir.PluginsRegistryName {
		res.Comments = append(res.Comments, fmt.Sprintf("The manifest registers in %s, where current kubelets do not look; %s is used.",
			safetext.Word(host), rootdir.PluginsRegistry(res.RootDir)))
		return nil
	}
	res.RootDir = path.Dir(host)
	return checkPath(res.RootDir)
}

func (w *workload) forWindows(c container) bool {
	windowsPath := regexp.MustCompile(`^(unix://)?[A-Za-z]:|\\`)
	return w.pod.NodeSelector["kubernetes.io/os"] == "windows" || slices.ContainsFunc(c.Args, func(arg string) bool {
		_, value, _ := strings.Cut(arg, "=")
		return strings.Contains(arg, "-kubelet-registration-path") && windowsPath.MatchString(value)
	})
}

// owner returns the user of the driver if exactly one container can be the driver and does not run
// as root; otherwise it returns "".
func (r *registration) owner() string {
	volume := r.container.mountOf(r.address).Name
	var users []int64
	for _, c := range r.pod.Containers {
		if c.isSidecar() || !c.mounts(volume) {
			continue
		}
		if u := cmp.Or(c.SecurityContext.RunAsUser, r.pod.SecurityContext.RunAsUser); u != nil && *u != 0 {
			users = append(users, *u)
		}
	}
	if len(users) != 1 {
		return ""
	}
	return fmt.Sprint(users[0])
}

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

// refusal returns the Refusal for an error. alone means that there is no other registrar.
func (r *registration) refusal(err error, alone bool) Refusal {
	hint := hintFor(err)
	if errors.Is(err, errName) {
		hint = r.nameHint(alone)
	}
	return Refusal{fmt.Sprintf("%s, container %s", r.workload, safetext.Word(r.container.Name)), err.Error(), hint}
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
