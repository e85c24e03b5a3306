package compat

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"csi-registrar/internal/safetext"

	"go.yaml.in/yaml/v3"
)

// Manifest is one file, or standard input.
type Manifest struct {
	Name string // for messages
	Data []byte
}

// object is the part of a Kubernetes object that is the same for all kinds.
type object struct {
	Kind     string
	Metadata struct {
		Name      string
		Namespace string
	}
	Spec  yaml.Node // decoded only for some kinds
	Items []object
}

// workload is an object that makes pods.
type workload struct {
	file string
	kind string
	name string // NAMESPACE/NAME, if the namespace is given
	pod  podSpec
}

func (w workload) String() string {
	return fmt.Sprintf("%s: %s %s", w.file, w.kind, safetext.Word(w.name))
}

// podSpec is the part of a pod that is needed here.
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
}

type volume struct {
	Name     string
	HostPath *struct{ Path string } `yaml:"hostPath"`
	Other    map[string]yaml.Node   `yaml:",inline"` // the other kinds
}

type securityContext struct {
	RunAsUser *int64 `yaml:"runAsUser"`
}

// read finds the workloads and the names of the CSIDriver objects in all documents.
func (m Manifest) read() (workloads []workload, drivers []string, err error) {
	dec := yaml.NewDecoder(bytes.NewReader(m.Data))
	for n := 1; ; n++ {
		var o object
		err := dec.Decode(&o)
		if errors.Is(err, io.EOF) {
			return workloads, drivers, nil
		}
		if err == nil {
			err = m.collect(o, &workloads, &drivers)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("document %d cannot be read: %s", n, safetext.Quote(oneLine(err)))
		}
	}
}

func (m Manifest) collect(o object, workloads *[]workload, drivers *[]string) error {
	for _, item := range o.Items {
		if err := m.collect(item, workloads, drivers); err != nil {
			return err
		}
	}
	if o.Kind == "CSIDriver" && !slices.Contains(*drivers, o.Metadata.Name) {
		*drivers = append(*drivers, o.Metadata.Name)
	}
	switch o.Kind {
	case "DaemonSet", "Deployment", "ReplicaSet", "StatefulSet", "Pod":
	default:
		return nil
	}
	if o.Spec.IsZero() {
		return nil
	}
	w := workload{file: m.Name, kind: o.Kind, name: o.Metadata.Name}
	if o.Metadata.Namespace != "" {
		w.name = o.Metadata.Namespace + "/" + w.name
	}
	var spec struct {
		podSpec  `yaml:",inline"` // of a Pod
		Template struct{ Spec podSpec }
	}
	if err := o.Spec.Decode(&spec); err != nil {
		return err
	}
	w.pod = spec.Template.Spec
	if o.Kind == "Pod" {
		w.pod = spec.podSpec
	}
	*workloads = append(*workloads, w)
	return nil
}

// isTemplate reports whether s has a placeholder of a template.
func isTemplate(s string) bool {
	return strings.Contains(s, "{{") || strings.Contains(s, "${")
}

// oneLine formats an error of the decoder in one line, without the names of types here.
func oneLine(err error) string {
	text := err.Error()
	if te, ok := errors.AsType[*yaml.TypeError](err); ok && len(te.Errors) > 0 {
		text, _, _ = strings.Cut(te.Errors[0], " into ")
		text = strings.Replace(text, "cannot unmarshal", "not what Kubernetes expects there:", 1)
	}
	return strings.Join(strings.Fields(text), " ")
}
