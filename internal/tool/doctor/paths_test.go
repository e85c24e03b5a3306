package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What is wrong with a path that the error of a unit names, and the command that corrects it. The
// error's @ is the path.
func TestObstacles(t *testing.T) {
	symlink := func(t *testing.T, target, link string) {
		t.Helper()
		if err := os.Symlink(target, link); err != nil {
			t.Fatal(err)
		}
	}
	program := func(n *node, file, text string) {
		n.write(file, text)
		chmod(n.t, n.path(file), 0o755)
	}
	for _, c := range []struct {
		name, err, file string
		make            func(t *testing.T, n *node)
		found, fix      string // @ is the test's root directory
	}{
		{"program is empty", "spawning @: Exec format error", "opt/nfs", func(_ *testing.T, n *node) { program(n, "opt/nfs", "") },
			"@/opt/nfs is empty", "# @/opt/nfs has no content: install its package again, or copy it there again"},
		{"program is empty, with a copy", "spawning @: Exec format error", "opt/nfs", func(_ *testing.T, n *node) {
			program(n, "opt/nfs", "")
			program(n, "opt/nfs.orig", "#!/bin/sh\n")
		}, "@/opt/nfs is empty, and @/opt/nfs.orig is not", "mv @/opt/nfs.orig @/opt/nfs"},
		{"program for another distribution", "spawning @: No such file or directory", "opt/nfs", func(t *testing.T, n *node) {
			own, err := readSome("/proc/self/exe", 64)
			if err != nil {
				t.Fatal(err)
			}
			program(n, "opt/nfs", string(own)+strings.Repeat("\x00", 500)+"/none/ld-musl-x86_64.so.1\x00more")
		}, "@/opt/nfs needs /none/ld-musl-x86_64.so.1, which does not exist: it is a program for another distribution",
			"# install the @/opt/nfs for this distribution, or one that is linked statically\n# put @/opt/nfs back, or correct what names it"},
		{"program is a directory", "spawning @: Permission denied", "opt/nfs", func(_ *testing.T, n *node) { n.mkdir(n.path("opt/nfs"), 0o755) },
			"@/opt/nfs is a directory, not a file", "rmdir @/opt/nfs\n# put @/opt/nfs back, or correct what names it"},
		{"empty mount over it", "spawning @: No such file or directory", "opt/nfs", func(_ *testing.T, n *node) {
			n.mkdir(n.path("opt"), 0o755)
			n.write("proc/self/mountinfo", "22 21 0:40 / "+n.path("opt")+" rw - tmpfs none rw\n")
		}, "@/opt/nfs does not exist; what is mounted at @/opt, type tmpfs, can cover it", "# it is empty, or covers mounts that were there before: it was mounted by mistake, or too late\numount @/opt"},
		{"another mount over it", "spawning @: No such file or directory", "opt/nfs", func(_ *testing.T, n *node) {
			n.write("opt/other", "")
			n.write("proc/self/mountinfo", "22 21 0:40 / "+n.path("opt")+" rw - ext4 /dev/sdb rw\n")
		}, "@/opt/nfs does not exist; what is mounted at @/opt, type ext4, can cover it", "# put @/opt/nfs back, or correct what names it\n# or, if that mount covers it:\n# umount @/opt"},
		{"not in the fstab's mount", "open @: no such file or directory", "opt/a/b", func(_ *testing.T, n *node) { n.write("etc/fstab", "/dev/sdb "+n.path("opt")+" xfs defaults 0 0\n") },
			"@/opt is below @/opt of /etc/fstab, which is not mounted", "mount @/opt"},
		{"link to nothing", "mkdir @: file exists", "var/data", func(t *testing.T, n *node) {
			n.mkdir(n.path("var"), 0o755)
			symlink(t, n.path("srv/data"), n.path("var/data"))
		}, "@/var/data is a link to @/srv/data, which does not exist", "mkdir -p @/srv/data"},
		{"link to nothing on the way", "open @: no such file or directory", "var/data/x", func(t *testing.T, n *node) {
			n.mkdir(n.path("var"), 0o755)
			symlink(t, "../srv", n.path("var/data"))
		}, "@/var/data is a link to @/srv, which does not exist", "mkdir -p @/srv"},
		{"file in place of a directory", "mkdir @: not a directory", "var/data/x", func(_ *testing.T, n *node) { n.write("var/data", "x") },
			"@/var/data is a regular file, not a directory", "mv -n @/var/data @/var/data.old\nmkdir @/var/data"},
		{"the program that says so", "@: cannot create directory ‘/none/x’: Not a directory", "bin/mkdir", func(_ *testing.T, n *node) { program(n, "bin/mkdir", "x") }, "", ""},
		{"set aside", "path: @, error: open @: no such file or directory", "etc/kubelet.yaml", func(_ *testing.T, n *node) { n.write("etc/kubelet.yaml.bak", "kind: x\n") },
			"@/etc/kubelet.yaml does not exist, but @/etc/kubelet.yaml.bak does", "mv -n @/etc/kubelet.yaml.bak @/etc/kubelet.yaml"},
		{"set aside twice", "open @: no such file or directory", "etc/kubelet.yaml", func(_ *testing.T, n *node) {
			n.write("etc/kubelet.yaml~", "kind: x\n")
			n.write("etc/kubelet.yaml.old", "kind: x\n")
		}, "@/etc/kubelet.yaml does not exist", "# put @/etc/kubelet.yaml back, or correct what names it"},
		{"quotes of coreutils", "mkdir: cannot create directory ‘@’: Not a directory", "var/data", func(_ *testing.T, n *node) { n.write("var", "x") },
			"@/var is a regular file, not a directory", "mv -n @/var @/var.old\nmkdir @/var"},
		{"argument that is empty", "path=/usr/bin/kubelet ; argv[]=/usr/bin/kubelet --kubeconfig=@ --cert-dir=@.pki/kubelet ;", "etc/kubeconfig", func(_ *testing.T, n *node) {
			n.write("etc/kubeconfig", "")
			n.write("etc/kubeconfig.pki/kubelet", "x")
		}, "@/etc/kubeconfig is empty", "# @/etc/kubeconfig has no content: install its package again, or copy it there again"},
		{"pair of the kubelet", `missing content for "cert-files::@::@.key"`, "pki/kubelet.crt", func(_ *testing.T, n *node) { n.write("pki/kubelet.crt", "") },
			"@/pki/kubelet.crt is not valid; the kubelet makes it and its key anew if they are not there", "rm -f @/pki/kubelet.crt @/pki/kubelet.key"},
		{"empty lock", "open @: resource temporarily unavailable", "run/nfs.lock", func(_ *testing.T, n *node) { n.write("run/nfs.lock", "") }, "", ""},
		{"directory in place of a file", "read @: is a directory", "etc/x.conf", func(_ *testing.T, n *node) { n.write("etc/x.conf/y", "") },
			"@/etc/x.conf is a directory, not a file", "mv -n @/etc/x.conf @/etc-x.conf.old\n# put @/etc/x.conf back, or correct what names it"},
		{"directory of a socket", "listen unix @: bind: no such file or directory", "var/a/x.sock", func(_ *testing.T, n *node) { n.mkdir(n.path("var"), 0o755) },
			"@/var/a does not exist", "mkdir -p @/var/a"},
		{"mode of a directory", "open @: permission denied", "etc/a/b", func(t *testing.T, n *node) {
			n.write("etc/a/b", "x")
			chmod(t, n.path("etc/a"), 0o600)
		}, "@/etc/a has mode 0600, which keeps its owner out", "chmod u+rwX @/etc/a"},
		{"URL", `Get "https://127.0.0.1@": no such file or directory`, "api", func(*testing.T, *node) {}, "", ""},
		{"nothing is wrong", "open @: no such file or directory", "etc/a", func(_ *testing.T, n *node) { n.write("etc/a", "x") }, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t)
			c.make(t, n)
			x := newDiagnosis(Options{Source: n.source(), Units: n.units, Root: n.root})
			found, fix := x.obstacles(t.Context(), "nfs.service", strings.ReplaceAll(c.err, "@", n.path(c.file)))
			root := func(s string) string { return strings.ReplaceAll(s, "@", n.root) }
			if c.found != "" {
				c.found = "; " + c.found
			}
			if found != root(c.found) || lines(fix) != root(c.fix) {
				t.Errorf("%s\n%s", found, lines(fix))
			}
		})
	}
}

// A user other than root, for whom the mode counts.
func TestObstacleOfAUser(t *testing.T) {
	n := newNode(t)
	n.write("data/volumes/x", "")
	chmod(t, n.path("data/volumes"), 0o700)
	n.units["nfs.service"] = map[string]string{"User": "65534"}
	x := newDiagnosis(Options{Source: n.source(), Units: n.units, Root: n.root})
	dir := n.path("data/volumes")
	found, fix := x.obstacles(t.Context(), "nfs.service", "mkdir "+dir+"/a: permission denied")
	if !strings.HasPrefix(found, "; "+dir+" has mode 0700 and belongs to ") || !strings.HasSuffix(found, ", which keeps user 65534 out") || len(fix) != 1 || !fix[0].IsComment() {
		t.Errorf("%s\n%s", found, lines(fix))
	}

	// It can log the path of any file: only what its unit names is corrected.
	chmod(t, n.root, 0o755)
	n.write("etc/secret", "x")
	secret := n.path("etc/secret")
	for _, forged := range []string{"mkdir " + secret + "/a: not a directory", "Failed at step EXEC spawning " + secret + ": Permission denied"} {
		found, fix = x.obstacles(t.Context(), "nfs.service", forged)
		if found == "" || !fix[0].IsComment() || len(fix) != 1 {
			t.Errorf("%s\n%s", found, lines(fix))
		}
	}
	n.write("etc/systemd/system/nfs.service", "[Service]\nExecStart=/usr/bin/nfs "+secret+"/a\n")
	n.units["nfs.service"]["FragmentPath"] = "/etc/systemd/system/nfs.service"
	x = newDiagnosis(x.o)
	if found, fix = x.obstacles(t.Context(), "nfs.service", "mkdir "+secret+"/a: not a directory"); !strings.Contains(lines(fix), "mv -n "+secret) {
		t.Errorf("%s\n%s", found, lines(fix))
	}
}

// While the kubelet runs again, the error with which it ended counts, not a later one.
func TestErrorOfTheLastExit(t *testing.T) {
	n := newNode(t)
	n.ended(0, 100)
	crt := n.path("pki/kubelet.crt")
	n.write("pki/kubelet.crt", "")
	n.units["kubelet.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "NRestarts": "9",
		"journal": "E1128 \"command failed\" err=\"of an earlier run\"\nkubelet.service: Main process exited, code=exited, status=1/FAILURE\n" +
			fmt.Sprintf("E1128 \"command failed\" err=\"missing content for serving cert %q\"\n", crt) +
			"kubelet.service: Main process exited, code=exited, status=1/FAILURE\nE1128 \"RuntimeConfig from runtime service failed\" err=\"Unimplemented\""}
	n.write("proc/uptime", "1000.00 1.00\n")
	n.write("proc/812/stat", "812 (kubelet) S"+strings.Repeat(" 0", 18)+" 99900\n")
	f, _ := finding(n.examine(), "no-kubelet")
	if !strings.Contains(f.Found, "missing content") || strings.Contains(f.Found, "Unimplemented") || !strings.Contains(lines(f.Fix), "\nrm -f "+crt+" "+filepath.Dir(crt)+"/kubelet.key\n") {
		t.Errorf("%+v", f)
	}
}

// A file that a unit needs and systemd's error does not name.
func TestFileOfTheEnvironment(t *testing.T) {
	n := newNode(t)
	n.driver.stop()
	n.write("etc/systemd/system/csi-nfs.service", "[Service]\nExecStart=/usr/bin/nfs unix://"+n.socket()+"\n")
	n.write("etc/default/nfs.off", "A=1\n")
	file := n.path("etc/default/nfs")
	n.units["csi-nfs.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "failed", "SubState": "failed", "Result": "resources",
		"EnvironmentFiles": file + " (ignore_errors=no)", "journal": "csi-nfs.service: Failed to load environment files: No such file or directory"}
	if f, _ := finding(n.examine(), "driver-socket-missing"); !strings.Contains(f.Found, "; "+file+" does not exist, but ") || !strings.Contains(lines(f.Fix), "\nmv -n "+file+".off "+file+"\n") {
		t.Errorf("%+v", f)
	}
}

// The line about a program that cannot be started has no unit if journald was late.
func TestProgramWithoutItsError(t *testing.T) {
	n := newNode(t)
	n.driver.stop()
	n.write("opt/nfs", "#!/bin/sh\n")
	n.write("etc/systemd/system/csi-nfs.service", "[Service]\nExecStart="+n.path("opt/nfs")+" unix://"+n.socket()+"\n")
	unit := map[string]string{"LoadState": "loaded", "ActiveState": "activating", "SubState": "auto-restart", "Result": "exit-code", "ExecMainStatus": "203",
		"ExecStart": "{ path=" + n.path("opt/nfs") + " ; argv[]=" + n.path("opt/nfs") + " ; }", "journal": "csi-nfs.service: Control process exited, code=exited, status=1/FAILURE"}
	n.units["csi-nfs.service"] = unit
	if f, _ := finding(n.examine(), "driver-socket-missing"); !strings.Contains(f.Found, "; "+n.path("opt/nfs")+" is not executable") || !strings.Contains(lines(f.Fix), "chmod 0755 "+n.path("opt/nfs")+"\n") {
		t.Errorf("%+v", f)
	}
	unit["ExecMainStatus"] = "1"
	if f, _ := finding(n.examine(), "driver-socket-missing"); strings.Contains(f.Found, "executable") {
		t.Errorf("%+v", f)
	}
}

// A directory that is not empty in place of a registration socket.
func TestFullDirectoryAtTheRegistrationSocket(t *testing.T) {
	n := newNode(t)
	n.write("x.sock/file", "")
	x := newDiagnosis(Options{Source: n.source(), Units: n.units, Root: n.root})
	at, err := x.stat(t.Context(), n.path("x.sock"))
	if fix := lines(x.remove(t.Context(), n.path("x.sock"), at)); err != nil || fix != "mv -n "+n.path("x.sock")+" "+n.root+"-x.sock.old" {
		t.Errorf("%s %v", fix, err)
	}
}
