package compat

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"sort"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"csi-registrar/internal/config"
	"csi-registrar/internal/pluginreg"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
)

// Registrar is what replaces a node-driver-registrar of a manifest.
type Registrar struct {
	Driver   config.Driver
	RootDir  string   // of the kubelet that it registers with
	From     []string // the workloads, as "FILE: KIND NAMESPACE/NAME"
	Remove   []string // what the manifest no longer needs
	Comments []string // for the reader of the drop-in
}

// Refusal is what cannot be imported, and why.
type Refusal struct {
	Where  string // the file, and the workload if it is one
	Reason string
	Hint   string // may be empty
}

// Result is the outcome of Import.
type Result struct {
	Registrars []Registrar // by driver; none twice
	Refused    []Refusal
	Notes      []string // what was left out intentionally
}

// Import reads manifests and derives what replaces the registrars in them. name is the
// driver's name if it was given on the command line, else empty.
func Import(manifests []Manifest, name string) Result {
	var (
		res       Result
		workloads []workload
		drivers   []string
	)
	for _, m := range manifests {
		w, d, err := m.read()
		if err != nil {
			r := Refusal{Where: m.Name, Reason: err.Error()}
			if isTemplate(string(m.Data)) {
				r.Reason, r.Hint = errIsTemplate.Error()+": "+r.Reason, hintTemplate
			}
			res.Refused = append(res.Refused, r)
			continue
		}
		workloads = append(workloads, w...)
		drivers = append(drivers, d...)
	}
	for _, w := range workloads {
		for _, c := range w.pod.all() {
			if !c.isRegistrar() {
				continue
			}
			if w.forWindows(c) {
				res.Notes = append(res.Notes, fmt.Sprintf("%s is for Windows and was left out", w))
				continue
			}
			r, err := w.registrar(c, name, drivers)
			if err != nil {
				res.Refused = append(res.Refused, refusal(w, c, err))
				continue
			}
			res.add(r)
		}
	}
	if len(res.Registrars)+len(res.Refused) == 0 {
		res.Refused = append(res.Refused, noRegistrar(manifests, len(res.Notes) > 0))
	}
	if name != "" && len(res.Registrars)+len(res.Refused) > 1 && len(res.Registrars) > 0 {
		res.refuse(res.Registrars[0], "import them one by one, each from a file of its own",
			"there is more than one registrar, and --name fits only one")
	}
	if i := slices.IndexFunc(res.Registrars, func(r Registrar) bool { return r.RootDir != res.Registrars[0].RootDir }); i > 0 {
		r, first := res.Registrars[i], res.Registrars[0]
		res.refuse(r, "a node has one kubelet: import only what is for this kind of node",
			"it registers with the kubelet in %s, but %s with the one in %s", safetext.Word(r.RootDir), first.from(), safetext.Word(first.RootDir))
	}
	sort.Slice(res.Registrars, func(i, j int) bool { return res.Registrars[i].Driver.Name < res.Registrars[j].Driver.Name })
	return res
}

func (res *Result) refuse(r Registrar, hint, format string, args ...any) {
	res.Refused = append(res.Refused, Refusal{Where: r.from(), Reason: fmt.Sprintf(format, args...), Hint: hint})
}

func (r Registrar) from() string { return strings.Join(r.From, ", ") }

const hintTemplate = "render it first, for example: helm template CHART | csi-registrar import -"

const hintOne = "import only the one that runs on this kind of node, from a file of its own"

// errName is the reason if the driver's name cannot be derived.
var errName = errors.New("the driver's name is not in the manifest")

// registrar derives what replaces one container.
func (w workload) registrar(c container, name string, drivers []string) (Registrar, error) {
	address, err := c.path("csi-address", defaultSocket)
	endpoint, endpointErr := c.path("kubelet-registration-path", "")
	if err := cmp.Or(err, endpointErr); err != nil {
		return Registrar{}, err
	}
	socket, err := w.pod.hostPath(c, address)
	if err != nil {
		return Registrar{}, fmt.Errorf("the driver's socket: %w", err)
	}
	if err := cmp.Or(checkPath(socket), checkPath(endpoint)); err != nil { // one line, as every reason
		return Registrar{}, err
	}
	if name == "" {
		if name, err = w.driverName(endpoint, drivers); err != nil {
			return Registrar{}, err
		}
	}
	if err := status.CheckName(name); err != nil {
		return Registrar{}, fmt.Errorf("the driver's name %s: %w", safetext.Quote(name), err)
	}

	r := Registrar{
		Driver:  config.DefaultDriver(name, socket),
		RootDir: config.Default().Kubelet.RootDir,
		From:    []string{w.String()},
		Remove:  w.pod.removable(c),
	}
	r.Driver.Endpoint = endpoint
	if r.Driver.Timeout, err = c.timeout(r.Driver.Timeout); err != nil {
		return Registrar{}, err
	}
	w.pod.owner(c, address, &r)
	if err := w.rootDir(c, &r); err != nil {
		return Registrar{}, err
	}
	if _, err := pluginreg.SocketPath(pluginreg.Dir(r.RootDir), name); err != nil {
		return Registrar{}, errors.New(safetext.Quote(err.Error())) // with the manifest's path in it
	}
	return r, nil
}

func checkPath(p string) error {
	if !utf8.ValidString(p) || strings.ContainsFunc(p, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return fmt.Errorf("the path %s has characters that are not printable", safetext.Quote(p))
	}
	if len(p) > unixsock.MaxPath {
		return fmt.Errorf("the path %s has %d bytes, a socket's path may have %d", safetext.Word(p), len(p), unixsock.MaxPath)
	}
	return nil
}

// path is the value of a flag that is a path.
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

// timeout is that of the registrar if it is longer than the default.
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

// rootDir finds the kubelet's root directory: the parent of the directory that is mounted
// where the registrar makes its socket.
func (w workload) rootDir(c container, r *Registrar) error {
	dir, err := c.path("plugin-registration-path", defaultRegistryDir)
	if err != nil {
		return err
	}
	host, err := w.pod.hostPath(c, dir)
	if err != nil {
		return fmt.Errorf("the kubelet's directory: %w", err)
	}
	if path.Base(host) != pluginreg.DirName {
		r.Comments = append(r.Comments, fmt.Sprintf("The manifest registers in %s, where current kubelets do not look; %s/plugins_registry is used.", safetext.Word(host), safetext.Word(r.RootDir)))
		return nil
	}
	r.RootDir = path.Dir(host)
	return checkPath(r.RootDir)
}

// driverName finds the driver's name: the flag of its own container that sets it, or the
// CSIDriver object of the manifest.
func (w workload) driverName(endpoint string, drivers []string) (string, error) {
	var named []string
	for _, c := range w.pod.all() {
		if c.isRegistrar() {
			continue
		}
		for _, flag := range nameFlags {
			// If the flags of one container cannot be read, another may have the name.
			if v, found, err := c.flag(flag); err == nil && found && !slices.Contains(named, v) {
				named = append(named, v)
			}
		}
	}
	if len(named) == 0 {
		named = slices.Compact(slices.Sorted(slices.Values(drivers)))
	}
	switch byDirectory := path.Base(path.Dir(endpoint)); { // by custom it has the driver's name
	case len(named) == 0:
		return "", errName
	case len(named) == 1:
		return named[0], nil
	case slices.Contains(named, byDirectory):
		return byDirectory, nil
	}
	slices.Sort(named)
	for i, n := range named {
		named[i] = safetext.Word(n)
	}
	return "", fmt.Errorf("%w: it may be %s", errName, strings.Join(named[:min(len(named), 10)], " or "))
}

// nameFlags are those that set the name of published drivers.
var nameFlags = []string{"drivername", "driver-name", "driver_name", "csi-driver-name"}

func (w workload) forWindows(c container) bool {
	windowsPath := regexp.MustCompile(`^(unix://)?[A-Za-z]:|\\`)
	return w.pod.NodeSelector["kubernetes.io/os"] == "windows" || slices.ContainsFunc(c.Args, func(arg string) bool {
		_, value, _ := strings.Cut(arg, "=")
		return strings.Contains(arg, "-kubelet-registration-path") && windowsPath.MatchString(value)
	})
}

// removable lists what the manifest does not need without the registrar.
func (p podSpec) removable(registrar container) []string {
	list := "containers"
	if slices.ContainsFunc(p.InitContainers, func(c container) bool { return c.Name == registrar.Name }) {
		list = "initContainers"
	}
	out := []string{fmt.Sprintf("the container %s, under %s, with its probes, ports and lifecycle", safetext.Word(registrar.Name), list)}
	for _, v := range p.Volumes {
		mounts := func(c container) bool {
			return slices.ContainsFunc(c.VolumeMounts, func(m volumeMount) bool { return m.Name == v.Name })
		}
		others := slices.ContainsFunc(p.all(), func(c container) bool { return c.Name != registrar.Name && mounts(c) })
		if mounts(registrar) && !others {
			out = append(out, fmt.Sprintf("the volume %s, which no other container mounts", safetext.Word(v.Name)))
		}
	}
	return out
}

// owner sets socket_owner if the one container that can be the driver does not run as root.
func (p podSpec) owner(registrar container, address string, r *Registrar) {
	mine := registrar.mountOf(address).Name // the volume with the socket
	// Images that run beside a driver and use its socket.
	sidecars := regexp.MustCompile(`livenessprobe|liveness-probe|csi-(provisioner|attacher|resizer|snapshotter)|external-(provisioner|attacher|resizer|snapshotter|health)`)
	var users []int64
	for _, c := range p.Containers {
		if c.Name == registrar.Name || c.isRegistrar() || sidecars.MatchString(path.Base(c.Image)) ||
			!slices.ContainsFunc(c.VolumeMounts, func(m volumeMount) bool { return m.Name == mine }) {
			continue
		}
		if u := cmp.Or(c.SecurityContext.RunAsUser, p.SecurityContext.RunAsUser); u != nil && *u != 0 {
			users = append(users, *u)
		}
	}
	if len(users) == 1 {
		r.Driver.SocketOwner = fmt.Sprint(users[0])
	}
}

// add adds a registrar, or its origin to an equal one: there may be a DaemonSet for each
// architecture.
func (res *Result) add(r Registrar) {
	for i := range res.Registrars {
		o := &res.Registrars[i]
		shared := sharedPath(o.Driver, r.Driver)
		switch {
		case o.Driver.Equal(r.Driver) && o.RootDir == r.RootDir:
			o.From = append(o.From, r.From...)
			return
		case o.Driver.Name == r.Driver.Name:
			res.refuse(r, hintOne, "%s is also registered by %s, with other values", r.Driver.Name, o.from())
			return
		case shared != "":
			res.refuse(r, hintOne, "%s uses %s, as does %s of %s", r.Driver.Name, safetext.Word(shared), o.Driver.Name, o.from())
			return
		}
	}
	res.Registrars = append(res.Registrars, r)
}

// sharedPath finds a path that both drivers use, if any.
func sharedPath(a, b config.Driver) string {
	for _, p := range []string{a.Socket, a.Endpoint} {
		if p == b.Socket || p == b.Endpoint {
			return p
		}
	}
	return ""
}

func refusal(w workload, c container, err error) Refusal {
	r := Refusal{Where: fmt.Sprintf("%s, container %s", w, safetext.Word(c.Name)), Reason: err.Error()}
	switch {
	case errors.Is(err, errIsTemplate):
		r.Hint = hintTemplate
	case errors.Is(err, errName):
		r.Hint = "add --name with the name that GetPluginInfo answers; `kubectl get csidrivers` lists the names"
	}
	return r
}

func noRegistrar(manifests []Manifest, forWindows bool) Refusal {
	var names []string
	for _, m := range manifests {
		names = append(names, m.Name)
	}
	reason := "there is no workload with a node-driver-registrar"
	if forWindows {
		reason = "the only node-driver-registrar is for Windows"
	}
	return Refusal{strings.Join(names, ", "), reason, "import the manifest of the driver's node plugin"}
}
