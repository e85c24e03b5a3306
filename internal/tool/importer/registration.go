package importer

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"csi-registrar/internal/core/sidecar"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
)

// registration is a node-driver-registrar of a workload, with what is known about its driver.
type registration struct {
	*workload
	container  container
	address    string // of the driver's socket in the container
	socket     string // the same on the node
	endpoint   string
	rootDir    string // of the kubelet
	driver     string
	candidates []string // if the name is not known
	err        error    // why it cannot be imported
}

// register adds the registrars of a workload.
func (o *objects) register(w *workload) {
	useful := false
	for _, c := range w.pod.all() {
		switch {
		case !c.isRegistrar():
		case w.forWindows(c):
			o.notes = append(o.notes, fmt.Sprintf("%s is for Windows and was ignored", w))
		default:
			r := &registration{workload: w, container: c}
			if r.err = r.locate(); r.err != nil {
				r.container = container{Name: c.Name}
			}
			useful = useful || r.err == nil
			o.registrations = append(o.registrations, r)
		}
	}
	if !useful {
		w.pod = podSpec{} // only its name is needed
	}
}

// locate finds the driver's socket.
func (r *registration) locate() error {
	var err, endpointErr error
	r.address, err = r.container.path("csi-address", sidecar.DefaultSocket)
	r.endpoint, endpointErr = r.container.path("kubelet-registration-path", "")
	if err := cmp.Or(err, endpointErr); err != nil {
		return err
	}
	if r.socket, err = r.pod.hostPath(r.container, r.address); err != nil {
		return fmt.Errorf("the driver's socket: %w", err)
	}
	return cmp.Or(checkPath(r.socket), checkPath(r.endpoint))
}

// registrar derives the Registrar that replaces the container. updated means that the CSIDriver
// object sets nodeAllocatableUpdatePeriodSeconds.
func (r *registration) registrar(updated bool) (Registrar, error) {
	if r.err != nil {
		return Registrar{}, r.err
	}
	if err := csiname.CheckName(r.driver); err != nil {
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
	res.Driver.SocketOwner = cmp.Or(trust.SocketOwner(r.owner()), res.Driver.SocketOwner)
	if err := r.setRootDir(&res); err != nil {
		return Registrar{}, err
	}
	r.rootDir = res.RootDir
	if _, err := rootdir.SocketPath(rootdir.PluginsRegistry(res.RootDir), r.driver); err != nil {
		// With the manifest's path in it.
		return Registrar{}, errors.New(safetext.Quote(err.Error()))
	}
	if updated {
		res.Driver.WhenLimitChanges = config.Leave
		res.Comments = append(res.Comments, "The CSIDriver object sets nodeAllocatableUpdatePeriodSeconds: the kubelet (from Kubernetes 1.36 on) updates the volume limit.")
	}
	if rootdir.Within(path.Clean(r.socket), rootdir.PluginsRegistry(res.RootDir)) {
		res.Comments = append(res.Comments, "The driver's own socket is below plugins_registry: the kubelet takes it for a registration socket, and calls GetInfo there forever.")
	}
	return res, nil
}

func checkPath(p string) error {
	if !utf8.ValidString(p) || strings.ContainsFunc(p, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return fmt.Errorf("the path %s has characters that are not printable", safetext.Quote(p))
	}
	if p == "/" {
		return errors.New(`the path "/" is a directory`)
	}
	return unixsock.CheckPath(p)
}

// path returns the value of a flag that is a path.
func (c container) path(flag, byDefault string) (string, error) {
	value, found, err := c.registrarFlag(flag)
	switch {
	case err != nil:
		return "", err
	case !found && byDefault == "":
		return "", withHint(hintFlag, fmt.Errorf("it has no --%s", flag))
	case !found:
		value = byDefault
	}
	return sidecar.AbsolutePath(flag, value)
}

// timeout returns the registrar's timeout, but at least ours.
func (c container) timeout(ours time.Duration) (time.Duration, error) {
	value, found, err := c.registrarFlag("timeout")
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
	dir, err := r.container.path("plugin-registration-path", sidecar.DefaultRegistryDir)
	if err != nil {
		return err
	}
	host, err := r.pod.hostPath(r.container, dir)
	if err != nil {
		err = fmt.Errorf("the kubelet's directory: %w", err)
		if hintFor(err) == hintVolume {
			err = withHint(hintByHand, err) // that hint is about the driver's socket
		}
		return err
	}
	if path.Base(host) != rootdir.PluginsRegistryName {
		res.Comments = append(res.Comments, fmt.Sprintf("The manifest registers in %s, where current kubelets do not look; %s is used.",
			safetext.Word(host), rootdir.PluginsRegistry(res.RootDir)))
		return nil
	}
	res.RootDir = path.Dir(host)
	return checkPath(res.RootDir)
}

// forWindows reports whether a registrar is for nodes with Windows: its path says so, also where
// the pod has an affinity to them, or a variable in place of the path.
func (w *workload) forWindows(c container) bool {
	endpoint, _, _ := c.registrarFlag("kubelet-registration-path")
	return w.pod.NodeSelector["kubernetes.io/os"] == "windows" || windowsPath().MatchString(endpoint)
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
