package importer

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/sys/safetext"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func manifest(t *testing.T, file string) File {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return File{Name: filepath.Base(file), Data: data}
}

func glob(t *testing.T, pattern string) []string {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("%s: %d files, %v", pattern, len(files), err)
	}
	return files
}

func golden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (run with -update and look at the difference). Got:\n%s", file, got)
	}
}

// Each manifest gives the drop-in beside it, the loader of the daemon reads what was meant, and the
// workloads are as in the file .after when the instructions were followed. MANIFESTS=DIR tests the
// manifests in another directory; with -update it writes these files there.
func TestImport(t *testing.T) {
	for _, file := range glob(t, filepath.Join(cmp.Or(os.Getenv("MANIFESTS"), "testdata/good"), "*.yaml")) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			res := Import([]File{manifest(t, file)}, nil)
			var b strings.Builder
			for _, n := range res.Notes {
				fmt.Fprintf(&b, "# note: %s\n", n)
			}
			for _, r := range res.Refused {
				t.Errorf("refused: %+v", r)
			}
			b.WriteString(DropIn(res.Registrars, res.Edits))
			checkLoads(t, res.Registrars, b.String())
			golden(t, strings.TrimSuffix(file, "yaml")+"toml", b.String())
			checkApplied(t, manifest(t, file), res)
			golden(t, strings.TrimSuffix(file, "yaml")+"after", string(apply(t, manifest(t, file), res.Edits)))
		})
	}
}

func checkLoads(t *testing.T, rs []Registrar, dropIn string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "60-x.toml")
	if err := os.WriteFile(file, []byte(dropIn), 0o600); err != nil {
		t.Fatal(err)
	}
	res := config.Load(config.Source{File: file})
	if len(res.Errors) > 0 {
		t.Fatalf("%v\n%s", res.Errors, dropIn)
	}
	var want []config.Driver
	for _, r := range rs {
		want = append(want, r.Driver)
		if res.Config.Kubelet.RootDir != r.RootDir {
			t.Errorf("loaded root_dir %s, want %s", res.Config.Kubelet.RootDir, r.RootDir)
		}
	}
	if !slices.EqualFunc(res.Config.Drivers, want, config.Driver.Equal) {
		t.Errorf("loaded %+v\nwant   %+v", res.Config.Drivers, want)
	}
}

// A manifest that lacks something is refused, with the reason.
func TestRefusals(t *testing.T) {
	var b strings.Builder
	for _, file := range glob(t, "testdata/bad/*.yaml") {
		res := Import([]File{manifest(t, file)}, nil)
		if len(res.Refused) == 0 {
			t.Errorf("%s is not refused: %+v", file, res.Registrars)
		}
		for _, r := range res.Refused {
			fmt.Fprintf(&b, "%s: %s\n", r.Where, r.Reason)
			if r.Hint != "" {
				fmt.Fprintf(&b, "    hint: %s\n", r.Hint)
			}
			if strings.ContainsAny(r.Where+r.Reason+r.Hint, "\n\x1b\u202e") {
				t.Errorf("%s: more than one harmless line: %q", file, r)
			}
		}
	}
	golden(t, "testdata/bad/refusals.txt", b.String())
}

func names(given ...string) []GivenName {
	var out []GivenName
	for _, s := range given {
		out = append(out, ParseName(s))
	}
	return out
}

// drivers lists the names of what was imported.
func drivers(res Result) string {
	var out []string
	for _, r := range res.Registrars {
		out = append(out, r.Driver.Name)
	}
	return strings.Join(out, " ")
}

// The name is that of a flag of the driver, as published drivers have it.
func TestNameOfFlag(t *testing.T) {
	m := manifest(t, "testdata/bad/noname.yaml")
	for _, flag := range []string{
		"--drivername", "--driver-name", "--driver_name", "--csi-driver-name", // most
		"--driverName",           // SeaweedFS
		"--csi-name",             // democratic-csi
		"--override-driver-name", // Baidu
	} {
		data := strings.Replace(string(m.Data), "args: []", "args: ["+flag+"=x.example.com]", 1)
		if res := Import([]File{{Name: "x", Data: []byte(data)}}, nil); drivers(res) != "x.example.com" {
			t.Errorf("%s: %+v", flag, res)
		}
	}
}

func TestNameGivenByHand(t *testing.T) {
	noname := []File{manifest(t, "testdata/bad/noname.yaml")}
	ceph := []File{manifest(t, "testdata/good/ceph.yaml")}
	for _, test := range []struct {
		manifests []File
		names     []GivenName
		want      string
		refused   int
	}{
		{noname, names("mine.example.com"), "mine.example.com", 0},
		{noname, names("x=mine.example.com"), "mine.example.com", 0},
		{noname, names("kube-system/x=mine.example.com"), "mine.example.com", 0},
		{noname, names("kube-system/x:registrar=mine.example.com"), "mine.example.com", 0},
		{noname, names("a b"), "", 1},
		{noname, names("y=mine.example.com"), "", 2},
		{noname, names("x:other=mine.example.com"), "", 2},
		{ceph, names("mine.example.com"), "", 1},
		{ceph, names("csi-rbdplugin=mine.example.com"), "cephfs.csi.ceph.com mine.example.com", 0},
		{ceph, names("ceph/csi-cephfsplugin=a.example.com", "csi-rbdplugin=b.example.com"), "a.example.com b.example.com", 0},
	} {
		res := Import(test.manifests, test.names)
		if got := drivers(res); got != test.want || len(res.Refused) != test.refused {
			t.Errorf("%+v: imported %q, want %q; refused %+v", test.names, got, test.want, res.Refused)
		}
	}
}

// driverPod is a DaemonSet as small as it can be, with its socket in a directory.
func driverPod(name, dir string) string {
	return fmt.Sprintf(`---
kind: DaemonSet
metadata: {name: %s}
spec: {template: {spec: {
  volumes: [{name: k, hostPath: {path: /var/lib/kubelet}}, {name: s, hostPath: {path: /var/lib/kubelet/plugins/%s}}, {name: r, hostPath: {path: /var/lib/kubelet/plugins_registry}}],
  containers: [{name: driver, volumeMounts: [{name: s, mountPath: /csi}, {name: k, mountPath: /var/lib/kubelet, mountPropagation: Bidirectional}]},
    {name: registrar, image: node-driver-registrar, args: [--csi-address=/csi/csi.sock, --kubelet-registration-path=/var/lib/kubelet/plugins/%[2]s/csi.sock],
      volumeMounts: [{name: s, mountPath: /csi}, {name: r, mountPath: /registration}]}]}}}
`, name, dir)
}

func csiDriverObject(name string) string {
	return "---\nkind: CSIDriver\nmetadata: {name: " + name + "}\n"
}

// A CSIDriver object names a driver only if it cannot be that of another one.
func TestNameByElimination(t *testing.T) {
	for _, test := range []struct {
		name  string
		files []string
		want  string
	}{
		{"its own file", []string{driverPod("a", "a") + csiDriverObject("a.example.com"), driverPod("b", "b") + csiDriverObject("b.example.com")}, "a.example.com b.example.com"},
		{"a file of its own", []string{driverPod("a", "a"), csiDriverObject("x.example.com")}, "x.example.com"},
		{"one is left", []string{driverPod("a", "a.example.com") + driverPod("b", "b") + csiDriverObject("a.example.com") + csiDriverObject("b.example.com")}, "a.example.com b.example.com"},
		{"two could have it", []string{driverPod("a", "a") + driverPod("b", "b") + csiDriverObject("b.example.com")}, ""},
		{"two have two", []string{driverPod("a", "a") + driverPod("b", "b") + csiDriverObject("a.example.com") + csiDriverObject("b.example.com")}, ""},
		{"it belongs to another", []string{driverPod("a", "a") + driverPod("b", "b.example.com") + csiDriverObject("b.example.com")}, "b.example.com"},
		{"one directory, two architectures", []string{driverPod("a-amd64", "a") + driverPod("a-arm64", "a") + csiDriverObject("a.example.com")}, "a.example.com"},
		{"the directory's", []string{driverPod("a", "a.example.com") + csiDriverObject("a.example.com") + csiDriverObject("b.example.com")}, "a.example.com"},
	} {
		var ms []File
		for i, data := range test.files {
			ms = append(ms, File{Name: fmt.Sprint(i), Data: []byte(data)})
		}
		res := Import(ms, nil)
		if drivers(res) != test.want {
			t.Errorf("%s: got %q, want %q; refused %+v", test.name, drivers(res), test.want, res.Refused)
		}
		for _, r := range res.Refused {
			if !strings.HasPrefix(r.Reason, errName.Error()) {
				t.Errorf("%s: refused for another reason: %+v", test.name, r)
			}
		}
	}
}

// A volume that only the registrar mounts is removed, unless nothing else makes the directory of
// the driver's socket.
func TestVolumesOfTheRegistrar(t *testing.T) {
	const dir = "/var/lib/kubelet/plugins/a.example.com"
	for _, test := range []struct {
		name         string
		mine, others string // the registrar's volume, and one that the driver mounts
		address      string // of the socket in the registrar
		subPath      string
		mounted      []MountRef
	}{
		{"makes the directory", "path: " + dir + ", type: DirectoryOrCreate", "path: /var/lib/kubelet, type: Directory", "csi.sock", "", []MountRef{{"driver", "mine", socketDirMount, ""}}},
		{"made by the container runtime", "path: " + dir + "/", "path: /var/lib/kubelet", "csi.sock", "", []MountRef{{"driver", "mine", socketDirMount, ""}}},
		{"makes it with a subPath", "path: /srv/x", "path: /srv", "csi.sock", "a.example.com", []MountRef{{"driver", "mine", socketDirMount, "a.example.com"}}},
		{"makes its parent", "path: /srv/x", "path: /srv", "a.example.com/csi.sock", "", []MountRef{{"driver", "mine", socketDirMount, ""}}},
		{"must exist", "path: " + dir + ", type: Directory", "path: /var/lib/kubelet", "csi.sock", "", nil},
		{"made by the driver's volume as well", "path: " + dir, "path: " + dir + ", type: DirectoryOrCreate", "csi.sock", "", nil},
		{"not made by one that must exist", "path: " + dir, "path: " + dir + ", type: Directory", "csi.sock", "", []MountRef{{"driver", "mine", socketDirMount, ""}}},
		{"made by a volume below", "path: " + dir, "path: " + dir + "/data", "csi.sock", "", nil},
		{"made by the kubelet", "path: /var/lib/kubelet/plugins", "path: /var/lib/kubelet", "a.example.com/csi.sock", "", nil},
	} {
		m := File{Name: "x", Data: fmt.Appendf(nil, `
kind: DaemonSet
metadata: {name: a}
spec: {template: {spec: {
  volumes: [{name: mine, hostPath: {%s}}, {name: others, hostPath: {%s}}, {name: r, hostPath: {path: /var/lib/kubelet/plugins_registry}}],
  initContainers: [{name: prepare, args: [/x/csi.sock], volumeMounts: [{name: others, mountPath: /x}]}],
  containers: [{name: driver, args: [--drivername=a.example.com], volumeMounts: [{name: others, mountPath: /x}]},
    {name: registrar, image: node-driver-registrar, args: [--csi-address=/csi/%s, --kubelet-registration-path=%s/csi.sock],
      volumeMounts: [{name: mine, mountPath: /csi, subPath: "%s"}, {name: r, mountPath: /registration}]}]}}}
`, test.mine, test.others, test.address, dir, test.subPath)}
		res := Import([]File{m}, nil)
		if len(res.Edits) != 1 {
			t.Errorf("%s: %+v", test.name, res)
			continue
		}
		removed := []string{"mine", "r"}
		if test.mounted != nil {
			removed = removed[1:]
		}
		if e := res.Edits[0]; !slices.Equal(e.Mount, test.mounted) || !slices.Equal(e.Volumes, removed) {
			t.Errorf("%s: mount %+v, remove %q; want %+v, %q", test.name, e.Mount, e.Volumes, test.mounted, removed)
		}
	}
}

// A driver may have a DaemonSet for each architecture. The edits of each name its own containers.
func TestWorkloadsOfOneDriver(t *testing.T) {
	one := driverPod("one", "a.example.com")
	other := strings.NewReplacer("name: one", "name: other", "name: driver", "name: main", "name: registrar", "name: driver").Replace(one)
	res := Import([]File{{Name: "x", Data: []byte(one + other + csiDriverObject("a.example.com"))}}, nil)
	if len(res.Edits) != 2 {
		t.Fatalf("%+v", res)
	}
	for i, name := range []string{"registrar", "driver"} {
		if got := res.Edits[i].Containers; !slices.Equal(got, []ContainerRef{{"containers", name}}) {
			t.Errorf("%s: remove %+v, expected %s", res.Edits[i].Workload, got, name)
		}
	}
}

// The drop-in of one driver names only its own workloads.
func TestDropInOfOneOfTwoDrivers(t *testing.T) {
	res := Import([]File{{Name: "x", Data: []byte(driverPod("one", "a.example.com") + driverPod("two", "b.example.com") +
		csiDriverObject("a.example.com") + csiDriverObject("b.example.com"))}}, nil)
	if len(res.Registrars) != 2 {
		t.Fatalf("%+v", res)
	}
	if text := DropIn(res.Registrars[:1], res.Edits); !strings.Contains(text, "DaemonSet one\n") || strings.Contains(text, "two") {
		t.Error(text)
	}
}

// A container that only probes the driver has no use without it.
func TestWholeWorkload(t *testing.T) {
	const driver = "{name: driver, "
	for container, whole := range map[string]bool{driver: false, "{name: liveness-probe, ": true} {
		m := strings.Replace(driverPod("a", "a.example.com"), driver, container, 1) + csiDriverObject("a.example.com")
		res := Import([]File{{Name: "x", Data: []byte(m)}}, nil)
		if len(res.Edits) != 1 || res.Edits[0].Whole != whole {
			t.Errorf("%s: %+v", container, res)
		}
	}
}

// An object that another one made is not changed: its owner is.
func TestOwnedObjects(t *testing.T) {
	for kind, want := range map[string]string{"ReplicaSet": "", "DaemonSet": "a.example.com"} {
		m := strings.Replace(driverPod("a", "a.example.com"), "kind: DaemonSet\nmetadata: {name: a}",
			"kind: "+kind+"\nmetadata: {name: a, ownerReferences: [{kind: Deployment, name: a}]}", 1)
		if res := Import([]File{{Name: "x", Data: []byte(m + csiDriverObject("a.example.com"))}}, nil); drivers(res) != want {
			t.Errorf("%s: %+v", kind, res)
		}
	}
}

// Two manifests may have the same CSIDriver object, and only one of them the field.
func TestVolumeLimitThatTheKubeletUpdates(t *testing.T) {
	updates := csiDriverObject("a.example.com") + "spec: {nodeAllocatableUpdatePeriodSeconds: 60}\n"
	for _, objects := range []string{updates + csiDriverObject("a.example.com"), csiDriverObject("a.example.com") + updates} {
		res := Import([]File{{Name: "x", Data: []byte(driverPod("a", "a.example.com") + objects)}}, nil)
		if len(res.Registrars) != 1 || res.Registrars[0].Driver.WhenLimitChanges != config.Leave {
			t.Errorf("%+v", res)
		}
	}
}

// A subPath does not lead out of its volume.
func TestSubPathOutOfItsVolume(t *testing.T) {
	p := podSpec{Volumes: []volume{{Name: "v", HostPath: &hostPath{Path: "/srv/v"}}}}
	for sub, want := range map[string]string{"x": "/srv/v/x/s", "../../etc": "/srv/v/etc/s", "": "/srv/v/s"} {
		c := container{VolumeMounts: []volumeMount{{Name: "v", MountPath: "/csi", SubPath: sub}}}
		if got, err := p.hostPath(c, "/csi/s"); err != nil || got != want {
			t.Errorf("%q: %s, %v", sub, got, err)
		}
	}
}

// The socket of a driver has a path of at most 107 bytes.
func TestLongestSocket(t *testing.T) {
	for length, ok := range map[int]bool{107: true, 108: false} {
		if err := checkPath("/" + strings.Repeat("x", length-1)); (err == nil) != ok {
			t.Errorf("%d bytes: %v", length, err)
		}
	}
}

// Variables can double each other: all of a value is limited to 64 KiB.
func TestLongestValue(t *testing.T) {
	half := strings.Repeat("x", 30<<10)
	c := container{Env: []envVar{{Name: "A", Value: half}, {Name: "B", Value: "$(A)$(A)"}, {Name: "C", Value: "$(B)$(A)"}}}
	for value, ok := range map[string]bool{"$(B)": true, "$(C)": false, "$(A)$(A)$(A)": false} {
		if got, err := c.expand(value); (err == nil) != ok || ok && len(got) != 60<<10 {
			t.Errorf("%s: %d bytes, %v", value, len(got), err)
		}
	}
}

// One of the names that flags have is that of the directory.
func TestNameOfTwoFlags(t *testing.T) {
	m := strings.NewReplacer("{name: driver, ", "{name: driver, args: [--drivername=a.example.com], ",
		"containers: [", "containers: [{name: other, args: [--drivername=b.example.com]}, ").Replace(driverPod("a", "b.example.com"))
	if res := Import([]File{{Name: "x", Data: []byte(m)}}, nil); drivers(res) != "b.example.com" {
		t.Errorf("%+v", res)
	}
}

// A file is for one kubelet: that of the first driver.
func TestRootDirectories(t *testing.T) {
	elsewhere := strings.ReplaceAll(driverPod("c", "c.example.com")+csiDriverObject("c.example.com"), "/var/lib/kubelet", "/data/kubelet")
	rest := driverPod("a", "a.example.com") + driverPod("b", "b.example.com") + csiDriverObject("a.example.com") + csiDriverObject("b.example.com")
	for data, want := range map[string]string{elsewhere + rest: "c.example.com", rest + elsewhere: "a.example.com b.example.com"} {
		res := Import([]File{{Name: "x", Data: []byte(data)}}, nil)
		if drivers(res) != want || len(res.Registrars)+len(res.Refused) != 3 || !strings.Contains(res.Refused[0].Reason, "/data/kubelet") {
			t.Errorf("%+v", res)
		}
	}
}

// In a cluster Helm's annotations say what belongs together.
func TestNameByHelmRelease(t *testing.T) {
	release := func(name, s string) string {
		return strings.Replace(s, "metadata: {", "metadata: {annotations: {meta.helm.sh/release-name: "+name+", meta.helm.sh/release-namespace: x}, ", 1)
	}
	m := File{Name: "x", Data: []byte(release("nfs", driverPod("a", "a")) + release("smb", driverPod("b", "b")) +
		release("smb", csiDriverObject("smb.example.com")) + release("nfs", csiDriverObject("nfs.example.com")))}
	res := Import([]File{m}, nil)
	if len(res.Registrars) != 2 || res.Registrars[0].Workloads[0] != "x: DaemonSet a" || res.Registrars[0].Driver.Name != "nfs.example.com" {
		t.Errorf("%+v", res)
	}
}

// The program that created a workload of a cluster restores the sidecar.
func TestManagedWorkloads(t *testing.T) {
	for metadata, want := range map[string]string{
		"labels: {app.kubernetes.io/managed-by: Helm}":                                                    "",
		"labels: {longhorn.io/managed-by: longhorn-manager}":                                              "longhorn-manager",
		"labels: {app.kubernetes.io/managed-by: EKS}":                                                     "EKS",
		"labels: {addonmanager.kubernetes.io/mode: EnsureExists}":                                         "",
		"labels: {addonmanager.kubernetes.io/mode: Reconcile}":                                            "the addon manager of the cluster",
		"ownerReferences: [{apiVersion: csi.ceph.io/v1, kind: Driver, name: rbd}]":                        "Driver/rbd",
		"ownerReferences: [{apiVersion: storage.example/v1, kind: HPECSIDriver, name: \"a b\\nhint: \"}]": `"HPECSIDriver/a b\nhint: "`,
	} {
		m := strings.Replace(driverPod("a", "a.example.com"), "metadata: {", "metadata: {"+metadata+", ", 1) + csiDriverObject("a.example.com")
		res := Import([]File{{Name: "x", Data: []byte(m)}}, nil)
		if len(res.Edits) != 1 {
			t.Fatalf("%s: %+v", metadata, res)
		}
		var warnings []string
		if want != "" {
			warnings = []string{"this workload is managed by " + want + ", which restores the sidecar: see rollout.md, way B"}
		}
		if !slices.Equal(res.Edits[0].Warnings, warnings) {
			t.Errorf("%s: %q, want %q", metadata, res.Edits[0].Warnings, warnings)
		}
	}
}

// The kubelet's directory must be in the container that mounts, at the same path and Bidirectional.
func TestMountsThatDoNotReachTheKubelet(t *testing.T) {
	const good = "{name: k, mountPath: /var/lib/kubelet, mountPropagation: Bidirectional}"
	const unless = ": volumes do not reach the pods, unless the driver mounts on the node itself (nsenter)"
	for name, test := range map[string]struct{ old, new, want string }{
		"right":                   {good, good, ""},
		"only pods":               {good, "{name: k, mountPath: /var/lib/kubelet/pods, subPath: pods, mountPropagation: Bidirectional}", ""},
		"all of the node":         {"path: /var/lib/kubelet}}, {name: s", "path: /}}, {name: s", "the container driver has /pods of the node at /var/lib/kubelet/pods" + unless},
		"no mount":                {", " + good, "", "the container driver does not mount /var/lib/kubelet/pods" + unless},
		"at another path":         {good, "{name: k, mountPath: /host, mountPropagation: Bidirectional}", "the container driver does not mount /var/lib/kubelet/pods" + unless},
		"no propagation":          {", mountPropagation: Bidirectional", "", "the mount of the volume k in the container driver has no mountPropagation: Bidirectional" + unless},
		"propagation to it":       {"Bidirectional", "HostToContainer", "the mount of the volume k in the container driver has no mountPropagation: Bidirectional" + unless},
		"of another kubelet":      {"path: /var/lib/kubelet}}, {name: s", "path: /var/lib/k0s/kubelet}}, {name: s", "the container driver has /var/lib/k0s/kubelet/pods of the node at /var/lib/kubelet/pods" + unless},
		"an emptyDir":             {"{name: k, hostPath: {path: /var/lib/kubelet}}", "{name: k, emptyDir: {}}", "the mount of the volume k in the container driver has no mountPropagation: Bidirectional" + unless},
		"another container of it": {"{name: driver, volumeMounts: [{name: s, mountPath: /csi}, " + good + "]}", "{name: driver, volumeMounts: [{name: s, mountPath: /csi}]}, {name: mounter, volumeMounts: [" + good + "]}", ""},
	} {
		m := driverPod("a", "a.example.com")
		if !strings.Contains(m, test.old) {
			t.Fatalf("%s: no %q in %s", name, test.old, m)
		}
		res := Import([]File{{Name: "x", Data: []byte(strings.Replace(m, test.old, test.new, 1) + csiDriverObject("a.example.com"))}}, nil)
		if len(res.Edits) != 1 || strings.Join(res.Edits[0].Warnings, "\n") != test.want {
			t.Errorf("%s: %+v, want %q", name, res, test.want)
		}
	}
}

// An error in one driver does not prevent the import of the others.
func TestOneIsWrong(t *testing.T) {
	m := File{Name: "x", Data: []byte("kind: List\nitems:\n- {kind: DaemonSet, spec: wrong}\n" + driverPod("a", "a") + driverPod("b", "b.example.com") + csiDriverObject("b.example.com") + "---\n{")}
	res := Import([]File{m}, nil)
	if drivers(res) != "b.example.com" || len(res.Refused) != 3 {
		t.Errorf("%+v", res)
	}
}

// A mount inside of another one counts there; directories whose names only begin alike do not.
func TestDeepestMount(t *testing.T) {
	c := container{VolumeMounts: []volumeMount{
		{Name: "outer", MountPath: "/csi"}, {Name: "deep", MountPath: "/csi/sockets/"}, {Name: "root", MountPath: "/"}, {Name: "alike", MountPath: "/csi/sock"},
	}}
	for file, want := range map[string]string{
		"/csi/sockets/csi.sock": "deep", "/csi/csi.sock": "outer", "/csi/sockets2": "outer", "/csi": "outer", "/run/x": "root",
	} {
		if got := c.mountOf(file).Name; got != want {
			t.Errorf("%s is on %q, want %q", file, got, want)
		}
	}
}

// The default time limit is never shortened.
func TestShortTimeout(t *testing.T) {
	c := container{Args: []string{"--timeout=1s"}}
	if d, err := c.timeout(5 * time.Second); err != nil || d != 5*time.Second {
		t.Errorf("%v, %v", d, err)
	}
	c.Args = []string{"--timeout", "9s", "--timeout=8s"}
	if d, err := c.timeout(5 * time.Second); err != nil || d != 8*time.Second {
		t.Errorf("%v, %v", d, err)
	}
}

// DDN's and NexentaStor's drivers listen below plugins_registry.
func TestDriverSocketBelowTheRegistry(t *testing.T) {
	for dir, want := range map[string]bool{"/var/lib/kubelet/plugins_registry/a.example.com": true, "/var/lib/kubelet/plugins/a.example.com": false} {
		m := strings.ReplaceAll(driverPod("a", "a.example.com"), "/var/lib/kubelet/plugins/a.example.com", dir) + csiDriverObject("a.example.com")
		res := Import([]File{{Name: "x", Data: []byte(m)}}, nil)
		if len(res.Registrars) != 1 {
			t.Fatalf("%+v", res)
		}
		if got := strings.Contains(strings.Join(res.Registrars[0].Comments, " "), "is below plugins_registry"); got != want {
			t.Errorf("%s: %q", dir, res.Registrars[0].Comments)
		}
	}
}

func FuzzImport(f *testing.F) {
	for _, pattern := range []string{"testdata/good/*.yaml", "testdata/bad/*.yaml"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			f.Fatal(err)
		}
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		res := Import([]File{{Name: "x", Data: data}}, nil)
		if len(res.Registrars)+len(res.Refused) == 0 {
			t.Fatal("neither found nor refused")
		}
		for _, r := range res.Refused {
			if text := r.Where + r.Reason + r.Hint; safetext.Clean(text, len(text)) != text {
				t.Fatalf("not harmless: %q", text)
			}
		}
		if len(res.Registrars) == 0 {
			return
		}
		dropIn := DropIn(res.Registrars, res.Edits)
		for line := range strings.Lines(dropIn) {
			if text := strings.TrimSuffix(line, "\n"); safetext.Clean(text, len(text)) != text {
				t.Fatalf("not harmless: %q", text)
			}
		}
		checkLoads(t, res.Registrars, dropIn)
		for _, r := range res.Registrars {
			if name := FileName([]Registrar{r}); safetext.ShellWord(name) != name {
				t.Fatalf("%q is not a word of a shell", name)
			}
		}
	})
}

// TestOwnerOfTheContainer checks that the owner of the socket is the user of the container that has
// the socket's directory, before the pod's, and none if two have it.
func TestOwnerOfTheContainer(t *testing.T) {
	data, err := os.ReadFile("testdata/good/other-root.yaml")
	if err != nil {
		t.Fatal(err)
	}
	const driver = "        - name: driver\n"
	if !strings.Contains(string(data), driver) {
		t.Fatalf("the manifest has no %q", driver)
	}
	const helper = "        - name: helper\n          image: x/helper:1\n          securityContext: {runAsUser: 4000}\n"
	const user = "          securityContext: {runAsUser: 3000}\n"
	for name, c := range map[string]struct{ with, want string }{
		"its user":           {driver + user, `socket_owner = "3000"`},
		"beside a container": {helper + driver + user, `socket_owner = "3000"`},
		"two that have it": {"        - name: second\n          image: x/second:1\n          securityContext: {runAsUser: 5000}\n" +
			"          volumeMounts: [{name: all, mountPath: /data}]\n" + driver + user, ""},
	} {
		text := strings.Replace(string(data), driver, c.with, 1)
		res := Import([]File{{Name: "x.yaml", Data: []byte(text)}}, nil)
		if len(res.Registrars) != 1 {
			t.Fatalf("%s: %+v", name, res)
		}
		dropIn := DropIn(res.Registrars, res.Edits)
		if !strings.Contains(dropIn, c.want) || c.want == "" && strings.Contains(dropIn, "socket_owner") {
			t.Errorf("%s: %s", name, dropIn)
		}
	}
}
