package compat

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"csi-registrar/internal/config"
	"csi-registrar/internal/pluginreg"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
)

// Registrar is a node-driver-registrar that was found in a manifest, in our terms.
type Registrar struct {
	Driver   config.Driver
	RootDir  string   // of the kubelet that it registers with
	From     []string // the workloads, as "FILE: KIND NAMESPACE/NAME"
	Remove   []string // what the manifest no longer needs
	Comments []string // what a person should know
}

// Refusal is something that cannot be imported.
type Refusal struct {
	Where  string // the file, and the workload if it is one
	Reason string
	Hint   string // what to do; may be empty
}

// Result is what the manifests gave.
type Result struct {
	Registrars []Registrar // by driver; none twice
	Refused    []Refusal
	Notes      []string // what was left out on purpose
}

// Import reads manifests and finds what takes the place of the registrars in them. name
// is the driver's name where a person gave it, else empty.
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
	found := 0
	for _, w := range workloads {
		for _, c := range w.pod.all() {
			if !c.isRegistrar() {
				continue
			}
			found++
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
		res.Refused = append(res.Refused, nothingFound(manifests, workloads, found))
	}
	if name != "" && len(res.Registrars)+len(res.Refused) > 1 && len(res.Registrars) > 0 {
		res.Refused = append(res.Refused, Refusal{
			Where:  strings.Join(res.Registrars[0].From, ", "),
			Reason: "there is more than one registrar, and --name fits only one",
			Hint:   "import them one by one, each from a file of its own",
		})
	}
	if i := slices.IndexFunc(res.Registrars, func(r Registrar) bool { return r.RootDir != res.Registrars[0].RootDir }); i > 0 {
		res.Refused = append(res.Refused, Refusal{
			Where: strings.Join(res.Registrars[i].From, ", "),
			Reason: fmt.Sprintf("it registers with the kubelet in %s, %s with another, in %s", safetext.Word(res.Registrars[i].RootDir),
				strings.Join(res.Registrars[0].From, ", "), safetext.Word(res.Registrars[0].RootDir)),
			Hint: "a node has one kubelet: import only what is for this kind of node",
		})
	}
	slices.SortFunc(res.Registrars, func(a, b Registrar) int { return cmp.Compare(a.Driver.Name, b.Driver.Name) })
	return res
}

const hintTemplate = "fill it in first, for example: helm template CHART | csi-registrar import -"

// errName is the reason when nothing tells the driver's name.
var errName = errors.New("the driver's name is not in the manifest")

// registrar works out one container.
func (w workload) registrar(c container, name string, drivers []string) (Registrar, error) {
	address, found, err := c.flag("csi-address")
	if err != nil {
		return Registrar{}, err
	}
	if !found {
		address = defaultSocket
	}
	endpoint, found, err := c.flag("kubelet-registration-path")
	if err != nil {
		return Registrar{}, err
	}
	if !found {
		return Registrar{}, errors.New("it has no --kubelet-registration-path")
	}
	if address, err = absolute("csi-address", address); err != nil {
		return Registrar{}, err
	}
	if endpoint, err = absolute("kubelet-registration-path", endpoint); err != nil {
		return Registrar{}, err
	}
	socket, err := w.pod.hostPath(c, address)
	if err != nil {
		return Registrar{}, fmt.Errorf("the driver's socket: %w", err)
	}
	if err := errors.Join(checkPath(socket), checkPath(endpoint)); err != nil {
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
		Remove:  w.pod.leftovers(c),
	}
	r.Driver.Endpoint = endpoint
	if r.Driver.Timeout, err = c.timeout(r.Driver.Timeout); err != nil {
		return Registrar{}, err
	}
	w.pod.owner(c, address, &r)
	if err := w.rootDir(c, &r); err != nil {
		return Registrar{}, err
	}
	_, err = pluginreg.SocketPath(pluginreg.Dir(r.RootDir), name)
	return r, err
}

func checkPath(p string) error {
	if !isPrintable(p) {
		return fmt.Errorf("the path %s holds characters that cannot be shown", safetext.Quote(p))
	}
	if len(p) > unixsock.MaxPath {
		return fmt.Errorf("the path %s has %d bytes, a socket's path may have %d", safetext.Word(p), len(p), unixsock.MaxPath)
	}
	return nil
}

// timeout is the registrar's own where it is longer than our default.
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
// where the registrar puts its socket.
func (w workload) rootDir(c container, r *Registrar) error {
	dir, found, err := c.flag("plugin-registration-path")
	if err != nil {
		return err
	}
	if !found {
		dir = defaultRegistryDir
	}
	host, err := w.pod.hostPath(c, dir)
	if err != nil {
		return fmt.Errorf("the kubelet's directory: %w", err)
	}
	if path.Base(host) != pluginreg.DirName {
		r.Comments = append(r.Comments, fmt.Sprintf("The manifest registers in %s, where no kubelet of today looks; %s/plugins_registry is used.", safetext.Word(host), safetext.Word(r.RootDir)))
		return nil
	}
	r.RootDir = path.Dir(host)
	return checkPath(r.RootDir)
}

// driverName finds what the driver calls itself: the flag of its own container that
// names it, or the CSIDriver object of the manifest.
func (w workload) driverName(endpoint string, drivers []string) (string, error) {
	var named []string
	for _, c := range w.pod.all() {
		if c.isRegistrar() {
			continue
		}
		for _, flag := range nameFlags {
			// A container that cannot be read does not name the driver; another may.
			if v, found, err := c.flag(flag); err == nil && found && !slices.Contains(named, v) {
				named = append(named, v)
			}
		}
	}
	if len(named) == 1 {
		return named[0], nil
	}
	candidates := named
	if len(candidates) == 0 {
		candidates = slices.Compact(slices.Sorted(slices.Values(drivers)))
	}
	if len(candidates) == 1 {
		return candidates[0], nil
	}
	// Several: the directory of the socket is by custom named as the driver.
	for _, n := range candidates {
		if path.Base(path.Dir(endpoint)) == n {
			return n, nil
		}
	}
	if len(candidates) > 1 {
		slices.Sort(candidates)
		for i, n := range candidates {
			candidates[i] = safetext.Word(n)
		}
		return "", fmt.Errorf("%w: it may be %s", errName, strings.Join(candidates[:min(len(candidates), 10)], " or "))
	}
	return "", errName
}

// nameFlags are those by which published drivers are told their name.
var nameFlags = []string{"drivername", "driver-name", "driver_name", "csi-driver-name"}

var windowsPath = regexp.MustCompile(`^(unix://)?[A-Za-z]:|\\`)

func (w workload) forWindows(c container) bool {
	return w.pod.NodeSelector["kubernetes.io/os"] == "windows" || slices.ContainsFunc(c.Args, func(arg string) bool {
		_, value, _ := strings.Cut(arg, "=")
		return strings.Contains(arg, "-kubelet-registration-path") && windowsPath.MatchString(value)
	})
}

// leftovers says what the manifest no longer needs without the registrar.
func (p podSpec) leftovers(registrar container) []string {
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

// sidecars are the images that sit beside a driver and use its socket.
var sidecars = regexp.MustCompile(`livenessprobe|liveness-probe|csi-(provisioner|attacher|resizer|snapshotter)|external-(provisioner|attacher|resizer|snapshotter|health)`)

// owner sets socket_owner where the one container that can be the driver does not run as root.
func (p podSpec) owner(registrar container, address string, r *Registrar) {
	mine := registrar.mountOf(address).Name // the volume with the socket
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

// add keeps one of several that say the same, as one manifest for each architecture does.
func (res *Result) add(r Registrar) {
	i := slices.IndexFunc(res.Registrars, func(o Registrar) bool { return o.Driver.Name == r.Driver.Name })
	if i < 0 {
		for _, o := range res.Registrars {
			if shared := sharedPath(o.Driver, r.Driver); shared != "" {
				res.Refused = append(res.Refused, Refusal{
					Where:  strings.Join(r.From, ", "),
					Reason: fmt.Sprintf("%s uses %s, which is %s of %s too", r.Driver.Name, safetext.Word(shared), o.Driver.Name, strings.Join(o.From, ", ")),
					Hint:   "import only the one that runs on this kind of node, from a file of its own",
				})
				return
			}
		}
		res.Registrars = append(res.Registrars, r)
		return
	}
	o := &res.Registrars[i]
	if !o.Driver.Equal(r.Driver) || o.RootDir != r.RootDir {
		res.Refused = append(res.Refused, Refusal{
			Where:  strings.Join(r.From, ", "),
			Reason: fmt.Sprintf("%s is registered by %s too, in another way", r.Driver.Name, strings.Join(o.From, ", ")),
			Hint:   "import only the one that runs on this kind of node, from a file of its own",
		})
		return
	}
	o.From = append(o.From, r.From...)
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
		r.Hint = "give it with --name, as GetPluginInfo answers it; `kubectl get csidrivers` lists the names"
	}
	return r
}

func nothingFound(manifests []Manifest, workloads []workload, found int) Refusal {
	var names, seen []string
	for _, m := range manifests {
		names = append(names, m.Name)
	}
	for _, w := range workloads {
		seen = append(seen, w.kind+" "+safetext.Word(w.name))
	}
	r := Refusal{Where: strings.Join(names, ", "), Reason: "there is no DaemonSet or other workload in it"}
	switch {
	case found > 0:
		r.Reason = "there is a registrar for Windows only"
	case len(seen) > 0:
		r.Reason = "no container of it is a node-driver-registrar: " + strings.Join(seen, ", ")
	}
	r.Hint = "give the manifest of the driver's node part"
	return r
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
