package node

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"csi-registrar/internal/e2e/built"
)

// Image is the name of the image of all pods: cmd/pod, and busybox as a shell.
const Image = "docker.io/csi-e2e/pod:1"

// links are the names that busybox has in the image.
var links = []string{"sh", "cat", "ls", "sleep", "mount", "stat", "kill"}

// image is the tar of Image.
func image(t testing.TB, busybox string) []byte {
	t.Helper()
	program := filepath.Join(t.TempDir(), "pod")
	build := exec.Command("go", "build", "-ldflags=-s -w", "-o", program, "./cmd/pod")
	build.Dir = filepath.Join(built.Root(t), "internal", "e2e")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("cannot build cmd/pod: %v\n%s", err, out)
	}
	return OCI{
		Names: []string{Image}, Entrypoint: []string{"/bin/pod", "pause"},
		Files: map[string]string{"bin/pod": program, "bin/busybox": busybox}, Applets: links,
	}.Tar(t)
}

// OCI is an image of some programs.
type OCI struct {
	Names      []string
	Entrypoint []string
	Command    []string
	Files      map[string]string // programs by their path in the image, where they are here
	Applets    []string          // names of bin/busybox in bin
}

// Tar makes an OCI image layout in a tar, for `ctr image import`; no registry is asked.
func (o OCI) Tar(t testing.TB) []byte {
	t.Helper()
	layer := newTar(t)
	layer.dir("bin/", 0o755)
	layer.dir("tmp/", 0o1777)
	for name, from := range o.Files {
		b, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		layer.file(name, b, 0o755)
	}
	for _, name := range o.Applets {
		layer.link("bin/"+name, "busybox")
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
		"config": object{"Entrypoint": o.Entrypoint, "Cmd": o.Command, "Env": []string{"PATH=/bin"}},
		"rootfs": object{"type": "layers", "diff_ids": []any{layerBlob["digest"]}},
	}))
	manifest := blob(prefix+"manifest.v1+json", encode(object{
		"schemaVersion": 2, "mediaType": prefix + "manifest.v1+json", "config": config, "layers": []object{layerBlob},
	}))
	var named []object
	for _, name := range o.Names {
		m := maps.Clone(manifest)
		m["annotations"] = object{"io.containerd.image.name": name}
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
