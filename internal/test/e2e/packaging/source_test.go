package packaging

import (
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/system/nspawn"
)

// copySource puts this tree into a repository of its own, in dir/source, in one commit. It is the
// newest version in CHANGELOG.md, without what is unreleased.
func copySource(t *testing.T, dir string) {
	t.Helper()
	// Without bin, where other suites may build at the same time.
	cmd := exec.Command("sh", "-euc", `mkdir source; cd source
		tar -C "$0" --anchored --exclude=./bin --exclude=./dist --exclude=./release --exclude=./repository --exclude=./.git -cf - . | tar -xf -
		sed -i '/^## .Unreleased/,/^## .[0-9]/{/^## .[0-9]/!d}' CHANGELOG.md
		git init -q; git config user.name x; git config user.email x@example.com; git add -A; git commit -q -m x`, built.Root(t))
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// buildSource builds both packages from the tarball in /build of a root, as distributions do. The
// Go of this machine stands for the package golang, which Debian 13 has in an older version.
const buildSource = `cd /build
mkdir -p go/DEBIAN
printf '%s\n' 'Package: golang-any' 'Version: 2:1.26' 'Architecture: all' 'Maintainer: x <x@example.com>' 'Description: x' >go/DEBIAN/control
dpkg-deb --build go go.deb
dpkg --install go.deb
tar -xf csi-registrar-*.tar.gz
mkdir deb
mv csi-registrar-[0-9]*/ deb/
cp csi-registrar-*.tar.gz "deb/csi-registrar_$VERSION.orig.tar.gz"
cd deb/csi-registrar-*/
cp packaging/rpm/csi-registrar.spec packaging/rpm/rpmlint.toml /build/
cp -r packaging/debian debian
[ "$(dpkg-parsechangelog --show-field Version)" = "$VERSION-1" ]
dpkg-buildpackage -us -uc
cd /build
# For another architecture.
make -n -C deb/csi-registrar-[0-9]*/ -f debian/rules build-arch DEB_HOST_ARCH=armhf | grep -F 'scripts/build arm '
rpmspec --parse --target aarch64 csi-registrar.spec | grep -F 'goarch=$(echo aarch64'
rpmbuild -ba --nodeps --define '_topdir /build/rpm' --define '_sourcedir /build' csi-registrar.spec
lintian --allow-root --no-cfg --profile debian --fail-on error,warning deb/*.changes
rpmlint --strict --config rpmlint.toml csi-registrar.spec rpm/RPMS/*/*.rpm rpm/SRPMS/*.rpm
mkdir built
mv deb/*.deb rpm/RPMS/*/*.rpm built/
`

// listPackages prints what the deb and the rpm in the directory $1 have: files with their modes,
// owners, kinds and contents, scripts, relations and texts. Left out is what must differ: a package
// of a distribution has a revision and a changelog of its own, a program that was built from
// vendored modules does not have their sums, and rpmbuild adds requirements.
const listPackages = `cd "$1"
deb=$(ls csi-registrar_*.deb) rpm=$(ls csi-registrar-*.rpm)
dpkg-deb --raw-extract "$deb" deb
dpkg-deb --contents "$deb" | awk '$6 != "./" && !/changelog.Debian/ { print "deb file", $1, $2, $6, $7, $8 }'
for field in Package Architecture Maintainer Depends Section Priority Homepage Description; do
	echo "deb $field: $(dpkg-deb --field "$deb" $field)"
done
for script in conffiles preinst postinst prerm postrm; do
	sed "s/^/deb $script: /" "deb/DEBIAN/$script"
done
rm -r deb/DEBIAN
rpm --query --package --queryformat '[rpm file %{FILEMODES:perms} %{FILEUSERNAME} %{FILEGROUPNAME} %{FILENAMES} %{FILELINKTOS} %{FILEFLAGS:fflags}\n]' "$rpm"
rpm --query --package --queryformat 'rpm %{NAME} %{VERSION} %{ARCH} %{URL} %{LICENSE} %{SUMMARY}\n' "$rpm"
rpm --query --package --requires "$rpm" | grep -v -e '^rpmlib(' -e '^config(' -e '^/bin/sh$' | sed 's/^/rpm requires /'
rpm --query --package --scripts "$rpm" | sed 's/^/rpm script: /'
mkdir rpm
cd rpm
rpm2cpio "../$rpm" | cpio --quiet -id --no-absolute-filenames 2>../log
cd ..
find deb rpm -type f ! -name 'changelog*.gz' ! -path '*/bin/csi-registrar' -exec sha256sum {} +
for program in */usr/bin/csi-registrar; do
	go version -m "$program" | awk '$1 == "mod" || $1 == "dep" { $4 = "" } NR > 1'
done
`

// TestSourcePackages builds a deb and an rpm from the source with the files for distributions, in a
// root without network. They are those of scripts/packages, and lintian and rpmlint report nothing.
func TestSourcePackages(t *testing.T) {
	t.Parallel()
	m := nspawn.New(t, "trixie-build") // stays off
	dir := t.TempDir()
	run := func(script string, args ...string) string {
		t.Helper()
		cmd := exec.Command("sh", append([]string{"-euc", script, "sh"}, args...)...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
		return string(out)
	}
	copySource(t, dir)
	run("source/scripts/need rpm rpm2cpio cpio")
	version := strings.TrimSpace(run("source/scripts/version"))
	run(`mkdir "$1/build"
		source/scripts/tarball "$1/build"
		cp -a "$(go env GOROOT)" "$1/usr/local/go"
		ln -s /usr/local/go/bin/go "$1/usr/bin/go"`, m.Disk)
	t.Log(run(`exec unshare --net --mount sh -euc 'for dir in /proc /dev; do mount --rbind "$dir" "$0$dir"; done
		exec env -i PATH=/usr/sbin:/usr/bin LC_ALL=C.UTF-8 HOME=/nonexistent GOCACHE=/build/cache "VERSION=$1" chroot "$0" sh -euc "$2"' "$@"`, m.Disk, version, buildSource))

	run(`cd source; DIST=../dist ARCHS=$1 FORMATS=deb,rpm scripts/packages csi-registrar`, runtime.GOARCH)
	list := func(dir string) []string {
		text := run(listPackages, dir)
		return slices.Sorted(strings.Lines(text))
	}
	got, want := list(m.Path("/build/built")), list(filepath.Join(dir, "dist"))
	for _, line := range got {
		if !slices.Contains(want, line) {
			t.Errorf("only from the source: %q", line)
		}
	}
	for _, line := range want {
		if !slices.Contains(got, line) {
			t.Errorf("only of scripts/packages: %q", line)
		}
	}
	if len(want) < 500 {
		t.Errorf("the list has only %d lines", len(want))
	}
}
