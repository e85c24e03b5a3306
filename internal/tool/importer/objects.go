package importer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"csi-registrar/internal/sys/safetext"
)

// objects holds the parts of all manifests that Import needs.
type objects struct {
	found         func(*workload) // is called for each
	registrations []*registration
	drivers       []csiDriver
	notes         []string // what was ignored intentionally
	refused       []Refusal
}

// refuse adds an object that cannot be read, and reports whether its manifest is a template.
func (o *objects) refuse(m File, where, what string, err error) bool {
	err = fmt.Errorf("%s cannot be read: %s", what, safetext.Quote(oneLine(err)))
	template := isTemplate(string(m.Data))
	if template {
		err = fmt.Errorf("%w: %w", templateError(string(m.Data)), err)
	}
	o.refused = append(o.refused, Refusal{where, err.Error(), hintFor(err)})
	return template
}

// read collects the objects of a manifest. The items of a long list are read one by one, because
// the decoder needs about 60 bytes for each byte of a document; whatever is not as kubectl prints
// it, or has an error, is read as a whole.
func (o *objects) read(m File) {
	before := *o
	if items, ok := splitItems(m.Data); ok && o.readItems(m, items) {
		return
	}
	*o = before
	if len(m.Data) > maxWhole {
		o.refused = append(o.refused, Refusal{m.Name, fmt.Sprintf("it has more than %d MiB, and is not a list without errors as kubectl prints it", maxWhole>>20), hintCluster})
		return
	}
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

// readItems collects the items of a list, and reports whether all could be read.
func (o *objects) readItems(m File, items iter.Seq[[]byte]) bool {
	refused := len(o.refused)
	for item := range items {
		var list []object
		if err := yaml.Unmarshal(item, &list); err != nil || len(list) != 1 {
			return false
		}
		switch o.add(m, list[0]); {
		case len(o.refused) > refused:
			return false // the error has the line of the item
		case len(o.registrations) > maxRegistrars:
			return true
		}
	}
	return true
}

// splitItems returns the items of a manifest that is one list, in JSON or in YAML's block style,
// each as a list of one. In YAML nothing else may begin a line, and there may be no alias, which
// could be defined elsewhere.
func splitItems(data []byte) (iter.Seq[[]byte], bool) {
	if items, ok := splitJSON(data); ok {
		return items, true
	}
	head, rest, ok := bytes.Cut(data, []byte("\nitems:\n"))
	if !ok || !bytes.HasPrefix(rest, []byte("- ")) || !listHead().Match(head) || alias().Match(rest) {
		return nil, false
	}
	tail := bytes.LastIndex(rest, []byte("\nkind: List\n"))
	if tail >= 0 && listTail().Match(rest[tail+1:]) {
		rest = rest[:tail+1]
	}
	for line := range bytes.Lines(rest) {
		if c := line[0]; c != ' ' && c != '\n' && !bytes.HasPrefix(line, []byte("- ")) {
			return nil, false
		}
	}
	return func(yield func([]byte) bool) {
		for item := range bytes.SplitSeq(bytes.TrimSuffix(rest[len("- "):], []byte("\n")), []byte("\n- ")) {
			if !yield(slices.Concat([]byte("- "), item, []byte("\n"))) {
				return
			}
		}
	}, true
}

// splitJSON is splitItems for JSON.
func splitJSON(data []byte) (iter.Seq[[]byte], bool) {
	var list struct {
		APIVersion, Kind string
		Metadata         json.RawMessage
		Items            []json.RawMessage
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if dec.Decode(&list) != nil || list.Kind != "List" || len(bytes.TrimSpace(data[dec.InputOffset():])) > 0 {
		return nil, false
	}
	return func(yield func([]byte) bool) {
		for _, item := range list.Items {
			if !yield(slices.Concat([]byte("["), item, []byte("]"))) {
				return
			}
		}
	}, true
}

const (
	// maxRegistrars is more than all nodes of a cluster have.
	maxRegistrars = 4096
	// maxWhole limits what the decoder gets in one piece.
	maxWhole = 8 << 20
)

func (o *objects) add(m File, obj object) {
	for _, item := range obj.Items {
		o.add(m, item)
	}
	var err error
	switch obj.Kind {
	case "CSIDriver":
		var spec struct {
			UpdatePeriod int64 `yaml:"nodeAllocatableUpdatePeriodSeconds"`
			Prevents     bool  `yaml:"preventPodSchedulingIfMissing"`
		}
		if err = obj.Spec.Decode(&spec); err == nil || obj.Spec.IsZero() {
			o.drivers = append(o.drivers, csiDriver{m.Name, obj.Metadata.Name, obj.Metadata.helmRelease(), spec.UpdatePeriod > 0, spec.Prevents})
			return
		}
	case "DaemonSet", "Deployment", "ReplicaSet", "StatefulSet", "Pod":
		owned := slices.ContainsFunc(obj.Metadata.OwnerReferences, func(r ownerReference) bool {
			return slices.Contains([]string{"DaemonSet", "Deployment", "ReplicaSet", "StatefulSet"}, r.Kind)
		})
		if obj.Spec.IsZero() || (obj.Kind == "Pod" || obj.Kind == "ReplicaSet") && owned {
			return // its owner must be changed, not this object
		}
		var spec struct {
			podSpec  `yaml:",inline"` // of a Pod
			Template struct{ Spec podSpec }
		}
		if err = obj.Spec.Decode(&spec); err == nil {
			w := &workload{file: m.Name, kind: obj.Kind, metadata: obj.Metadata, pod: spec.Template.Spec}
			// kubectl keeps the whole object in one of the others.
			maps.DeleteFunc(w.Annotations, func(key, _ string) bool { return !strings.HasPrefix(key, helmPrefix) })
			if obj.Kind == "Pod" {
				w.pod = spec.podSpec
			}
			o.found(w)
		}
	}
	if err != nil {
		o.refuse(m, (&workload{file: m.Name, kind: obj.Kind, metadata: obj.Metadata}).String(), "it", err)
	}
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
