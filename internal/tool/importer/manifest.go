package importer

import (
	"fmt"
	"path"
	"slices"

	"go.yaml.in/yaml/v3"

	"csi-registrar/internal/sys/safetext"
)

// Manifest is one file, or standard input.
type Manifest struct {
	Name string // for messages
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

func (p podSpec) size() int {
	n := len(p.Containers) + len(p.InitContainers) + len(p.Volumes)
	for _, c := range p.all() {
		n += len(c.VolumeMounts)
	}
	return n
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
