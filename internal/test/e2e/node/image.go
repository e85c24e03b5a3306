package node

import (
	"testing"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/ociimage"
)

// Image is the name of the image of all pods: cmd/pod, and busybox as a shell.
const Image = "localhost/csi-e2e/pod:1"

// applets are the names of busybox in the image.
var applets = []string{"sh", "cat", "ls", "sleep", "mount", "stat", "kill"}

// image returns that image for `ctr image import`, without a registry.
func image(t testing.TB, busybox string) []byte {
	t.Helper()
	return ociimage.Image{
		Names:      []string{Image},
		Entrypoint: []string{"/bin/pod", "pause"},
		Files:      map[string]string{"bin/pod": built.Command(t, "pod"), "bin/busybox": busybox},
		Links:      ociimage.Applets(applets),
	}.Tar(t)
}
