package kit_test

import (
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"csi-registrar/internal/test/e2e/built"
)

// published is a directory from which systemd-sysupdate takes system extensions.
type published struct {
	t     *testing.T
	dir   string
	gnupg string
	key   string
}

func newPublished(t *testing.T) *published {
	t.Helper()
	gnupg, key, _ := newKey(t)
	return &published{t, t.TempDir(), gnupg, key}
}

// add builds a system extension and signs the list of all.
func (p *published) add(version string) {
	p.t.Helper()
	tools(p.t, "mksquashfs:squashfs-tools")
	shell(p.t, built.Root(p.t), "scripts/sysext", "DIST="+p.dir, "VERSION="+version)
	p.sign()
}

func (p *published) sign() {
	p.t.Helper()
	shell(p.t, p.dir, "sha256sum *.raw >SHA256SUMS; gpg --batch --quiet --yes --detach-sign --output SHA256SUMS.gpg SHA256SUMS", "GNUPGHOME="+p.gnupg)
}

// TestSysextBakery runs the functions of the recipe for Flatcar's sysext-bakery as that does.
func TestSysextBakery(t *testing.T) {
	t.Parallel()
	p := newPublished(t)
	p.add(older)
	tools(t, "curl", "unsquashfs:squashfs-tools")
	recipe := filepath.Join(built.Root(t), "packaging/examples/provision/create.sh")
	out := shell(t, t.TempDir(), `printf '%s\n' `+newer+" "+older+` 0.1.100 >"$dir/VERSIONS"
		mkdir root
		bash -euo pipefail -c '
			function arch_transform() { if [ "$3" = "$1" ]; then echo "$2"; else echo "$3"; fi; }
			source "$0"
			list_available_versions
			populate_sysext_root "$PWD/root" "$1" "$2"' "$recipe" "$arch" "$version"
		unsquashfs -quiet -no-progress -dest expected "$dir/csi-registrar_$version"_*.raw >/dev/null
		diff -r --no-dereference expected root`, "URL=file://"+p.dir, "dir="+p.dir, "recipe="+recipe, "version="+older,
		"arch="+strings.ReplaceAll(runtime.GOARCH, "amd64", "x86-64"))
	if want := "0.1.100\n" + newer + "\n" + older + "\n"; out != want {
		t.Errorf("the recipe printed %q, want %q", out, want)
	}
}
