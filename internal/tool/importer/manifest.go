package importer

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"csi-registrar/internal/sys/safetext"
)

// File is a manifest, which may come from standard input, or a file to write.
type File struct {
	Name string // of a manifest: for messages
	Data []byte
}

// object is the part of a Kubernetes object that is the same for all kinds.
type object struct {
	Kind     string
	Metadata metadata
	Spec     yaml.Node // decoded only for some kinds
	Items    []object
}

type metadata struct {
	Name            string
	Namespace       string
	Labels          map[string]string
	Annotations     map[string]string
	OwnerReferences []ownerReference `yaml:"ownerReferences"`
}

type ownerReference struct {
	Kind string
	Name string
}

const helmPrefix = "meta.helm.sh/release-"

// helmRelease identifies the Helm release that installed an object of a cluster. It is empty for
// objects that Helm did not install, and for rendered charts.
func (m metadata) helmRelease() string {
	if m.Annotations[helmPrefix+"name"] == "" {
		return ""
	}
	return m.Annotations[helmPrefix+"namespace"] + "/" + m.Annotations[helmPrefix+"name"]
}

// workload is an object that creates pods, or a pod.
type workload struct {
	file string
	kind string
	metadata
	pod podSpec
}

// name returns NAMESPACE/NAME, or NAME if the manifest has no namespace.
func (w *workload) name() string { return path.Join(w.Namespace, w.Name) }

func (w *workload) String() string {
	return fmt.Sprintf("%s: %s %s", w.file, w.kind, safetext.Word(w.name()))
}

// csiDriver is a CSIDriver object.
type csiDriver struct {
	file        string
	name        string
	helmRelease string
	updated     bool // it has nodeAllocatableUpdatePeriodSeconds
	prevents    bool // preventPodSchedulingIfMissing
}

// podSpec is the part of a pod that Import needs.
type podSpec struct {
	NodeSelector    map[string]string `yaml:"nodeSelector"`
	Containers      []container
	InitContainers  []container `yaml:"initContainers"`
	Volumes         []volume
	SecurityContext securityContext `yaml:"securityContext"`
}

// all lists the containers; a sidecar may be among the init containers.
func (p podSpec) all() []container { return slices.Concat(p.Containers, p.InitContainers) }

type container struct {
	Name            string
	Image           string
	Command         []string
	Args            []string
	Env             []envVar
	VolumeMounts    []volumeMount   `yaml:"volumeMounts"`
	SecurityContext securityContext `yaml:"securityContext"`
}

type envVar struct {
	Name      string
	Value     string
	ValueFrom *yaml.Node `yaml:"valueFrom"`
}

type volumeMount struct {
	Name        string
	MountPath   string `yaml:"mountPath"`
	SubPath     string `yaml:"subPath"`
	SubPathExpr string `yaml:"subPathExpr"`
	Propagation string `yaml:"mountPropagation"`
}

type volume struct {
	Name     string
	HostPath *hostPath            `yaml:"hostPath"`
	Other    map[string]yaml.Node `yaml:",inline"` // the other kinds
}

type hostPath struct{ Path, Type string }

// creates reports whether a pod with the volume gets the directory created if there is none: by the
// kubelet for DirectoryOrCreate, by the container runtime if no type is given.
func (h hostPath) creates() bool { return h.Type == "" || h.Type == "DirectoryOrCreate" }

type securityContext struct {
	RunAsUser *int64 `yaml:"runAsUser"`
}

// image returns the name of the container's image, without its registry and tag.
func (c container) image() string {
	image, _, _ := strings.Cut(path.Base(c.Image), ":")
	return image
}

// hasFlag reports whether the command line has one of these flags, also where a shell runs it.
func (c container) hasFlag(names ...string) bool {
	return slices.ContainsFunc(slices.Concat(c.Command, c.Args), func(arg string) bool {
		key, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		return strings.HasPrefix(arg, "-") && slices.Contains(names, key)
	})
}

// registrarName is the registrar's name among the controllers of the all-in-one sidecar.
const registrarName = "node-driver-registrar"

// controllers returns the sidecars in the all-in-one sidecar (KEP-4958); nil for other programs.
func (c container) controllers() []string {
	if list, found, err := c.flag("controllers"); err == nil && found && c.hasFlag("csi-address") {
		return strings.Split(list, ",")
	}
	return nil
}

// isRegistrar reports whether the container runs node-driver-registrar: by its controllers, image,
// name, the program it starts, or the flag that no other program has. The image can be a
// placeholder.
func (c container) isRegistrar() bool {
	if all := c.controllers(); all != nil {
		return slices.Contains(all, registrarName)
	}
	mentions := func(arg string) bool { return strings.Contains(arg, "-kubelet-registration-path") }
	return strings.Contains(c.image(), "node-driver-registrar") || strings.Contains(c.Name, "node-driver-registrar") ||
		len(c.Command) > 0 && strings.Contains(path.Base(c.Command[0]), "node-driver-registrar") ||
		slices.ContainsFunc(slices.Concat(c.Command, c.Args), mentions)
}

var (
	probePattern  = safetext.Pattern(`liveness-?probe`)
	othersPattern = safetext.Pattern(`csi-(provisioner|attacher|resizer|snapshotter)|external-(provisioner|attacher|resizer|snapshotter|health)`)
	windowsPath   = safetext.Pattern(`^(unix://)?[A-Za-z]:|\\`)
	reference     = safetext.Pattern(`\$\$|\$\([^)]*\)`)
	placeholder   = safetext.Pattern(`<[A-Za-z][\w-]*>`)
	listHead      = safetext.Pattern(`^(apiVersion: v1|kind: List|\n)*$`)
	listTail      = safetext.Pattern(`^kind: List\n(metadata:\n  resourceVersion: ""\n)?$`)
	alias         = safetext.Pattern(`(?m)(^|[-:,\[{] +)\*`)
)

// isLivenessProbe reports whether the container runs the livenessprobe sidecar of CSI.
func (c container) isLivenessProbe() bool {
	probe := probePattern()
	return probe.MatchString(c.image()) || probe.MatchString(c.Name) ||
		c.hasFlag("csi-address") && c.hasFlag("probe-timeout", "health-port") && !c.isRegistrar() ||
		slices.Equal(c.controllers(), []string{"livenessprobe"})
}

// isSidecar reports whether the container runs beside a driver and uses its socket.
func (c container) isSidecar() bool {
	others := othersPattern()
	return c.isRegistrar() || c.isLivenessProbe() || c.controllers() != nil || others.MatchString(c.image()) ||
		others.MatchString(c.Name) && c.hasFlag("csi-address")
}

// manager names what created a workload of a cluster and reverts changes to it, by the owner or a
// label of the workload; empty if a person or Helm applied it.
func (w *workload) manager() string {
	if len(w.OwnerReferences) > 0 {
		r := w.OwnerReferences[0]
		return safetext.Word(r.Kind + "/" + r.Name)
	}
	if w.Labels["addonmanager.kubernetes.io/mode"] == "Reconcile" {
		return "the addon manager of the cluster"
	}
	for _, key := range slices.Sorted(maps.Keys(w.Labels)) {
		if value := w.Labels[key]; strings.HasSuffix(key, "/managed-by") && value != "" && value != "Helm" {
			return safetext.Word(value)
		}
	}
	return ""
}

// hintError is an error with what to do about it.
type hintError struct {
	error
	hint string
}

func (e *hintError) Unwrap() error { return e.error }

func withHint(hint string, err error) error { return &hintError{err, hint} }

// hintFor returns the hint of an error.
func hintFor(err error) string {
	if h, ok := errors.AsType[*hintError](err); ok {
		return h.hint
	}
	return hintByHand
}

const (
	hintByHand = "correct the manifest, or write the table by hand: see csi-registrar.toml(5)"
	// hintFlag is for a flag that a patch does not have, but the manifest that it changes.
	hintFlag   = "if this is a patch, render its kustomization: kubectl kustomize DIR | csi-registrar import -; otherwise " + hintByHand
	hintValue  = "write the value into a copy of the manifest, and import that"
	hintVolume = "the driver's socket must be on the node: change the volume to a hostPath, also for the driver's container, and import again"
	hintOne    = "import only the one for this kind of node, from a separate file"
	// hintCluster finds the driver however it was installed.
	hintCluster = "read the DaemonSet from the cluster: kubectl get ds,csidriver -A -o yaml | csi-registrar import -"
)
