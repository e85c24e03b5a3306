package pages

import "strings"

// Typed has the sections, PAGE#SECTION, whose commands a test types as they stand, and the test.
var Typed = map[string]string{
	"README.md#Use it": "TestHowTos",

	"tutorial.md#Install both":          "TestTutorial",
	"tutorial.md#Restart csi-registrar": "TestTutorial",
	"tutorial.md#Break it":              "TestTutorial",
	"tutorial.md#Repair it":             "TestTutorial",
	"tutorial.md#Remove everything":     "TestTutorial",

	"bugreport.md#":                                         "TestHowTos",
	"configure.md#":                                         "TestHowTos",
	"drivers.md#A native unit":                              "TestHowTos",
	"drivers.md#Packaging a driver":                         "TestHowTos",
	"drivers.md#Settings that hide mounts":                  "TestSettingsThatHideMounts",
	"drivers.md#Supervised":                                 "TestHowTos",
	"from-the-sidecar.md#":                                  "TestHowTos",
	"images.md#Read-only /usr, empty /etc":                  "TestHowTos",
	"images.md#System extension":                            "TestSysupdate",
	"install.md#From a repository":                          "TestHowTos",
	"install.md#Packages that you built":                    "TestHowTos",
	"install.md#Uninstall":                                  "TestHowTos",
	"install.md#Upgrade":                                    "TestHowTos",
	"monitoring.md#":                                        "TestHowTos",
	"monitoring.md#With node_exporter's textfile collector": "TestHowTos",
	"nodes.md#Root directory":                               "TestHowTos",
	"readiness.md#With the Node Readiness Controller":       "TestHowTos",
	"rollout.md#Waves":                                      "TestHowTos",
	"trace.md#The calls of the kubelet":                     "TestHowTos",
	"troubleshooting.md#":                                   "TestHowTos",
}

// Untyped are commands that no test types: those of a page or a section, PAGE#SECTION, that begin
// with Text.
type Untyped struct{ Place, Text, Why string }

// NotTyped lists them. The test of a section of Typed leaves them out.
var NotTyped = []Untyped{
	{"README.md#Try it without a cluster", "make ", "the suite quick is `make test`, and runs the demo"},

	{"drivers.md#A Quadlet", "podman pull ", "needs a registry: TestDriversAsQuadlets loads the image from a file"},
	{"drivers.md#A Quadlet", "cp csi-nfs.container ", "needs podman: TestDriversAsQuadlets"},
	{"drivers.md#A Quadlet", "systemctl ", "needs podman: TestDriversAsQuadlets"},
	{"drivers.md#A Quadlet", "cp 60-nfs.toml ", "needs podman: TestDriversAsQuadlets"},

	{"images.md#mkosi", "curl ", "TestMkosi downloads this file from a server of its own"},
	{"images.md#mkosi", "dpkg-deb ", "TestMkosi"},
	{"images.md#mkosi", "mkosi ", "TestMkosi, with the Debian mirror of this machine"},
	{"images.md#System extension", "openssl ", "TestSignedSysext, with a smaller key"},
	{"images.md#System extension", "make sysext ", "TestSignedSysext"},
	{"images.md#System extension", "scripts/verify-sysext ", "TestSignedSysext"},
	{"images.md#Systems updated as an image", "#!/bin/bash\n# combustion:", "needs MicroOS; the page says that it is not tested"},

	{"install.md#Verify a release", "scripts/verify-release ", "TestRelease"},
	{"install.md#Verify a release", "ssh-keygen ", "scripts/verify-release, which TestRelease runs, has it too"},
	{"install.md#Verify a release", "sha256sum ", "scripts/verify-release has it too"},

	{"nodes.md#Another root directory", "", "the transcript of TestEveryKindOfNode"},

	{"readiness.md", "kubectl ", "needs a cluster with the Node Readiness Controller"},
	{"readiness.md", "node-problem-detector ", "needs that program and an API server"},

	{"rollout.md", "kubectl -n kube-system patch ", "needs a cluster: TestPolicy makes this change"},
	{"rollout.md", "kubectl -n kube-system delete pod ", "needs a cluster with pods"},
	{"rollout.md", "kubectl label ", "needs a cluster: TestSplit sets these labels"},
	{"rollout.md", "kubectl -n kube-system wait ", "needs a cluster with pods"},

	{"selinux.md", "", "needs SELinux in the kernel: TestSELinux boots a virtual machine"},

	{"trace.md#", "csi-registrar trace --listen PATH ", "the synopsis"},
	{"trace.md#Example: a mount that hangs", "", "a recorded session"},

	{"tutorial.md#", "ARCHS=amd64 ", "the tests build these packages themselves"},
}

// Listed returns the entry of NotTyped for a command of a section.
func Listed(section, text string) (u Untyped, ok bool) {
	for _, u := range NotTyped {
		inside := section == u.Place || !strings.Contains(u.Place, "#") && strings.HasPrefix(section, u.Place+"#")
		if inside && strings.HasPrefix(text, u.Text) {
			return u, true
		}
	}
	return Untyped{}, false
}
