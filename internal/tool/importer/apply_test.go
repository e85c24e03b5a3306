package importer

import (
	"bytes"
	"errors"
	"io"
	"path"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"csi-registrar/internal/node/rootdir"
)

// apply makes the edits in a manifest as a person would, and returns the workloads that have some.
func apply(t *testing.T, m File, edits []Edits) []byte {
	t.Helper()
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	dec := yaml.NewDecoder(bytes.NewReader(m.Data))
	for {
		var doc yaml.Node
		if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
			break
		} else if err != nil || len(doc.Content) == 0 {
			continue
		}
		objs := []*yaml.Node{doc.Content[0]}
		if items := get(doc.Content[0], "items"); items != nil {
			objs = items.Content
		}
		for _, obj := range objs {
			var o object
			if obj.Decode(&o) != nil {
				continue
			}
			w := &workload{file: m.Name, kind: o.Kind, metadata: o.Metadata}
			i := slices.IndexFunc(edits, func(e Edits) bool { return e.Workload == w.String() })
			if i < 0 || edits[i].Whole {
				continue
			}
			pod := get(obj, "spec")
			if o.Kind != "Pod" {
				pod = get(get(pod, "template"), "spec")
			}
			edits[i].apply(t, pod)
			if err := enc.Encode(obj); err != nil {
				t.Fatal(err)
			}
		}
	}
	return out.Bytes()
}

// get returns the value of a key of a mapping; nil if there is none.
func get(n *yaml.Node, key string) *yaml.Node {
	if n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return n.Content[i+1]
		}
	}
	return nil
}

// remove removes the elements of a list for which match is true. There must be one.
func remove(t *testing.T, list *yaml.Node, what string, match func(*yaml.Node) bool) {
	t.Helper()
	if list == nil {
		t.Errorf("there is no list with %s", what)
		return
	}
	before := len(list.Content)
	list.Content = slices.DeleteFunc(list.Content, match)
	if len(list.Content) == before {
		t.Errorf("there is no %s to remove", what)
	}
}

func named(name string) func(*yaml.Node) bool {
	return func(n *yaml.Node) bool { v := get(n, "name"); return v != nil && v.Value == name }
}

func (e Edits) apply(t *testing.T, pod *yaml.Node) {
	t.Helper()
	for _, c := range e.Containers {
		remove(t, get(pod, c.List), "container "+c.Name, named(c.Name))
	}
	in := func(container, key string) *yaml.Node {
		for _, list := range []string{"containers", "initContainers"} {
			l := get(pod, list)
			if l == nil {
				continue
			}
			if i := slices.IndexFunc(l.Content, named(container)); i >= 0 {
				return get(l.Content[i], key)
			}
		}
		return nil
	}
	mounts := func(container string) *yaml.Node { return in(container, "volumeMounts") }
	for _, r := range e.Reduce {
		changed := false
		for _, key := range []string{"command", "args"} {
			list := in(r.Container, key)
			for i := 0; list != nil && i < len(list.Content); i++ {
				if strings.HasPrefix(list.Content[i].Value, "--controllers=") {
					list.Content[i].Value = r.flag()
					changed = true
				}
			}
		}
		if !changed {
			t.Errorf("the container %s has no --controllers", r.Container)
		}
	}
	for _, m := range e.Unmount {
		remove(t, mounts(m.Container), "mount "+m.Volume, named(m.Volume))
	}
	for _, v := range e.Volumes {
		remove(t, get(pod, "volumes"), "volume "+v, named(v))
	}
	for _, m := range e.Mount {
		list := mounts(m.Container)
		if list == nil {
			t.Errorf("no container %q to mount %s in", m.Container, m.Volume)
			continue
		}
		var n yaml.Node
		value := map[string]any{"name": m.Volume, "mountPath": m.Path, "readOnly": true}
		if m.SubPath != "" {
			value["subPath"] = m.SubPath
		}
		if err := n.Encode(value); err != nil {
			t.Fatal(err)
		}
		list.Content = append(list.Content, &n)
	}
}

// checkApplied checks what must hold for each workload after its edits: no registrar is left that
// was imported, each mount has its volume, nobody mounts plugins_registry, a directory that the pod
// made for the driver's socket is still made, and some container can still serve the socket.
//
// It finds a workload by its name, so it checks nothing if a manifest has two of the same name,
// such as variants for Windows or for old versions of Kubernetes.
func checkApplied(t *testing.T, before File, res Result) {
	t.Helper()
	workloads := func(m File) (all []*workload) {
		(&objects{found: func(w *workload) { all = append(all, w) }}).read(m)
		return all
	}
	old := workloads(before)
	seen := map[string]bool{}
	for _, w := range old {
		if seen[w.String()] {
			t.Logf("not checked: there are two of %s", w)
			return
		}
		seen[w.String()] = true
	}
	for _, w := range workloads(File{Name: before.Name, Data: apply(t, before, res.Edits)}) {
		i := slices.IndexFunc(old, func(o *workload) bool { return o.String() == w.String() })
		if i < 0 {
			t.Errorf("%s appeared", w)
			continue
		}
		var had objects
		had.register(old[i])
		for _, r := range had.registrations {
			imported := slices.ContainsFunc(res.Registrars, func(x Registrar) bool {
				return x.Driver.Socket == r.socket && slices.Contains(x.Workloads, w.String())
			})
			if !imported {
				continue
			}
			if slices.ContainsFunc(w.pod.all(), func(c container) bool { return c.Name == r.container.Name && c.isRegistrar() }) {
				t.Errorf("%s: the container %s is still a registrar", w, r.container.Name)
			}
			dir := path.Dir(r.socket)
			if old[i].makes(dir) && !w.makes(dir) {
				t.Errorf("%s: nothing makes %s any longer", w, dir)
			}
			if !w.sees(dir) {
				t.Errorf("%s: no container can serve %s", w, r.socket)
			}
		}
		for _, c := range w.pod.all() {
			for _, m := range c.VolumeMounts {
				v := slices.IndexFunc(w.pod.Volumes, func(v volume) bool { return v.Name == m.Name })
				was := slices.IndexFunc(old[i].pod.Volumes, func(v volume) bool { return v.Name == m.Name })
				switch {
				case v < 0 && was >= 0:
					t.Errorf("%s: the container %s mounts %s, which was removed", w, c.Name, m.Name)
				case v >= 0 && w.pod.Volumes[v].HostPath != nil && path.Base(w.pod.Volumes[v].HostPath.Path) == "plugins_registry" && !c.isRegistrar():
					t.Errorf("%s: the container %s still mounts plugins_registry", w, c.Name)
				}
			}
		}
	}
}

// makes reports whether a mounted volume makes the directory, other than the kubelet's own.
func (w *workload) makes(dir string) bool {
	for _, c := range w.pod.all() {
		for _, m := range c.VolumeMounts {
			for _, v := range w.pod.Volumes {
				if v.Name != m.Name || v.HostPath == nil || !v.HostPath.creates() {
					continue
				}
				if host, err := w.pod.hostPath(c, m.MountPath); err == nil && rootdir.Within(host, dir) {
					return true
				}
			}
		}
	}
	return false
}

// sees reports whether a container that is no sidecar has the directory of the node.
func (w *workload) sees(dir string) bool {
	for _, c := range w.pod.all() {
		for _, m := range c.VolumeMounts {
			if host, err := w.pod.hostPath(c, m.MountPath); err == nil && rootdir.Within(dir, host) && !c.isSidecar() {
				return true
			}
		}
	}
	return false
}
