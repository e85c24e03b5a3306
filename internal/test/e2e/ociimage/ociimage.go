// Package ociimage makes container images from a few files, for machines without a registry.
package ociimage

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path"
	"runtime"
	"slices"
	"testing"
)

// Image describes an image.
type Image struct {
	Names      []string // with tags
	Entrypoint []string
	Command    []string
	Files      map[string]string // path in the image: the file here; all become executable
	Links      map[string]string // path in the image: target of the link
}

// Applets returns Links by which bin/busybox is called by other names.
func Applets(names []string) map[string]string {
	links := map[string]string{}
	for _, name := range names {
		links["bin/"+name] = "busybox"
	}
	return links
}

// Tar returns the image as a tar archive of an OCI layout, for `ctr image import` and `podman
// load`.
func (i Image) Tar(t testing.TB) []byte {
	t.Helper()
	layer := newTar(t)
	dirs := map[string]bool{}
	for name := range i.Files {
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			dirs[dir] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(dirs)) {
		layer.dir(name+"/", 0o755)
	}
	layer.dir("tmp/", 0o1777)
	for _, name := range slices.Sorted(maps.Keys(i.Files)) {
		b, err := os.ReadFile(i.Files[name])
		if err != nil {
			t.Fatal(err)
		}
		layer.file(name, b, 0o755)
	}
	for _, name := range slices.Sorted(maps.Keys(i.Links)) {
		layer.link(name, i.Links[name])
	}

	all := newTar(t)
	all.dir("blobs/", 0o755)
	all.dir("blobs/sha256/", 0o755)
	all.file("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644)
	type object map[string]any
	blob := func(mediaType string, b []byte) object {
		sum := sha256.Sum256(b)
		all.file(fmt.Sprintf("blobs/sha256/%x", sum), b, 0o644)
		return object{"mediaType": mediaType, "digest": fmt.Sprintf("sha256:%x", sum), "size": len(b)}
	}
	encode := func(o object) []byte {
		b, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	const prefix = "application/vnd.oci.image."
	layerBlob := blob(prefix+"layer.v1.tar", layer.end())
	config := blob(prefix+"config.v1+json", encode(object{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": object{"Entrypoint": i.Entrypoint, "Cmd": i.Command, "Env": []string{"PATH=/bin"}},
		"rootfs": object{"type": "layers", "diff_ids": []any{layerBlob["digest"]}},
	}))
	manifest := blob(prefix+"manifest.v1+json", encode(object{
		"schemaVersion": 2, "mediaType": prefix + "manifest.v1+json", "config": config, "layers": []object{layerBlob},
	}))
	var named []object
	for _, name := range i.Names {
		m := maps.Clone(manifest)
		m["annotations"] = object{"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
		named = append(named, m)
	}
	all.file("index.json", encode(object{"schemaVersion": 2, "manifests": named}), 0o644)
	return all.end()
}

type tarball struct {
	t testing.TB
	b *bytes.Buffer
	w *tar.Writer
}

func newTar(t testing.TB) tarball {
	b := &bytes.Buffer{}
	return tarball{t, b, tar.NewWriter(b)}
}

func (a tarball) add(h tar.Header, content []byte) {
	a.t.Helper()
	h.Size = int64(len(content))
	if err := a.w.WriteHeader(&h); err != nil {
		a.t.Fatal(err)
	}
	if _, err := a.w.Write(content); err != nil {
		a.t.Fatal(err)
	}
}

func (a tarball) dir(name string, mode int64) {
	a.add(tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: mode}, nil)
}

func (a tarball) link(name, to string) {
	a.add(tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to, Mode: 0o777}, nil)
}

func (a tarball) file(name string, content []byte, mode int64) {
	a.add(tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode}, content)
}

func (a tarball) end() []byte {
	a.t.Helper()
	if err := a.w.Close(); err != nil {
		a.t.Fatal(err)
	}
	return a.b.Bytes()
}
