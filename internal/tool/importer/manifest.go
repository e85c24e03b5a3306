package compat

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/node/status"
)

// Manifest is one file, or standard input.
type Manifest struct {
	Name string // for messages
	Data []byte
}

// object is the part of a Kubernetes object that is the same for all kinds.
type object struct {
	APIVersion  string `yaml:"apiVersion"`
	Kind        string
	Metadata    metadata
	Provisioner yaml.Node // decoded only for a StorageClass
	Spec        yaml.Node // decoded only for some kinds
	Items       []object
}

type metadata struct {
	Name            string
	Namespace       string
	Labels          map[string]string
	Annotations     map[string]string
	OwnerReferences []ownerReference `yaml:"ownerReferences"`
}

type ownerReference struct {
	APIVersion string `yaml:"apiVersion"`
	Kind       string
	Name       string
}

// helmRelease identifies the Helm release that installed an object of a cluster. It is empty for
// objects that Helm did not install, and for rendered charts.
func (m metadata) helmRelease() string {
	const prefix = "meta.helm.sh/release-"
	if m.Annotations[prefix+"name"] == "" {
		return ""
	}
	return m.Annotations[prefix+"namespace"] + "/" + m.Annotations[prefix+"name"]
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
	file         string
	name         string
	helmRelease  string
	updatePeriod int64 // nodeAllocatableUpdatePeriodSeconds; 0: not set
}

// podSpec is the part of a pod that Import needs.
type podSpec struct {
	HostNetwork  bool              `yaml:"hostNetwork"`
	NodeSelector map[string]string `yaml:"nodeSelector"`
	OS           struct{ Name string }
	Affinity     struct {
		Node struct {
			Required struct {
				Terms []nodeSelectorTerm `yaml:"nodeSelectorTerms"`
			} `yaml:"requiredDuringSchedulingIgnoredDuringExecution"`
		} `yaml:"nodeAffinity"`
	}
	Containers      []container
	InitContainers  []container `yaml:"initContainers"`
	Volumes         []volume
	SecurityContext securityContext `yaml:"securityContext"`
}

// nodeSelectorTerm is one of the alternatives of a node affinity.
type nodeSelectorTerm struct {
	Expressions []struct {
		Key, Operator string
		Values        []string
	} `yaml:"matchExpressions"`
}

// needsWindows reports whether only nodes with Windows match the term.
func (t nodeSelectorTerm) needsWindows() bool {
	for _, e := range t.Expressions {
		if e.Key == osLabel && e.Operator == "In" && slices.Equal(e.Values, []string{windows}) {
			return true
		}
	}
	return false
}

// osLabel is the label of a node with its operating system.
const osLabel, windows = "kubernetes.io/os", "windows"

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

// objects holds the parts of all manifests that Import needs.
type objects struct {
	workloads []*workload
	drivers   []csiDriver
	operators []string // that create the DaemonSets of a driver
	// provisioners of StorageClasses that can be the name of a driver.
	provisioners []string
	refused      []Refusal
}

// addOperator adds the name of an operator; empty: there is none.
func (o *objects) addOperator(name string) {
	if name != "" && !slices.Contains(o.operators, name) {
		o.operators = append(o.operators, name)
	}
}

// refuse adds an object that cannot be read, and reports whether its manifest is a template.
func (o *objects) refuse(m Manifest, where, what string, err error) bool {
	err = fmt.Errorf("%s cannot be read: %s", what, safetext.Quote(oneLine(err)))
	template := isTemplate(string(m.Data))
	if template {
		err = fmt.Errorf("%w: %w", templateError(string(m.Data)), err)
	}
	o.refused = append(o.refused, Refusal{where, err.Error(), hintFor(err)})
	return template
}

// read collects the objects of a manifest.
func (o *objects) read(m Manifest) {
	dec := yaml.NewDecoder(bytes.NewReader(m.Data))
	for n := 1; ; n++ {
		var obj object
		err := dec.Decode(&obj)
		if errors.Is(err, io.EOF) {
			return
		}
		if err == nil {
			o.add(m, obj)
			continue
		}
		template := o.refuse(m, m.Name, fmt.Sprintf("document %d", n), err)
		if _, typeError := errors.AsType[*yaml.TypeError](err); template || !typeError {
			return // the decoder cannot find the next document after a syntax error
		}
	}
}

func (o *objects) add(m Manifest, obj object) {
	for _, item := range obj.Items {
		o.add(m, item)
	}
	o.addOperator(operatorOf(obj))
	var err error
	switch obj.Kind {
	case "StorageClass":
		var name string
		if obj.Provisioner.Decode(&name) == nil && status.CheckName(name) == nil {
			o.provisioners = append(o.provisioners, name)
		}
	case "CSIDriver":
		var spec struct {
			UpdatePeriod int64 `yaml:"nodeAllocatableUpdatePeriodSeconds"`
		}
		if err = obj.Spec.Decode(&spec); err == nil || obj.Spec.IsZero() {
			o.drivers = append(o.drivers, csiDriver{m.Name, obj.Metadata.Name, obj.Metadata.helmRelease(), spec.UpdatePeriod})
			return
		}
	case "DaemonSet", "Deployment", "ReplicaSet", "StatefulSet", "Pod":
		if obj.Spec.IsZero() || (obj.Kind == "Pod" || obj.Kind == "ReplicaSet") && obj.Metadata.ownedByWorkload() {
			return // its owner must be changed, not this object
		}
		var spec struct {
			podSpec  `yaml:",inline"` // of a Pod
			Template struct{ Spec podSpec }
		}
		if err = obj.Spec.Decode(&spec); err == nil {
			w := &workload{file: m.Name, kind: obj.Kind, metadata: obj.Metadata, pod: spec.Template.Spec}
			if obj.Kind == "Pod" {
				w.pod = spec.podSpec
			}
			o.workloads = append(o.workloads, w)
			for _, c := range w.pod.all() {
				o.addOperator(operatorIn(c.Image))
			}
		}
	}
	if err != nil {
		o.refuse(m, (&workload{file: m.Name, kind: obj.Kind, metadata: obj.Metadata}).String(), "it", err)
	}
}

// ownedByWorkload reports whether a workload created this object.
func (m metadata) ownedByWorkload() bool {
	return slices.ContainsFunc(m.OwnerReferences, func(r ownerReference) bool {
		return slices.Contains([]string{"DaemonSet", "Deployment", "ReplicaSet", "StatefulSet"}, r.Kind)
	})
}

// isTemplate reports whether s has a placeholder of a template.
func isTemplate(s string) bool {
	return strings.Contains(s, "{{") || strings.Contains(s, "${")
}

// oneLine formats an error of the decoder in one line, without the names of our types.
func oneLine(err error) string {
	text := err.Error()
	if te, ok := errors.AsType[*yaml.TypeError](err); ok && len(te.Errors) > 0 {
		text, _, _ = strings.Cut(te.Errors[0], " into ")
		text = strings.Replace(text, "cannot unmarshal", "not what Kubernetes expects there:", 1)
	}
	return strings.Join(strings.Fields(text), " ")
}
