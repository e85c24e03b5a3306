package packaging

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/pages"
)

// reader types the commands of the pages on a node.
type reader struct {
	*node
	// test is the name of the test, as in pages.Typed.
	test string
	// dir is the directory in which the commands are typed.
	dir string
	// words are what the pages leave to the reader, such as the address of the repository.
	words *strings.Replacer
	// tool is the package manager of the system; the commands of others are left out.
	tool  string
	typed map[string]bool
}

func newReader(n *node, test string) *reader {
	return &reader{node: n, test: test, dir: "/root", words: strings.NewReplacer(), tool: "apt", typed: map[string]bool{}}
}

// blocks returns the code blocks of a section.
func (r *reader) blocks(page, section string) (all []pages.Block) {
	r.t.Helper()
	file := filepath.Join("packaging", "doc", page)
	if page == "README.md" {
		file = page
	}
	found, err := pages.Read(built.Root(r.t), file)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, b := range found {
		if b.Section == section {
			all = append(all, b)
		}
	}
	place := page + "#" + section
	if len(all) == 0 || pages.Typed[place] != r.test {
		r.t.Fatalf("%s has %d blocks, and is typed by %q", place, len(all), pages.Typed[place])
	}
	r.typed[place] = true
	return all
}

// types types the commands of a section and writes its files, and returns all output. Commands that
// contain one of the words in failing fail, the others succeed.
func (r *reader) types(page, section string, failing ...string) (output string) {
	r.t.Helper()
	for _, b := range r.blocks(page, section) {
		for _, f := range b.Files() {
			r.writes(f)
		}
		for _, c := range b.Commands() {
			if _, left := pages.Listed(page+"#"+section, c.Text); !left && !r.otherTool(c.Text) {
				output += r.enters(page+"#"+section, c, failing...)
			}
		}
	}
	return output
}

// otherTool reports whether a command is for another package manager.
func (r *reader) otherTool(text string) bool {
	tool, _, _ := strings.Cut(text, " ")
	return (tool == "apt" || tool == "dnf" || tool == "zypper") && tool != r.tool
}

// enters types one command, says yes to its questions, and returns its output.
func (r *reader) enters(place string, c pages.Command, failing ...string) string {
	r.t.Helper()
	text := r.words.Replace(c.Text)
	fails := slices.ContainsFunc(failing, func(word string) bool { return strings.Contains(c.Text, word) })
	var out string
	r.Eventually(limit, "the result of "+text, func() (err error) {
		out, err = r.Try("bash", "-c", "export DEBIAN_FRONTEND=noninteractive; cd "+r.dir+"; yes | {\n"+text+"\n}")
		r.t.Logf("%s: %s\n%s", place, text, out)
		if fails && err == nil { // the daemon asks a driver at its new socket only after a reload
			return errors.New("it succeeds")
		}
		if !fails && err != nil {
			r.t.Errorf("%s: %s: %v\n%s", place, text, err, out)
		}
		return nil
	})
	if c.Output != "" && shown(out) != shown(c.Output) {
		r.t.Errorf("%s: %s shows\n%s\nand the page\n%s", place, text, out, c.Output)
	}
	return out
}

// writes writes a file of a page, or makes the drop-in with `systemctl edit`.
func (r *reader) writes(f pages.File) {
	r.t.Helper()
	name, content := f.Name, r.words.Replace(f.Content)
	if unit, edited := strings.CutPrefix(name, "systemctl edit "); edited {
		r.Write("/opt/typed", content)
		// an editor needs a terminal
		r.Run("sh", "-c", "systemctl edit --stdin --drop-in=override.conf "+unit+" </opt/typed")
		return
	}
	if strings.HasPrefix(name, "/etc/apt/") && r.tool != "apt" || strings.HasPrefix(name, "/etc/yum.repos.d/") && r.tool != "dnf" {
		return
	}
	if !filepath.IsAbs(name) { // a unit
		name = filepath.Join("/etc/systemd/system", name)
	}
	r.Write(name, content)
}

// finished checks that every section of the test was typed.
func (r *reader) finished() {
	r.t.Helper()
	for place, test := range pages.Typed {
		if test == r.test && !r.typed[place] {
			r.t.Errorf("%s was not typed", place)
		}
	}
}

var differing = regexp.MustCompile(`([0-9]+(ms|s|m|h|d))+\b|\(pid [0-9]+\)|\b20[0-9]{6}T[0-9]{6}Z\b`)

// shown returns an output without what differs from run to run.
func shown(output string) string {
	lines := strings.Split(strings.TrimSpace(output), "\n")
	for i, line := range lines {
		lines[i] = strings.Join(strings.Fields(differing.ReplaceAllString(line, "N")), " ")
	}
	return strings.Join(lines, "\n")
}

// TestTutorial types the commands of tutorial.md on a node, and compares what it shows.
func TestTutorial(t *testing.T) {
	t.Parallel()
	for _, suite := range []string{"bookworm", "trixie"} {
		t.Run(suite, func(t *testing.T) {
			n := newNode(t, suite)
			n.Boot()
			n.kubelet()
			for _, name := range []string{"csi-registrar", "csi-sample-driver"} {
				n.Run("cp", n.file("deb", name, newer), "/root/")
			}
			r := newReader(n, "TestTutorial")
			r.types("tutorial.md", "Install both")
			r.types("tutorial.md", "Restart csi-registrar")
			r.types("tutorial.md", "Break it", " status", " doctor")
			r.types("tutorial.md", "Repair it")
			r.types("tutorial.md", "Remove everything")
			r.finished()
			n.eventually(1, 1)
			if left := n.ours(); len(left) > 0 {
				t.Errorf("what is left: %q", left)
			}
		})
	}
}

const nfs = "nfs.csi.k8s.io"

// TestHowTos types the commands of the other pages on one node, in the order in which somebody
// would who installs csi-registrar for the NFS driver, upgrades and removes it: with apt, then with
// dnf. The sample driver is in the place of the NFS driver.
func TestHowTos(t *testing.T) {
	n := newNode(t, "trixie-tools")
	p := newPublished(t)
	for path, program := range map[string]string{"/usr/local/bin/nfsplugin": built.Command(t, "upstream"), "/usr/bin/csi-sample-driver": built.SampleDriver(t)} {
		n.copyIn(program, path, 0o755)
	}
	// In the place of programs that ask a cluster or another machine.
	for name, script := range map[string]string{"helm": "cat manifest.yaml", "kubectl": "cat manifest.yaml", "ssh": `shift; exec sh -c "$*"`} {
		n.WriteMode("/usr/bin/"+name, "#!/bin/sh\n"+script+"\n", 0o755)
	}
	n.Write("/etc/apt/sources.list", "")
	n.Write("/opt/systemd.spec", systemdSpec)
	n.Write("/etc/dnf/vars/releasever", "1\n") // Debian's dnf knows none
	// Without a terminal dnf imports no key, whatever is typed.
	n.Write("/etc/dnf/dnf.conf", "[main]\ngpgcheck=True\nassumeyes=True\n")
	n.Boot()
	n.kubelet()
	n.serve(p.newer)
	n.Run("rpmbuild", "--quiet", "--define", "_topdir /opt/rpmbuild", "-bb", "/opt/systemd.spec")

	r := newReader(n, "TestHowTos")
	r.words = strings.NewReplacer("URL", "http://"+address, "VERSION", older, "ROOT", "", "DRIVER", nfs)
	n.Run("mkdir", "/root/dist")
	n.Run("cp", n.file("deb", "csi-registrar", newer), n.file("rpm", "csi-registrar", newer), "/root/dist/")

	r.types("install.md", "Packages that you built")
	r.dir = "/usr/share/doc/csi-registrar/examples/nfs"
	r.types("drivers.md", "A native unit")
	r.dir = "/root"
	r.types("configure.md", "")
	r.types("README.md", "Use it")
	r.types("troubleshooting.md", "")
	r.imports()
	n.Write("/root/wave", "worker-1\n")
	if out := r.types("rollout.md", "Waves"); strings.Contains(out, "stop:") {
		t.Errorf("the wave stopped:\n%s", out)
	}
	r.measures()
	if out := r.types("readiness.md", "With the Node Readiness Controller"); !strings.Contains(out, "ok\n") {
		t.Errorf("/readyz says\n%s", out)
	}
	r.types("bugreport.md", "")
	r.types("nodes.md", "Root directory")
	r.types("images.md", "Read-only /usr, empty /etc")
	r.packs()
	r.traces()

	n.Run("curl", "-fsSLo", "/usr/share/keyrings/csi-registrar-archive-keyring.asc", "http://"+address+"/csi-registrar-archive-keyring.asc")
	r.types("install.md", "From a repository")
	// with the file that the page shows
	n.Run("sh", "-ec", "rm -rf /var/lib/apt/lists/*; apt-get update")
	r.updates(true)

	n.Run("dpkg", "--purge", "csi-registrar")
	n.Run("rm", "/usr/lib/csi-registrar/conf.d/20-nfs.toml")
	n.Run("rpm", "-i", "/opt/rpmbuild/RPMS/noarch/systemd-257-1.noarch.rpm")
	r.tool = "dnf"
	r.types("install.md", "Packages that you built")
	r.types("install.md", "From a repository")
	r.updates(false)
	r.finished()
}

// imports runs the commands of from-the-sidecar.md, each in a new directory with the manifests of
// the NFS driver in it.
func (r *reader) imports() {
	r.t.Helper()
	driver, set := manifests(r.t, filepath.Join(built.Root(r.t), "packaging/examples/nfs/daemonset.yaml"))
	registered(set, "/var/lib/kubelet/plugins/csi-nfsplugin")
	files := map[string]string{}
	for file, object := range map[string]any{"csi-nfs-driverinfo.yaml": driver, "csi-nfs-node.yaml": set} {
		b, err := json.Marshal(object)
		if err != nil {
			r.t.Fatal(err)
		}
		files[file] = string(b)
		files["manifest.yaml"] += string(b) + "\n---\n"
	}
	defer func(dir string) { r.dir = dir }(r.dir)
	r.dir = "/root/import"
	for _, b := range r.blocks("from-the-sidecar.md", "") {
		for _, c := range b.Commands() {
			r.Run("rm", "-rf", r.dir)
			for file, content := range files {
				r.Write(filepath.Join(r.dir, file), content)
			}
			r.enters("from-the-sidecar.md#", c)
			if out := r.Run("sh", "-c", "cat "+r.dir+"/*.toml "+r.dir+"/conf.d/*.toml || true"); !strings.Contains(out, `[driver."`+nfs+`"]`) {
				r.t.Errorf("%s wrote\n%s", c.Text, out)
			}
		}
	}
}

// measures reads the metrics as monitoring.md says.
func (r *reader) measures() {
	r.t.Helper()
	const up = `csi_registrar_driver_up{driver="` + nfs + `"} 1` + "\n"
	if out := r.types("monitoring.md", ""); !strings.Contains(out, up) {
		r.t.Errorf("the metrics are\n%s", out)
	}
	// the package of node_exporter makes it
	r.Run("mkdir", "-p", "/var/lib/prometheus/node-exporter")
	r.types("monitoring.md", "With node_exporter's textfile collector")
	r.Run("systemctl", "start", "csi-registrar-textfile.service")
	if out := r.Read("/var/lib/prometheus/node-exporter/csi-registrar.prom"); !strings.Contains(out, up) {
		r.t.Errorf("the timer's file is\n%s", out)
	}
}

// packs replaces the native unit by a driver that is packaged as drivers.md says, and supervises
// it.
func (r *reader) packs() {
	r.t.Helper()
	r.Run("systemctl", "disable", "--now", "csi-nfs.service")
	r.Run("rm", "/etc/systemd/system/csi-nfs.service", "/etc/csi-registrar/conf.d/60-nfs.toml")
	r.Write("/usr/lib/systemd/system/csi-nfs.service", `[Service]
RuntimeDirectory=csi-nfs
ExecStart=/usr/local/bin/nfsplugin --endpoint=unix:///run/csi-nfs/csi.sock --nodeid=worker-1
`)
	r.types("drivers.md", "Packaging a driver")
	r.Run("systemctl", "daemon-reload")
	r.types("drivers.md", "Supervised")
	r.Run("systemctl", "restart", "csi-nfs.service")
	if out := r.Run("systemctl", "show", "--property=WatchdogUSec", "csi-nfs.service"); out != "WatchdogUSec=1min\n" {
		r.t.Errorf("the unit has %s", out)
	}
	r.isRegistered("/run/csi-nfs/csi.sock")
}

// isRegistered waits until the driver is registered with an endpoint.
func (r *reader) isRegistered(endpoint string) {
	r.t.Helper()
	r.Eventually(limit, "the driver to be registered with "+endpoint, func() error {
		out, err := r.Try("csi-registrar", "status", "--json", nfs)
		var status struct {
			Drivers []struct{ State, Endpoint string }
		}
		if err != nil || json.Unmarshal([]byte(out), &status) != nil || status.Drivers[0].Endpoint != endpoint {
			return fmt.Errorf("%v: %s", err, out)
		}
		return nil
	})
}

// traces records the kubelet's calls as trace.md says. Its first command runs until Ctrl-C.
func (r *reader) traces() {
	r.t.Helper()
	const place = "trace.md#The calls of the kubelet"
	var all []pages.Command
	for _, b := range r.blocks("trace.md", "The calls of the kubelet") {
		all = append(all, b.Commands()...)
	}
	if len(all) != 4 {
		r.t.Fatalf("%s has %d commands", place, len(all))
	}
	recorder := r.Start("sh", "-c", "cd "+r.dir+" && exec "+all[0].Text)
	r.Eventually(limit, "the recorder's socket", func() error {
		_, err := os.Stat(r.Path("/run/csi-nfs/trace.sock"))
		return err
	})
	r.enters(place, all[1])
	r.enters(place, all[2])
	r.isRegistered("/run/csi-nfs/trace.sock")
	r.enters(place, all[3])
	r.isRegistered("/run/csi-nfs/csi.sock")
	r.Run("pkill", "--signal", "INT", "--full", "^csi-registrar trace")
	if err := recorder.Wait(); err != nil {
		r.t.Errorf("%s: %v", all[0].Text, err)
	}
	r.Run("test", "-f", r.dir+"/calls.json")
}

// updates goes back to the older version and uninstalls it.
func (r *reader) updates(registered bool) {
	r.t.Helper()
	r.types("install.md", "Upgrade")
	if out := r.Run("csi-registrar", "version"); !strings.Contains(out, older) {
		r.t.Errorf("the version is %s, want %s", out, older)
	}
	if registered {
		r.isRegistered("/run/csi-nfs/csi.sock")
	}
	r.types("install.md", "Uninstall")
	if out, err := r.Try("sh", "-c", "command -v csi-registrar || ls /var/lib/kubelet/plugins_registry/*"); err == nil {
		r.t.Errorf("what is left: %s", out)
	}
}
