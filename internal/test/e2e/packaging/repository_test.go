package packaging

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/system/nspawn"
)

// address is the address of the repository in each machine, on its own loopback interface.
const address = "127.0.0.1:8080"

// keyOwner is the name of the key that signs.
const keyOwner = "repository@example.com"

// publish runs scripts/repository.
func publish(gnupg, dist, dir string) ([]byte, error) {
	root, err := filepath.Abs("../../../..")
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("scripts/repository", dir)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "GNUPGHOME="+gnupg, "KEY="+keyOwner, "BASE_URL=http://"+address, "DIST="+dist, "KEYRING_VERSION="+older)
	return cmd.CombinedOutput()
}

// newKey makes a directory for gpg with one key in it.
func newKey(dir string) (gnupg string, err error) {
	if gnupg, err = os.MkdirTemp(dir, "gpg"); err != nil {
		return "", err
	}
	cmd := exec.Command("gpg", "--batch", "--quiet", "--passphrase", "", "--quick-gen-key", keyOwner, "rsa2048", "sign", "never")
	cmd.Env = append(os.Environ(), "GNUPGHOME="+gnupg)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("gpg: %w\n%s", err, out)
	}
	return gnupg, nil
}

// endKey ends the agent that gpg started.
func endKey(gnupg string) {
	cmd := exec.Command("gpgconf", "--kill", "gpg-agent")
	cmd.Env = append(os.Environ(), "GNUPGHOME="+gnupg)
	_ = cmd.Run() // there may be no agent
}

// published is the output of scripts/repository.
type published struct {
	gnupg string
	older string // the repositories with the older version
	newer string // the same when the newer version was added
}

// repositories is made once, next to the packages, which are removed when the tests end.
var repositories = sync.OnceValues(func() (published, error) {
	dist, err := packages()
	if err != nil {
		return published{}, err
	}
	gnupg, err := newKey(dist)
	if err != nil {
		return published{}, err
	}
	defer endKey(gnupg)
	p := published{gnupg, filepath.Join(dist, "repository-older"), filepath.Join(dist, "repository")}
	for _, version := range []string{older, newer} {
		// A directory with the packages of this version only.
		only := filepath.Join(dist, version)
		script := `mkdir "$0" && ln "$1"/*[-_]"$2"[-_]*.deb "$1"/*[-_]"$2"[-_]*.rpm "$0"`
		if out, err := exec.Command("sh", "-c", script, only, dist, version).CombinedOutput(); err != nil {
			return p, fmt.Errorf("cannot link the packages: %w\n%s", err, out)
		}
		if out, err := publish(gnupg, only, p.newer); err != nil {
			return p, fmt.Errorf("scripts/repository: %w\n%s", err, out)
		}
		if version == older {
			if out, err := exec.Command("cp", "-a", p.newer, p.older).CombinedOutput(); err != nil {
				return p, fmt.Errorf("cp: %w\n%s", err, out)
			}
		}
	}
	return p, nil
})

// newPublished returns the repositories for a test.
func newPublished(t *testing.T) published {
	t.Helper()
	nspawn.Root(t, "trixie") // skips before anything is built
	made.Store(true)
	p, err := repositories()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// host serves a repository to one machine.
type host struct {
	dir    atomic.Value // string
	change atomic.Value // func(path string, content []byte) []byte; nil for a missing file
	byHash atomic.Int32
}

func unchanged(_ string, content []byte) []byte { return content }

func (h *host) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if strings.Contains(r.URL.Path, "/by-hash/") {
		h.byHash.Add(1)
	}
	content, err := os.ReadFile(filepath.Join(h.dir.Load().(string), filepath.Clean(r.URL.Path)))
	if err == nil {
		content = h.change.Load().(func(string, []byte) []byte)(r.URL.Path, content)
	}
	if content == nil {
		http.NotFound(w, r)
		return
	}
	_, _ = w.Write(content) // the client may have disconnected
}

// serve serves dir at address in the machine, which only has a loopback interface.
func (n *node) serve(dir string) *host {
	n.t.Helper()
	ns, err := os.Open(n.Path("/proc/1/ns/net"))
	if err != nil {
		n.t.Fatal(err)
	}
	defer ns.Close()
	type result struct {
		net.Listener
		error
	}
	listening := make(chan result)
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			listening <- result{nil, err}
			return
		}
		l, err := net.Listen("tcp", address)
		listening <- result{l, err}
	}()
	r := <-listening
	if r.error != nil {
		n.t.Fatalf("cannot listen in the machine: %v", r.error)
	}
	h := &host{}
	h.dir.Store(dir)
	h.change.Store(unchanged)
	server := &http.Server{Handler: h}
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(r.Listener) }()
	n.t.Cleanup(func() { server.Close(); <-done })
	return h
}

// tampering is a change of the contents of a repository, which must be refused.
type tampering struct {
	name string
	what string // files whose path matches this expression …
	in   string // … have a byte changed after this; "" is the middle
	gone string // files whose path matches this are missing
	ok   bool   // it is accepted: the others are only refused because of the change
}

// apply makes the host change what it serves, and returns the number of changed answers.
func (tamper tampering) apply(h *host) *atomic.Int32 {
	changed := &atomic.Int32{}
	match := func(expression, path string) bool {
		return expression != "" && regexp.MustCompile(expression).MatchString(path)
	}
	h.change.Store(func(path string, content []byte) []byte {
		switch {
		case match(tamper.gone, path):
			content = nil
		case match(tamper.what, path) && tamper.in != "":
			// Not at the start: a signature starts with its type and date, and ends with a
			// checksum.
			content[bytes.Index(content, []byte(tamper.in))+len(tamper.in)+100] ^= 1
		case match(tamper.what, path):
			content[len(content)/2] ^= 1
		default:
			return content
		}
		changed.Add(1)
		return content
	})
	return changed
}

// refused checks that each tampering is refused. try downloads everything again and installs it.
func (n *node) refused(h *host, all []tampering, try ...string) {
	n.t.Helper()
	for _, tamper := range append([]tampering{{name: "nothing", ok: true}}, all...) {
		changed := tamper.apply(h)
		out, err := n.Try(try...)
		if (err == nil) != tamper.ok {
			n.t.Errorf("%s was changed: installed is %t\n%s", tamper.name, err == nil, out)
		}
		if changed.Load() == 0 && tamper.name != "nothing" {
			n.t.Errorf("%s: nobody asked for what was changed\n%s", tamper.name, out)
		}
	}
	h.change.Store(unchanged)
}

// signature is the text before a signature, in a file of its own or with other content.
const signature = "BEGIN PGP SIGNATURE"

// TestApt installs from the signed repository with the commands of packaging/doc/install.md.
func TestApt(t *testing.T) {
	t.Parallel()
	for _, suite := range suites {
		t.Run(suite, func(t *testing.T) {
			n := newNode(t, suite)
			p := newPublished(t)
			n.Write("/etc/apt/sources.list", "")
			n.copyIn(filepath.Join(p.older, "csi-registrar-archive-keyring.deb"), "/opt/csi-registrar-archive-keyring.deb", 0o644)
			n.Boot()
			n.kubelet()
			h := n.serve(p.older)
			sh := func(script string) { n.Run("sh", "-ec", script) }

			sh("apt-get install -y /opt/csi-registrar-archive-keyring.deb")
			sh("apt-get update && apt-get install -y csi-registrar csi-sample-driver")
			n.eventually(1, 0)
			if h.byHash.Load() == 0 {
				t.Error("apt did not ask for an index by its hash")
			}
			n.unnoticed(older, func() { sh("apt-get install -y --reinstall csi-registrar") })
			h.dir.Store(p.newer)
			n.unnoticed(newer, func() { sh("apt-get update && apt-get upgrade -y") })
			n.unnoticed(older, func() { sh("apt-get install -y --allow-downgrades csi-registrar=" + older) })
			pid, inode := n.process()

			n.refused(h, []tampering{
				{name: "a package", what: "/pool/csi-registrar_"},
				{name: "the index of packages", what: "/main/binary-"},
				{name: "InRelease", what: "/InRelease$", in: "SHA256:"},
				{name: "the signature in InRelease", what: "/InRelease$", in: signature},
				// Release and Release.gpg are sufficient.
				{name: "no InRelease", gone: "/InRelease$", ok: true},
				{name: "Release", gone: "/InRelease$", what: "/Release$", in: "SHA256:"},
				{name: "Release.gpg", gone: "/InRelease$", what: "/Release.gpg$", in: signature},
				{name: "no signature", gone: "/(InRelease|Release.gpg)$"},
			}, "sh", "-ec", `rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb
				apt-get update && apt-get install -y --reinstall --download-only csi-registrar`)

			if pid2, inode2 := n.process(); pid2 != pid || inode2 != inode {
				t.Error("what was refused did something to the daemon")
			}
		})
	}
}

// systemdSpec is a package that has the name of the one that csi-registrar's requires.
const systemdSpec = "Name: systemd\nVersion: 257\nRelease: 1\nSummary: -\nLicense: -\nBuildArch: noarch\n%description\n%files\n"

// TestDnf does the same with Debian's dnf. The package that it installs requires an rpm of systemd.
func TestDnf(t *testing.T) {
	n := newNode(t, "trixie-tools")
	p := newPublished(t)
	n.Write("/etc/systemd/system-preset/50-drivers.preset", "enable csi-sample-driver.service\n")
	n.Write("/opt/systemd.spec", systemdSpec)
	n.Boot()
	n.kubelet()
	h := n.serve(p.older)
	dnf := func(args ...string) { n.Run(append([]string{"dnf", "--assumeyes", "--releasever=1"}, args...)...) }
	n.Run("rpmbuild", "--quiet", "--define", "_topdir /opt/rpmbuild", "-bb", "/opt/systemd.spec")
	n.Run("sh", "-c", "rpm -i /opt/rpmbuild/RPMS/noarch/systemd-*.rpm")

	dnf("install", "http://"+address+"/csi-registrar-archive-keyring.rpm")
	dnf("install", "csi-registrar", "csi-sample-driver")
	n.eventually(1, 0)
	h.dir.Store(p.newer)
	n.unnoticed(newer, func() { dnf("upgrade", "--refresh") })
	n.unnoticed(older, func() { dnf("downgrade", "csi-registrar-"+older) })
	pid, inode := n.process()

	n.refused(h, []tampering{
		{name: "a package", what: "/csi-registrar-" + older},
		{name: "the index of packages", what: "-primary.xml"},
		{name: "repomd.xml", what: "/repomd.xml$", in: "<revision>"},
		{name: "the signature of repomd.xml", what: "/repomd.xml.asc$", in: signature},
		{name: "no signature", gone: "/repomd.xml.asc$"},
	}, "sh", "-ec", "dnf clean all; dnf --assumeyes --releasever=1 reinstall --downloadonly csi-registrar")

	if pid2, inode2 := n.process(); pid2 != pid || inode2 != inode {
		t.Error("what was refused did something to the daemon")
	}
}

// TestPublish checks that incorrect packages are not published, and that published ones stay
// unchanged.
func TestPublish(t *testing.T) {
	t.Parallel()
	p := newPublished(t)
	t.Cleanup(func() { endKey(p.gnupg) })
	run := func(name string, args ...string) {
		t.Helper()
		if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s %q: %v\n%s", name, args, err, out)
		}
	}
	deb, rpm := "csi-registrar_*_*.deb", "csi-registrar-"+newer+"-1.*.rpm"
	for name, c := range map[string]struct{ script, want string }{
		// The package has a later version than its program.
		"wrong program": {`dpkg-deb -R csi-registrar_*.deb x && rm *.deb && sed -i "s/^Version: .*/Version: 9.9.9/" x/DEBIAN/control &&
			dpkg-deb -Znone -b x csi-registrar_9.9.9_$(dpkg --print-architecture).deb`, "wrong version"},
		"other contents": {`dpkg-deb -R csi-registrar_*.deb x && echo >>x/usr/share/doc/csi-registrar/README.md && rm *.deb &&
			dpkg-deb -Znone -b x csi-registrar_` + newer + `_$(dpkg --print-architecture).deb`, "published with other contents"},
		"no rpm": {"rm *.rpm", "there is no rpm"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			dist, repository := filepath.Join(dir, "dist"), filepath.Join(dir, "repository")
			run("sh", "-ec", `mkdir "$0"; cp "$1"/`+deb+` "$1"/`+rpm+` "$0"; cp -a "$2" "$3"; cd "$0"; `+c.script, dist, filepath.Join(filepath.Dir(p.newer), newer), p.newer, repository)
			out, err := publish(p.gnupg, dist, repository)
			if err == nil || !bytes.Contains(out, []byte(c.want)) {
				t.Errorf("%v, want %q in\n%s", err, c.want, out)
			}
			run("diff", "-r", p.newer, repository)
			if left, err := filepath.Glob(repository + ".*"); err != nil || left != nil {
				t.Errorf("it left %q %v", left, err)
			}
		})
	}
}

// TestRepositoryLint checks the package with the keys like the others.
func TestRepositoryLint(t *testing.T) {
	t.Parallel()
	p := newPublished(t)
	dir := t.TempDir()
	for _, pattern := range []string{"deb/pool/csi-registrar-archive-keyring_*.deb", "rpm/csi-registrar-archive-keyring-*.rpm"} {
		path := only(t, filepath.Join(p.newer, pattern))
		if err := os.Link(path, filepath.Join(dir, filepath.Base(path))); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("scripts/packages-lint", dir)
	cmd.Dir = built.Root(t)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("scripts/packages-lint: %v\n%s", err, out)
	}
}
