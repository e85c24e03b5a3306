package importer

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"go.yaml.in/yaml/v3"

	"csi-registrar/internal/sys/safetext"
)

// overlay is a kustomization in which each DaemonSet with an imported registrar avoids the nodes
// with a label, and a second DaemonSet without the registrar runs where the label's value is
// splitValue. With another value a node has neither, so that the drivers of both pods are never
// there at once: the one that ends could remove the socket of the other.
type overlay struct {
	label     string
	manifests bytes.Buffer
	second    bytes.Buffer
	patches   []map[string]string
}

// splitSuffix ends the second DaemonSet's name, and the value of a label in its selector: no
// selector may match the pods of both.
const (
	splitSuffix = "-host"
	maxLabel    = 63 // bytes of a label's value
	splitValue  = "yes"
)

// Split returns a kustomization that splits the DaemonSets that have edits by a label of nodes.
func Split(manifests []File, edits []Edits, label string) ([]File, error) {
	o := &overlay{label: label}
	for _, m := range manifests {
		fmt.Fprintf(&o.manifests, "---\n%s\n", m.Data)
		if o.manifests.Len() > maxWhole {
			return nil, fmt.Errorf("cannot split more than %d MiB", maxWhole>>20)
		}
		for dec := yaml.NewDecoder(bytes.NewReader(m.Data)); ; {
			var document yaml.Node
			err := dec.Decode(&document)
			if errors.Is(err, io.EOF) {
				break
			}
			if err == nil {
				err = o.add(m, &document, edits)
			}
			if err != nil {
				return nil, fmt.Errorf("cannot split %s: %s", m.Name, safetext.Quote(oneLine(err)))
			}
		}
	}
	if o.patches == nil {
		return nil, errors.New("cannot split: there is no DaemonSet with an imported node-driver-registrar")
	}
	files, resources := []File{{"manifests.yaml", o.manifests.Bytes()}}, []string{"manifests.yaml"}
	if o.second.Len() > 0 {
		files, resources = append(files, File{"second.yaml", o.second.Bytes()}), append(resources, "second.yaml")
	}
	kustomization, err := yaml.Marshal(map[string]any{
		"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources, "patches": o.patches,
	})
	return append(files, File{"kustomization.yaml", kustomization}), err
}

// add adds an object, or the items of a list.
func (o *overlay) add(m File, node *yaml.Node, edits []Edits) error {
	var list struct{ Items []yaml.Node }
	var obj object
	var all map[string]any
	if err := errors.Join(node.Decode(&list), node.Decode(&obj), node.Decode(&all)); err != nil {
		return err
	}
	for i := range list.Items {
		if err := o.add(m, &list.Items[i], edits); err != nil {
			return err
		}
	}
	w := &workload{file: m.Name, kind: obj.Kind, metadata: obj.Metadata}
	i := slices.IndexFunc(edits, func(e Edits) bool { return e.Workload == w.String() })
	switch manager := w.manager(); {
	case i < 0:
		return nil
	case obj.Kind != "DaemonSet":
		return fmt.Errorf("%s %s is not a DaemonSet", obj.Kind, w.name())
	case manager != "":
		return fmt.Errorf("%s restores %s; the admission policy of rollout.md works", manager, w.name())
	}
	name := map[string]any{"name": obj.Metadata.Name}
	if obj.Metadata.Namespace != "" {
		name["namespace"] = obj.Metadata.Namespace
	}
	patch := map[string]any{"apiVersion": all["apiVersion"], "kind": all["kind"], "metadata": name}
	selectNodes(field(patch, "spec", "template", "spec"), field(all, "spec", "template", "spec"), map[string]any{"key": o.label, "operator": "DoesNotExist"})
	text, err := yaml.Marshal(patch)
	o.patches = append(o.patches, map[string]string{"patch": string(text)})
	if err != nil || edits[i].Whole {
		return err
	}
	return o.addSecond(all, edits[i])
}

// addSecond adds the second DaemonSet, made of the first one.
func (o *overlay) addSecond(all map[string]any, e Edits) error {
	metadata := field(all, "metadata")
	first := metadata["name"]
	maps.DeleteFunc(metadata, func(key string, value any) bool {
		return value == nil || key != "namespace" && key != "labels"
	})
	metadata["name"] = fmt.Sprint(first, splitSuffix)
	delete(all, "status")
	selector, labels := field(all, "spec", "selector", "matchLabels"), field(all, "spec", "template", "metadata", "labels")
	keys := slices.DeleteFunc(slices.Sorted(maps.Keys(selector)), func(key string) bool { return cmp.Or(selector[key], any("")) == "" })
	if len(keys) == 0 {
		return fmt.Errorf("the selector of %s has no matchLabels", first)
	}
	value := fmt.Sprint(selector[keys[0]])
	value = value[:min(len(value), maxLabel-len(splitSuffix))] + splitSuffix
	selector[keys[0]], labels[keys[0]] = value, value
	pod := field(all, "spec", "template", "spec")
	selectNodes(pod, pod, map[string]any{"key": o.label, "operator": "In", "values": []string{splitValue}})
	e.change(pod)
	text, err := yaml.Marshal(all)
	fmt.Fprintf(&o.second, "---\n%s", text)
	return err
}

// selectNodes gives a pod the required node affinity of another one, with one more condition.
func selectNodes(pod, other, condition map[string]any) {
	const key = "requiredDuringSchedulingIgnoredDuringExecution"
	terms := items(field(other, "affinity", "nodeAffinity", key)["nodeSelectorTerms"])
	if terms == nil {
		terms = []map[string]any{{}}
	}
	for i, term := range terms {
		terms[i] = maps.Clone(term)
		terms[i]["matchExpressions"] = append(items(term["matchExpressions"]), condition)
	}
	field(pod, "affinity", "nodeAffinity", key)["nodeSelectorTerms"] = terms
}

// change makes the edits in a pod.
func (e Edits) change(pod map[string]any) {
	without := func(of map[string]any, key string, drop func(map[string]any) bool) {
		if of[key] != nil {
			of[key] = slices.DeleteFunc(items(of[key]), drop)
		}
	}
	for _, list := range []string{"containers", "initContainers"} {
		without(pod, list, func(c map[string]any) bool {
			return slices.Contains(e.Containers, ContainerRef{list, fmt.Sprint(c["name"])})
		})
		for _, c := range items(pod[list]) {
			without(c, "volumeMounts", func(m map[string]any) bool {
				return slices.ContainsFunc(e.Unmount, func(u MountRef) bool {
					return u.Container == c["name"] && u.Volume == m["name"] && u.Path == m["mountPath"]
				})
			})
			for _, r := range e.Reduce {
				if r.Container == c["name"] {
					args, _ := c["args"].([]any)
					c["args"] = append(args, r.flag()) // the last one counts
				}
			}
			for _, m := range e.Mount {
				if m.Container == c["name"] {
					mount := map[string]any{"name": m.Volume, "mountPath": m.Path, "readOnly": true}
					if m.SubPath != "" {
						mount["subPath"] = m.SubPath
					}
					c["volumeMounts"] = append(items(c["volumeMounts"]), mount)
				}
			}
		}
	}
	without(pod, "volumes", func(v map[string]any) bool { return slices.Contains(e.Volumes, fmt.Sprint(v["name"])) })
}

// field returns a field of an object, which is created if there is none.
func field(of map[string]any, path ...string) map[string]any {
	for _, key := range path {
		next, ok := of[key].(map[string]any)
		if !ok {
			next = map[string]any{}
			of[key] = next
		}
		of = next
	}
	return of
}

// items returns a list of objects.
func items(list any) (all []map[string]any) {
	switch list := list.(type) {
	case []map[string]any:
		return list
	case []any:
		for _, item := range list {
			if item, ok := item.(map[string]any); ok {
				all = append(all, item)
			}
		}
	}
	return all
}
