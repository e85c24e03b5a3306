package doctor

import (
	"errors"
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/test/fake"
	"csi-registrar/internal/tool/supervise"
)

// All ids in the code are in kinds, once, and no others. Problems are before warnings, and a cause
// is before what it explains. csi-registrar-json(5) and findings.md have the same list; in
// findings.md the states of drivers follow.
func TestKinds(t *testing.T) {
	var got []ID
	warnings := false
	for _, k := range kinds {
		for _, id := range k.explainedBy {
			if !slices.Contains(got, id) {
				t.Errorf("%s explains %s, which is reported before", id, k.ids)
			}
		}
		if warnings = warnings || k.severity == Warning; warnings != (k.severity == Warning) {
			t.Errorf("the problems %s are reported after warnings", k.ids)
		}
		got = append(got, k.ids...)
	}
	used := literals(t, "ID")
	if sorted := slices.Sorted(slices.Values(got)); len(used) < 50 || !slices.Equal(sorted, used) {
		t.Errorf("kinds has\n%q, the code\n%q", sorted, used)
	}
	page := strings.ReplaceAll(read(t, "../../../packaging/man/csi-registrar-json.5"), `\`, "")
	_, list, _ := strings.Cut(page, "later versions can add more:\n")
	list, _, _ = strings.Cut(list, ".\n.TP")
	if ids := words(strings.ReplaceAll(list, ",", "")); !slices.Equal(ids, got) {
		t.Errorf("csi-registrar-json.5 has the ids\n%q, kinds\n%q", ids, got)
	}
	for _, step := range literals(t, "Step") {
		if !regexp.MustCompile(`(?m)^(Of the node|Of a driver):.* ` + string(step) + `[,.]`).MatchString(page) {
			t.Errorf("csi-registrar-json.5 does not name the step %s", step)
		}
	}
	for _, state := range []status.DriverState{status.Absent, status.Starting, status.Ready, status.Hanging, status.Mismatch} {
		got = append(got, ID(state))
	}
	for _, state := range []status.RegistrationState{status.Published, status.Registered, status.Refused, status.Conflict} {
		got = append(got, ID(state))
	}
	got = append(got, status.Invalid, status.Disabled)
	var headings []string
	for _, m := range regexp.MustCompile(`(?m)^### (.*)\n[^#\n]`).FindAllStringSubmatch(read(t, "../../../packaging/doc/findings.md"), -1) {
		headings = append(headings, m[1])
	}
	if ids := words(strings.Join(headings, " ")); !slices.Equal(ids, got) {
		t.Errorf("findings.md has paragraphs for\n%q, the ids and states are\n%q", ids, got)
	}
}

func words(list string) (ids []ID) {
	for _, word := range strings.Fields(list) {
		ids = append(ids, ID(word))
	}
	return ids
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// literals returns the string literals of a type, except those in kinds.
func literals(t *testing.T, typ string) (found []ID) {
	t.Helper()
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	set, info := token.NewFileSet(), &types.Info{Types: map[ast.Expr]types.TypeAndValue{}}
	var files []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(set, name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	// Imports are not needed; what uses them is invalid.
	config := types.Config{Error: func(error) {}}
	pkg, _ := config.Check("doctor", set, files, info)
	want := pkg.Scope().Lookup(typ).Type()
	for e, v := range info.Types {
		if _, ok := e.(*ast.BasicLit); ok && types.Identical(v.Type, want) && set.Position(e.Pos()).Filename != "report.go" {
			found = append(found, ID(constant.StringVal(v.Value)))
		}
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// A finding is hidden behind those that explain it, of the node or of the same driver.
func TestExplainedFindings(t *testing.T) {
	var x diagnosis
	for _, f := range []Finding{
		{ID: "registration-change-failing", Driver: "a"},
		{ID: "pods-waiting", Driver: "a"},
		{ID: "kubelet-refused", Driver: "a"}, {ID: "driver-socket-missing", Driver: "a"},
		{ID: "kubelet-refused", Driver: "b"},
		{ID: "plugins-registry-writable"},
	} {
		x.finding(f.Driver, "registration", f.ID, "found "+string(f.ID), "")
	}
	x.report.arrange()
	var got []string
	for _, f := range x.report.Findings {
		got = append(got, f.Driver+" "+string(f.ID))
	}
	if want := []string{" plugins-registry-writable", "a driver-socket-missing", "b kubelet-refused"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	// Steps that are skipped for the same reason share one line.
	for i, want := range []Check{{Driver: "a", Result: Skipped, Says: "because of driver-socket-missing"},
		{Driver: "a", Result: Problem, Says: "found driver-socket-missing"}} {
		want.Step = "registration"
		if x.report.Checks[i] != want {
			t.Errorf("%+v, want %+v", x.report.Checks[i], want)
		}
	}
}

func TestFixAsText(t *testing.T) {
	for want, f := range map[string]Fix{
		"# check its contents first": note("check its contents first"),
		"rm '/a b'":                  run("rm", "/a b"),
		"# rm '/a b'":                optional(run("rm", "/a b")),
		`printf '%s\n' '[x]' > /y`:   write("/y", "[x]"),
	} {
		if f.String() != want || f.IsComment() != strings.HasPrefix(want, "#") {
			t.Errorf("%q, expected %q", f, want)
		}
	}
}

// The directives that doctor restores are those of the package.
func TestShippedDirectives(t *testing.T) {
	for directive, lines := range shipped {
		data, err := os.ReadFile(filepath.Join("../../../systemd", map[bool]string{false: serviceUnit, true: controlUnit}[directive == "ListenStream"]))
		if err != nil {
			t.Fatal(err)
		}
		for _, line := range lines {
			if !strings.HasSuffix(line, "=") && line != "DynamicUser=no" && !strings.Contains(string(data), "\n"+line+"\n") {
				t.Errorf("%s: %s has no line %s", directive, serviceUnit, line)
			}
		}
	}
}

// A directive is restored by a drop-in of our own, and other people's files stay as they are.
func TestOverrideOfADirective(t *testing.T) {
	n := newNode(t)
	dir := "etc/systemd/system/csi-registrar.service.d"
	n.write(dir+"/store.conf", "[Service]\nNice=5\nFileDescriptorStoreMax=0\n")
	n.units[serviceUnit]["DropInPaths"] = "/" + dir + "/store.conf"
	n.units[serviceUnit]["FileDescriptorStoreMax"] = "0"
	r := n.examine()
	override := filepath.Dir(rootdir.DropInFile)
	want := "mkdir -p " + override + "\nprintf '%s\\n' '[Service]' FileDescriptorStoreMax=4096 Environment=CSI_REGISTRAR_FDSTORE=4096 > " +
		override + "/zz-doctor-filedescriptorstoremax.conf\nsystemctl daemon-reload\nsystemctl restart csi-registrar.service\n"
	if len(r.Findings) != 1 || r.Findings[0].ID != "store-too-small" || lines(r.Findings[0].Fix) != strings.TrimSuffix(want, "\n") {
		t.Errorf("%+v, expected %s", r.Findings, want)
	}
}

// Another user could replace a directory by a link before root runs the command.
func TestNoCommandForAPathOfAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: files of another user")
	}
	n := newNode(t)
	n.driver.stop()
	n.write("csi/csi.sock", "")
	n.restartDaemon()
	if fix := lines(n.examine().Findings[0].Fix); !strings.Contains(fix, "rm "+n.socket()) {
		t.Fatalf("%s", fix)
	}
	n.write("etc/csi-registrar/conf.d/60-nfs.toml", "[driver."+safetext.Quote(name)+"]\nsocket_owner = \"65123\"\n")
	chown(t, n.path("csi"), 65123)
	r := n.examine()
	for _, f := range r.Findings {
		for _, line := range f.Fix {
			if !line.IsComment() && strings.Contains(line.String(), n.path("csi")+"/") {
				t.Errorf("%s: %s", f.ID, line)
			}
		}
	}
	if len(r.Findings) == 0 || !strings.Contains(lines(r.Findings[0].Fix), "by hand") {
		t.Errorf("%+v", r.Findings)
	}
}

// A driver that is down is restarted by its unit, and its last exit is shown.
func TestFixRestartsTheServer(t *testing.T) {
	n := newNode(t)
	n.units["csi-nfs.service"] = map[string]string{"ActiveState": "failed", "SubState": "failed", "Result": "exit-code", "ExecMainCode": "1",
		"ExecMainStatus": "3", "ExecMainExitTimestamp": "Mon 2026-11-23 09:00:00 UTC", "NRestarts": "5"}
	n.driver.stop()
	n.restartDaemon()
	n.write("usr/lib/systemd/system/csi-nfs.service", "[Service]\nExecStart=/usr/bin/nfs unix://"+n.socket()+"\n")
	n.write("usr/lib/systemd/system/other.service", "[Unit]\nDescription=asks "+n.socket()+"\n")
	n.status.Drivers[0].Server.PID, n.status.Drivers[0].Server.Unit = 4711, "csi-nfs.service"
	f := n.examine().Findings[0]
	if want := "csi-nfs.service is failed (failed), its last process ended with exit status 3 at Mon 2026-11-23 09:00:00 UTC, restarted 5 times"; f.ID != "driver-socket-missing" || !strings.Contains(f.Found, want) {
		t.Errorf("%+v", f)
	}
	for _, want := range []string{"systemctl --no-pager status csi-nfs.service", "journalctl --no-pager -b -u csi-nfs.service -n 20 --grep ", "systemctl restart --no-block csi-nfs.service"} {
		if !strings.Contains(lines(f.Fix), want) {
			t.Errorf("%s\nlacks %s", lines(f.Fix), want)
		}
	}
	const pod = "0d8e24c2-3f5c-4b1b-9d3c-2a6f0c8e7b11"
	n.mkdir(n.path("kubelet/pods/"+pod), 0o750)
	n.status.Drivers[0].Server = status.Server{Pod: pod, Container: "4f5d"}
	if fix := lines(n.examine().Findings[0].Fix); !strings.Contains(fix, "crictl ps --all --label io.kubernetes.pod.uid="+pod) || strings.Contains(fix, "4f5d") {
		t.Errorf("%s", fix)
	}
}

// What the administrator's drop-ins set is a likely cause when a driver's unit ends by itself;
// those of a package are not.
func TestDropInsOfAFailedDriver(t *testing.T) {
	n := newNode(t)
	n.driver.stop()
	n.restartDaemon()
	n.write("usr/lib/systemd/system/csi-nfs.service", "[Service]\nExecStart=/usr/bin/nfs unix://"+n.socket()+"\n")
	const file = "/etc/systemd/system/csi-nfs.service.d/mem.conf"
	n.write(file, "# by me\n[Service]\nLimitAS=32M\nType=notify\n")
	n.write("/usr/lib/systemd/system/csi-nfs.service.d/x.conf", "[Service]\nNice=1\n")
	unit := map[string]string{"ActiveState": "failed", "SubState": "failed", "Result": "start-limit-hit", "DropInPaths": "/usr/lib/systemd/system/csi-nfs.service.d/x.conf " + file}
	n.units["csi-nfs.service"] = unit
	found := func(want string) string {
		t.Helper()
		f := n.examine().Findings[0]
		if f.ID != "driver-socket-missing" || !strings.Contains(f.Found, want) || strings.Contains(f.Found, "Nice") {
			t.Errorf("%s: %s\nwant %s", f.ID, f.Found, want)
		}
		return lines(f.Fix)
	}
	const undo = "# if that is the cause, correct it, or set it aside:\n# mv -n " + file + " " + file + ".off\nsystemctl daemon-reload\n"
	const restart = "systemctl restart --no-block csi-nfs.service"
	if fix := found("csi-nfs.service is failed (failed), Result=start-limit-hit; " + file + `:3 sets "LimitAS=32M Type=notify"`); !strings.Contains(fix, undo+"systemctl reset-failed csi-nfs.service\n"+restart) {
		t.Errorf("%s", fix)
	}
	unit["Result"], unit["ExecMainStatus"], unit["LoadState"], unit["journal"] = "exit-code", "203", "loaded", "csi-nfs.service: Failed at step EXEC spawning /usr/bin/nfs: Exec format error\nFailed to start csi-nfs.service"
	if fix := found(`: "csi-nfs.service: Failed at step EXEC spawning /usr/bin/nfs: Exec format error"; /usr/bin/nfs does not exist; ` + file); !strings.Contains(fix, undo+restart) {
		t.Errorf("%s", fix)
	}
	unit["ExecMainStatus"], unit["journal"] = "2", "fatal error: out of memory"
	found(`: "fatal error: out of memory"; ` + file)
	unit["journal"] += "\n\nruntime.throw({0x4f, 0x1a})\n\t/usr/lib/go/src/runtime/panic.go:1101 +0x48\ngoroutine 1 [running]:"
	found(`: "fatal error: out of memory"; ` + file)
	unit["journal"] += "\ncsi-nfs.service: Failed with result 'exit-code'.\nFailed to start csi-nfs.service - NFS."
	found(`: "fatal error: out of memory"; ` + file)
	unit["Result"], unit["LoadState"], unit["journal"] = "success", "bad-setting", "more than one ExecStart="
	found(`and cannot be loaded (bad-setting): "more than one ExecStart="; ` + file)
	unit["LoadState"], unit["journal"] = "loaded", "Stopped NFS.\nDependency failed for NFS."
	found(`: "Dependency failed for NFS."; ` + file)
	unit["journal"] += "\nStarted NFS.\nStopped NFS." // somebody has stopped it
	unit["ActiveState"], unit["SubState"] = "inactive", "dead"
	if fix := found("csi-nfs.service is inactive (dead)"); strings.Contains(fix, file) {
		t.Errorf("%s", fix)
	}
	unit["ActiveState"], unit["SubState"], unit["MainPID"] = "active", "running", "4711"
	found("csi-nfs.service runs (process 4711): its socket was removed")
	n.write("proc/self/mountinfo", "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 0:40 / "+n.path("csi")+" rw - tmpfs tmpfs rw\n")
	found("its socket was removed, or " + n.socket() + " does not exist; what is mounted at " + n.path("csi") + ", type tmpfs")
	n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", fmt.Sprintf("[driver.%q]\nsocket = %q\n", name, n.path("kubelet/plugins/x/csi.sock")))
	n.write("/etc/systemd/system/csi-nfs.service", "[Service]\nExecStart=/bin/nfs --endpoint unix://"+n.path("kubelet/plugins/x/csi.sock")+"\n")
	n.restartDaemon()
	n.mounted("plugins")
	n.mkdir(n.path("kubelet/plugins/x"), 0o755)
	if fix := found("/csi.sock does not exist; what is mounted at " + n.path("kubelet/plugins") + ", type nfs"); !strings.HasSuffix(fix, "\n# or, if that mount covers it:\n# umount "+n.path("kubelet/plugins")) {
		t.Error(fix)
	}
	n.write("proc/self/mountinfo", "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 0:40 / "+n.path("kubelet/plugins/kubernetes.io/csi/v/globalmount")+" rw - nfs x rw\n"+
		"23 21 0:41 / "+n.path("kubelet/plugins")+" rw - tmpfs tmpfs rw\n")
	if fix := found("what is mounted at " + n.path("kubelet/plugins") + ", type tmpfs"); fix != "# it is empty, or covers mounts that were there before: it was mounted by mistake, or too late\numount "+n.path("kubelet/plugins") {
		t.Error(fix)
	}
}

// The daemon cannot make root use a unit, a pod or a path that has nothing to do with the driver.
func TestClaimsOfTheDaemonAreChecked(t *testing.T) {
	n := newNode(t)
	n.units["ssh.service"] = map[string]string{"ActiveState": "failed", "SubState": "failed"}
	n.write("usr/lib/systemd/system/ssh.service", "[Service]\nExecStart=/usr/sbin/sshd\n")
	n.write("shadow", "")
	n.driver.stop()
	n.restartDaemon()
	for _, claim := range []status.Server{{PID: 1, Unit: "ssh.service"}, {Pod: "../../etc"}, {Pod: "1234", Container: "5678"}, {Pod: "-x"}} {
		n.status.Drivers[0].Server = claim
		n.status.Withdrawals = []status.Withdrawal{{Driver: name, RegistrationSocket: safetext.Claim(n.path("shadow")), Error: "x"}}
		n.status.Stuck = []status.StuckCall{{Path: "/usr/ssh.service"}}
		for _, f := range n.examine().Findings {
			fix := lines(f.Fix)
			for _, evil := range []string{"ssh.service", "etc/passwd", "1234", "5678", "-x ", "shadow", "umount"} {
				if strings.Contains(fix, evil) {
					t.Errorf("%+v: %s: %s", claim, f.ID, fix)
				}
			}
		}
	}
	own := n.regSocket()
	if err := os.WriteFile(own, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n.status.Withdrawals[0].RegistrationSocket = safetext.Claim(own)
	if all := fmt.Sprint(n.examine().Findings); !strings.Contains(all, "rm "+own) {
		t.Errorf("its own socket: %s", all)
	}
}

// A daemon that runs and does not answer can lack what a drop-in took from it.
func TestDaemonThatDoesNotAnswer(t *testing.T) {
	n := newNode(t)
	n.stopDaemon()
	const file = "/etc/systemd/system/csi-registrar.service.d/x.conf"
	n.write(file, "[Service]\nMemoryMax=1M\n")
	n.units[serviceUnit]["DropInPaths"] = file
	ln, err := net.Listen("unix", control.Path(n.root)) // and nobody accepts
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	f, _ := finding(n.examine(), "daemon-not-answering")
	want := "# if that is the cause, correct it, or set it aside:\n# mv -n " + file + " " + file + ".off\nsystemctl daemon-reload\nsystemctl restart csi-registrar.service"
	if !strings.HasSuffix(f.Found, file+`:2 sets "MemoryMax=1M"`) || !strings.HasSuffix(lines(f.Fix), want) {
		t.Errorf("%+v", f)
	}
	n.units[serviceUnit]["FreezerState"] = "frozen"
	f, _ = finding(n.examine(), "daemon-not-answering")
	if !strings.HasSuffix(f.Found, "; csi-registrar.service is frozen, by systemctl freeze") || lines(f.Fix) != "systemctl thaw csi-registrar.service" {
		t.Errorf("frozen: %+v", f)
	}
	n.units[serviceUnit]["FreezerState"] = "running"
	n.write(file, "[Service]\nLimitNOFILE=12\n")
	f, _ = finding(n.examine(), "daemon-not-answering")
	if !strings.HasSuffix(f.Found, ", because of LimitNOFILE= in "+file+":2") || !strings.Contains(lines(f.Fix), "\nprintf '%s\\n' '[Service]' LimitNOFILE=262144 > "+
		"/etc/systemd/system/csi-registrar.service.d/zz-doctor-limitnofile.conf\n") {
		t.Errorf("%+v", f)
	}
}

// A mount that the daemon calls dead is unmounted only if it does not answer here either.
func TestStuckCall(t *testing.T) {
	n := newNode(t)
	dir := n.path("kubelet/plugins/dead")
	n.mkdir(dir, 0o755)
	n.write("proc/self/mountinfo", "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 0:40 / "+dir+" rw - fuse server rw\n")
	n.status.Stuck = []status.StuckCall{{Path: safetext.Claim(dir + "/x"), Since: time.Now()}}
	if f := n.examine().Findings[0]; f.ID != "file-system-not-answering" || strings.Contains(lines(f.Fix), "umount") {
		t.Errorf("it answers: %+v", f)
	}
	h, err := fake.MountHangFS(dir)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := h.Hang(); err != nil {
		t.Fatal(err)
	}
	if f := n.examine().Findings[0]; !strings.Contains(f.Found, dir+", type fuse, from server") || !strings.Contains(lines(f.Fix), "umount --force --lazy "+dir) {
		t.Errorf("%+v", f)
	}
}

// Where the kubelet keeps volumes, a file system that does not answer stops every pod.
func TestVolumesUnreadable(t *testing.T) {
	for _, name := range []string{"pods", "plugins"} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			dir := n.path("kubelet/" + name)
			n.mkdir(dir, 0o755)
			n.write("proc/self/mountinfo", "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 0:40 / "+dir+" rw - fuse server rw\n")
			h, err := fake.MountHangFS(dir)
			if err != nil {
				t.Skip(err)
			}
			t.Cleanup(func() {
				if err := h.Close(); err != nil {
					t.Error(err)
				}
			})
			if err := h.Hang(); err != nil {
				t.Fatal(err)
			}
			// The daemon's own count of the volumes hangs, too.
			n.status.Stuck = []status.StuckCall{{Path: safetext.Claim(n.path("kubelet")), Since: time.Now()}}
			r := n.examine()
			if len(r.Findings) != 1 || r.Healthy {
				t.Fatalf("healthy: %v, %+v", r.Healthy, r.Findings)
			}
			if f := r.Findings[0]; f.ID != "volumes-unreadable" || !strings.Contains(f.Found, dir+", type fuse, from server") || !strings.Contains(lines(f.Fix), "umount --force --lazy "+dir) {
				t.Errorf("%+v", f)
			}
		})
	}
}

// A driver that has not served since the daemon started is found by the file of its unit.
func TestFixRestartsTheUnitWithTheSocket(t *testing.T) {
	n := newNode(t)
	n.units["csi-nfs.service"] = map[string]string{"ActiveState": "inactive", "SubState": "dead"}
	n.driver.stop()
	n.restartDaemon()
	n.write("usr/lib/systemd/system/csi-nfs.service", "[Service]\nExecStart=/usr/bin/nfs --endpoint=unix://"+n.socket()+" --x\n")
	n.write("usr/lib/systemd/system/other.service", "[Service]\nExecStart=/usr/bin/nfs --endpoint=unix://"+n.socket()+"2\n[Unit]\nWants=/x"+n.socket()+"\n")
	n.write("usr/lib/systemd/system/csi-registrar.service.d/a.conf", "# "+n.socket()+"\n")
	n.write("usr/lib/systemd/system/csi@.service", "# "+n.socket()+"\n")
	restart := "# the file of csi-nfs.service names this socket\nsystemctl --no-pager status csi-nfs.service\njournalctl --no-pager -b -u csi-nfs.service -n 20 --grep '" + "warn|^w[0-9]|" + errorWords + "'\nsystemctl restart --no-block csi-nfs.service\n"
	f := n.examine().Findings[0]
	if f.ID != "driver-socket-missing" || !strings.Contains(f.Found, "; csi-nfs.service is inactive (dead)") || !strings.HasPrefix(lines(f.Fix), restart) {
		t.Errorf("%+v", f)
	}
	n.remove(n.path("usr/lib/systemd/system/csi-nfs.service"))
	n.write("etc/systemd/system/csi-nfs.service.d/socket.conf", "[Service]\nEnvironment=\"SOCKET="+n.socket()+"\"\n")
	if f := n.examine().Findings[0]; !strings.HasPrefix(lines(f.Fix), restart) {
		t.Errorf("a drop-in: %+v", f)
	}
	n.write("run/systemd/generator/csi-2.service", "[Service]\nExecStartPost=supervise --socket "+n.socket())
	if f := n.examine().Findings[0]; !strings.Contains(lines(f.Fix), "its unit or pod is not known") {
		t.Errorf("two units: %+v", f)
	}
}

// If the socket belongs to the user of the driver's unit, the fix is socket_owner, not chown.
func TestSocketOfTheUnitsUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: files of another user")
	}
	n := newNode(t)
	chown(t, n.socket(), 65123)
	n.units["csi-nfs.service"] = map[string]string{"ActiveState": "active", "SubState": "running", "User": "65123"}
	n.write("usr/lib/systemd/system/csi-nfs.service", "[Service]\nExecStart=/usr/bin/nfs unix://"+n.socket()+"\n")
	n.restartDaemon()
	n.status.Drivers[0].Server.PID, n.status.Drivers[0].Server.Unit = 4711, "csi-nfs.service"
	f := n.examine().Findings[0]
	if f.ID != "driver-not-trusted" || strings.Contains(lines(f.Fix), "chown") || !strings.HasPrefix(lines(f.Fix), "# csi-nfs.service runs the driver as 65123\n") || !n.follow(f.Fix) {
		t.Fatalf("%+v", f)
	}
	if d, _ := config.Load(config.Source{Root: n.root}).Config.Driver(name); d.SocketOwner != "65123" {
		t.Errorf("%+v", d)
	}
	n.units["csi-nfs.service"]["User"] = "65124"
	n.remove(n.path("etc/csi-registrar/conf.d"))
	if f := n.examine().Findings[0]; !strings.Contains(lines(f.Fix), "chown -h root") {
		t.Errorf("the unit has another user: %+v", f)
	}
}

func TestDriverListensNearby(t *testing.T) {
	for _, dir := range []string{"csi-nfs", "ipc"} {
		t.Run(dir, func(t *testing.T) { listensNearby(t, dir) })
	}
}

func listensNearby(t *testing.T, dir string) {
	n := newNode(t)
	other := &fakeDriver{name: "other.example.com"}
	other.start(t, n.path("csi/a.sock"))
	t.Cleanup(other.stop)
	n.mkdir(n.path(dir), 0o755)
	if err := os.Rename(n.socket(), n.path(dir, "plugin.sock")); err != nil {
		t.Fatal(err)
	}
	n.restartDaemon()
	f := n.examine().Findings[0]
	if !strings.Contains(f.Found, "the driver listens on "+n.path(dir, "plugin.sock")) || !n.follow(f.Fix) {
		t.Fatalf("%+v", f)
	}
	if d, _ := config.Load(config.Source{Root: n.root}).Config.Driver(name); d.Socket != n.path(dir, "plugin.sock") {
		t.Errorf("%+v", d)
	}
	if r := n.examine(); len(r.Findings) != 0 {
		t.Errorf("%+v", r.Findings)
	}
}

// The path of a sidecar's container says nothing about where the driver listens.
func TestDriverListensWhereDriversUsuallyDo(t *testing.T) {
	for _, dir := range []string{"kubelet/plugins/nfs", "run/csi-nfs"} {
		n := newNode(t)
		n.driver.stop()
		n.mkdir(n.path(dir), 0o755)
		n.driver.start(t, n.path(dir, "csi.sock"))
		n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", strings.Replace(n.table(""), n.socket(), "/none/csi.sock", 1))
		n.restartDaemon()
		f := n.examine().Findings[0]
		if f.ID != "driver-socket-missing" || !strings.Contains(f.Found, "the driver listens on "+n.path(dir, "csi.sock")+", and socket is set in ") {
			t.Errorf("%s: %+v", dir, f)
		}
	}
}

// A new name does not change what the table sets.
func TestRenameKeepsTheTable(t *testing.T) {
	n := newNode(t)
	n.write("etc/csi-registrar/conf.d/60-nfs.toml", n.table("endpoint = \"/run/seen/by/kubelet.sock\"\ntimeout = \"7s\"\nwhen_limit_changes = \"leave\"\nsupported_versions = [\"1.2.0\", \"1.3.0\"]"))
	before, _ := config.Load(config.Source{Root: n.root}).Config.Driver(name)
	n.driver.set(func(f *fakeDriver) { f.name = "smb.csi.example.com" })
	n.restartDaemon()
	f, _ := finding(n.examine(), "driver-name-mismatch")
	if !n.follow(f.Fix) {
		t.Fatalf("%+v", f)
	}
	c := config.Load(config.Source{Root: n.root}).Config
	after, _ := c.Driver("smb.csi.example.com")
	if before.Name = after.Name; !reflect.DeepEqual(after, before) {
		t.Errorf("%+v, before %+v", after, before)
	}
	if d, _ := c.Driver(name); d.Enabled {
		t.Error("the old name is still enabled")
	}
}

// The line of a setting may have other settings, and comments.
func TestSettingThatIsNotAloneInItsLine(t *testing.T) {
	for before, after := range map[string]string{
		"driver.%q.enabled = false # for now":                                "driver.%q.enabled = true # for now",
		"driver.%q = {enabled=false, timeout = \"7s\"}":                      "driver.%q = {enabled = true, timeout = \"7s\"}",
		"driver.%q = {timeout = \"7s\", enabled = false}":                    "driver.%q = {timeout = \"7s\", enabled = true}",
		"[driver.%q]\n  enabled = false\n  supported_versions = [\"1.0.0\"]": "[driver.%q]\n  enabled = true\n  supported_versions = [\"1.0.0\"]",
	} {
		n := newNode(t)
		file := "etc/csi-registrar/conf.d/60-nfs.toml"
		n.write(file, fmt.Sprintf(before, name))
		n.restartDaemon()
		f, _ := finding(n.examine(name), "driver-disabled")
		if !n.follow(f.Fix) {
			t.Errorf("%s: %+v", before, f)
		}
		if got, err := os.ReadFile(n.path(file)); err != nil || string(got) != fmt.Sprintf(after, name) {
			t.Errorf("%v %s", err, got)
		}
	}
}

// Renaming a driver whose volumes are in use would leave them mounted forever.
func TestNoRenameWithVolumesInUse(t *testing.T) {
	n := newNode(t)
	n.volume(volumeOfPod, volData, 0)
	n.mounted(volumeOfPod + "/mount")
	n.driver.set(func(f *fakeDriver) { f.name = "smb.csi.example.com" })
	n.restartDaemon()
	f := n.examine().Findings[0]
	if f.ID != "driver-name-mismatch" || !strings.Contains(f.Found, "1 volume of "+name+" in use") || strings.Contains(lines(f.Fix), dropInPrefix) {
		t.Errorf("%+v", f)
	}
}

// Removing the label would help only one of two drivers with different values.
func TestTwoDriversWithOneTopologyKey(t *testing.T) {
	n := newNode(t)
	n.refuse = "detected topology value collision: driver reported \"topology.example.com/zone\":\"b\" but existing label is \"topology.example.com/zone\":\"a\""
	n.restartDaemon()
	n.status.Drivers[0].Topology = map[string]string{"topology.example.com/zone": "b"}
	if fix := lines(n.examine().Findings[0].Fix); !strings.Contains(fix, "topology.example.com/zone-\n# when the label is gone, on this node:\n# csi-registrar reregister --force "+name) {
		t.Errorf("%s", fix)
	}
	other := n.status.Drivers[0]
	other.Name = "smb.csi.example.com"
	n.status.Drivers = append(n.status.Drivers, other)
	if fix := lines(n.examine().Findings[0].Fix); !strings.Contains(fix, "kubectl label") {
		t.Errorf("the same value: %s", fix)
	}
	n.status.Drivers[1].Topology = map[string]string{"topology.example.com/zone": "a"}
	f := n.examine().Findings[0]
	if strings.Contains(lines(f.Fix), "kubectl label") || !strings.Contains(f.Expected+lines(f.Fix), "smb.csi.example.com") {
		t.Errorf("%+v", f)
	}
}

// chmod follows a symbolic link, and another user could put one there.
func TestNoChmodBelowADirectoryOfAnotherUser(t *testing.T) {
	n := newNode(t)
	chmod(t, n.registry(), 0o777)
	if fix := lines(n.examine().Findings[0].Fix); fix != "chmod go-w "+n.registry() {
		t.Errorf("%s", fix)
	}
	chmod(t, n.rootDir, 0o777)
	if f := n.examine().Findings[0]; f.ID != "plugins-registry-writable" || lines(f.Fix) != "chmod go-w "+n.rootDir {
		t.Errorf("%+v", f)
	}
}

// AKS makes root_dir writable for everybody (bind-mount.sh): then plugins_registry can be renamed,
// whatever its own mode is.
func TestRegistryThatOthersCanReplace(t *testing.T) {
	n := newNode(t)
	chmod(t, n.rootDir, 0o777)
	r := n.examine()
	if len(r.Findings) != 1 {
		t.Fatalf("%+v", r.Findings)
	}
	f := r.Findings[0]
	if f.ID != "plugins-registry-writable" || !strings.Contains(f.Found, n.rootDir+" may be written by its group or others (mode 0777)") {
		t.Errorf("%+v", f)
	}
	if fix := lines(f.Fix); fix != "chmod go-w "+n.rootDir {
		t.Errorf("%s", fix)
	}
	chmod(t, n.rootDir, 0o755)
	if r := n.examine(); len(r.Findings) != 0 {
		t.Errorf("%+v", r.Findings)
	}
}

// A plugins_registry that others can replace, as on AKS, prevents no registration, so it must not
// hide the finding that does.
func TestWritableRegistryHidesNoCause(t *testing.T) {
	for _, open := range []string{"kubelet", "kubelet/plugins_registry"} {
		n := newNode(t)
		chmod(t, n.path(open), 0o777)
		n.refuse = "forbidden"
		n.restartDaemon()
		n.write("proc/812/fdinfo/9", "pos:\t0\nflags:\t02004000\ninotify wd:1 ino:1 sdev:1 mask:fc6 ignored_mask:0\n")
		var found []ID
		for _, f := range n.examine().Findings {
			found = append(found, f.ID)
		}
		if !slices.Equal(found, []ID{"plugins-registry-writable", "kubelet-watches-deleted"}) {
			t.Errorf("%s: %v", open, found)
		}
		n.write("proc/812/fdinfo/9", "pos:\t0\nflags:\t02004000\n"+inotifyLine(t, n.registry()))
		found = nil
		for _, f := range n.examine().Findings {
			found = append(found, f.ID)
		}
		if !slices.Equal(found, []ID{"plugins-registry-writable", "kubelet-refused"}) {
			t.Errorf("%s: %v", open, found)
		}
		if !slices.ContainsFunc(n.examine().Checks, func(c Check) bool { return c.Step == "file system" }) {
			t.Errorf("%s: the file system was not examined", open)
		}
	}
}

// The owner of plugins_registry is checked as well as its mode, and if it is a symbolic link, the
// path to its target.
func TestRegistryOfAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	link := func(t *testing.T, n *node, from string) {
		if err := errors.Join(os.Mkdir(n.path("other"), 0o755), os.Rename(from, n.path("other/real")), os.Symlink(n.path("other/real"), from)); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct {
		what   string
		breaks func(*testing.T, *node)
		want   string // in the fix, which may have no other command
	}{
		{"owner", func(t *testing.T, n *node) { chown(t, n.registry(), 65123) }, "chown -h root "},
		{"root_dir is a link of root", func(t *testing.T, n *node) { link(t, n, n.rootDir); chmod(t, n.registry(), 0o777) }, "chmod go-w "},
		{"link into a directory of another user", func(t *testing.T, n *node) {
			link(t, n, n.registry())
			chown(t, n.path("other"), 65123)
		}, "chown -h root "},
		{"link to a directory that others may write, in one of another user", func(t *testing.T, n *node) {
			link(t, n, n.registry())
			chmod(t, n.path("other/real"), 0o777)
			chown(t, n.path("other"), 65123)
		}, "chown -h root "},
		{"root_dir is a link of another user", func(t *testing.T, n *node) {
			link(t, n, n.rootDir)
			if err := os.Lchown(n.rootDir, 65123, 65123); err != nil {
				t.Fatal(err)
			}
		}, "# make "}, // not rm: the kubelet needs the link
	} {
		t.Run(test.what, func(t *testing.T) {
			n := newNode(t)
			test.breaks(t, n)
			r := n.examine()
			f, ok := finding(r, "plugins-registry-writable")
			if !ok || slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.ID != "plugins-registry-writable" && f.ID != "plugins-registry-link" }) {
				t.Fatalf("%+v", r.Findings)
			}
			if fix := lines(f.Fix); !strings.HasPrefix(fix, test.want) || strings.Contains(fix, "\n") {
				t.Errorf("%s", fix)
			}
		})
	}
}

// The kubelet takes each socket below plugins_registry for a registration socket.
func TestDriverSocketBelowTheRegistry(t *testing.T) {
	n := newNode(t)
	n.driver.stop()
	socket := filepath.Join(n.registry(), "own", "csi.sock")
	n.mkdir(filepath.Dir(socket), 0o755)
	n.driver.start(t, socket)
	n.write("etc/csi-registrar/conf.d/60-nfs.toml", "[driver."+safetext.Quote(name)+"]\nsocket = "+safetext.Quote(socket)+"\n")
	n.restartDaemon()
	r := n.examine()
	if len(r.Findings) > 0 || !slices.ContainsFunc(r.Checks, func(c Check) bool {
		return c.Step == "registrars" && c.Result == Skipped && strings.Contains(c.Says, socket+" is below plugins_registry")
	}) {
		t.Errorf("%+v", r)
	}
}

// A driver that runs and answers wrongly: what it logged last, and what drop-ins change in its
// unit.
func TestFaultOfADriverThatRuns(t *testing.T) {
	n := newNode(t)
	n.process(os.Getpid(), "nfs", "0::/system.slice/csi-nfs.service")
	const file = "/etc/systemd/system/csi-nfs.service.d/server.conf"
	n.write(file, "[Service]\nEnvironment=SERVER=nowhere\n")
	n.units["csi-nfs.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "DropInPaths": file,
		"journal": "error: nowhere does not answer"}
	n.driver.set(func(f *fakeDriver) { f.notReady = true })
	f, _ := finding(n.examine(), "driver-not-ready")
	if !strings.HasSuffix(f.Found, `; it logged "error: nowhere does not answer"; `+file+`:2 sets "Environment=SERVER=nowhere"`) ||
		!strings.HasSuffix(lines(f.Fix), "\n# if that is the cause, correct it, or set it aside:\n# mv -n "+file+" "+file+".off\nsystemctl daemon-reload\nsystemctl restart --no-block csi-nfs.service") {
		t.Errorf("%+v", f)
	}
	n.units["csi-nfs.service"]["journal"] = "not ready: the storage does not answer\nerror: " + supervise.ErrNotServing.Error() + ": not ready"
	n.units["csi-nfs.service"]["ActiveState"], n.units["csi-nfs.service"]["SubState"] = "activating", "start-post"
	f, _ = finding(n.examine(), "driver-not-ready")
	if got := lines(f.Fix); !strings.Contains(f.Found, `"not ready: the storage does not answer"`) || strings.Count(got, file+".off") != 1 {
		t.Errorf("under supervise: %s\n%s", f.Found, got)
	}
	n.units["csi-nfs.service"]["FreezerState"] = "frozen"
	f, _ = finding(n.examine(), "driver-not-ready")
	if !strings.Contains(f.Found, "; csi-nfs.service is frozen, by systemctl freeze") || !strings.HasSuffix(lines(f.Fix), "\nsystemctl thaw csi-nfs.service\nsystemctl restart --no-block csi-nfs.service") {
		t.Errorf("frozen: %+v", f)
	}
	n.driver.set(func(f *fakeDriver) { f.notReady, f.hang = false, "NodeGetInfo" })
	if f, _ = finding(n.examine(), "driver-not-answering"); !strings.Contains(f.Found, "; csi-nfs.service is frozen, by systemctl freeze") {
		t.Errorf("frozen, and it does not answer: %+v", f)
	}
}

// A program that took the socket of a unit is stopped: the driver of the table is that unit.
func TestSocketOfAUnitTaken(t *testing.T) {
	n := newNode(t)
	n.process(os.Getpid(), "copy", "0::/user.slice/session-1.scope")
	n.write("/etc/systemd/system/csi-nfs.service", "[Service]\nExecStart=/bin/nfs --endpoint unix://"+n.socket()+"\n")
	n.units["csi-nfs.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running"}
	n.driver.set(func(f *fakeDriver) { f.name = "test.csi.example.com" })
	f, _ := finding(n.examine(), "driver-name-mismatch")
	want := fmt.Sprintf("# csi-nfs.service has this socket in its files, and another program took it\nkill %d\nsystemctl restart --no-block csi-nfs.service", os.Getpid())
	if got := lines(f.Fix); strings.TrimSpace(got) != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	n.process(os.Getpid(), "nfs", "0::/system.slice/docker-0123.scope")
	n.mkdir(n.path("image"), 0o755)
	n.rooted(os.Getpid(), n.path("image"))
	if f, _ := finding(n.examine(), "driver-name-mismatch"); strings.Contains(lines(f.Fix), "kill") {
		t.Errorf("the unit's own container: %+v", f)
	}
	n.process(os.Getpid(), "nfs", "0::/system.slice/csi-nfs.service")
	if f, _ := finding(n.examine(), "driver-name-mismatch"); strings.Contains(lines(f.Fix), "kill") {
		t.Errorf("the unit's own program: %+v", f)
	}
}

// The error of a driver comes before that of supervise, which only says that it ended.
func TestErrorOfADriverUnderSupervise(t *testing.T) {
	n := newNode(t)
	n.driver.stop()
	n.write("/etc/systemd/system/csi-nfs.service", "[Service]\nExecStart=/bin/nfs --endpoint unix://"+n.socket()+"\n")
	n.units["csi-nfs.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "activating", "SubState": "auto-restart", "Result": "exit-code",
		"journal": "flag provided but not defined: -attach\nerror: " + n.socket() + ": " + supervise.ErrEnded.Error()}
	f := n.examine().Findings[0]
	if !strings.HasSuffix(f.Found, `: "flag provided but not defined: -attach"`) || !strings.Contains(lines(f.Fix), "# first correct what the last error of csi-nfs.service names\nsystemctl restart") {
		t.Errorf("%+v", f)
	}
}

// A kubelet that was moved while volumes are in use below its earlier root directory: whoever moves
// csi-registrar with it gives these volumes up, and reload alone does nothing.
func TestKubeletMovedWithVolumes(t *testing.T) {
	n := newNode(t)
	n.volume(volumeOfPod, volData, time.Hour)
	const file = "/etc/systemd/system/kubelet.service.d/root.conf"
	n.write(file, "[Service]\nEnvironment=X=--root-dir=/data\n")
	n.units["kubelet.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "DropInPaths": file}
	n.rootDir = n.path("data")
	n.startKubelet()
	f, _ := finding(n.examine(), "root-dir-mismatch")
	if got := lines(f.Fix); !strings.Contains(f.Found, "; 1 volume in use, ") || !strings.HasSuffix(f.Found, file+`:2 sets "Environment=X=--root-dir=/data"`) ||
		!strings.HasPrefix(got, "# if that is the cause, correct it, or set it aside:\n# mv -n "+file) || !strings.HasSuffix(got, "\ncsi-registrar reload --force") {
		t.Errorf("%s\n%s", f.Found, got)
	}
	n = newNode(t)
	n.status.ConfigError = "x.toml:2: kubelet.root_dir: nfs has 4 volumes in use there (or by csi-registrar reload --force)"
	f, _ = finding(n.examine(), "configuration-not-loaded")
	if got := lines(f.Fix); !strings.HasPrefix(got, "# the next line gives up these volumes") || !strings.HasSuffix(got, "\ncsi-registrar reload --force") {
		t.Error(got)
	}
}

// A slow driver is not one that hangs: its timeout can be raised.
func TestSlowDriver(t *testing.T) {
	n := newNode(t)
	n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", n.table("timeout = \"20ms\""))
	n.restartDaemon()
	n.driver.set(func(f *fakeDriver) { f.slow = 50 * time.Millisecond })
	f, _ := finding(n.examine(), "driver-not-answering")
	// On a busy machine a call before Probe can be the late one.
	if !strings.HasPrefix(f.Found, "the driver answers ") || strings.Contains(f.Found, " after 0s") || !strings.HasSuffix(f.Found, ", which is later than its timeout of 20ms") ||
		!strings.Contains(lines(f.Fix), "# if it cannot be faster\n") || !strings.Contains(lines(f.Fix), `'timeout = "`) || !strings.HasSuffix(lines(f.Fix), "\ncsi-registrar reload") ||
		strings.Contains(lines(f.Fix), `"0s"`) { // which is invalid
		t.Errorf("%s\n%s", f.Found, lines(f.Fix))
	}
}

// A kubelet with its own directory in place of plugins_registry: the setting of its unit is named.
func TestKubeletWithItsOwnRegistry(t *testing.T) {
	n := newNode(t)
	const file = "/etc/systemd/system/kubelet.service.d/disk.conf"
	n.write(file, "[Service]\nBindPaths=/data:/var/lib/kubelet/plugins_registry\n")
	n.units["kubelet.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "DropInPaths": file}
	if err := os.Symlink(n.root, n.path("proc/812/root")); err != nil {
		t.Fatal(err)
	}
	n.mkdir(n.path(n.registry()), 0o750)
	n.write("proc/812/fdinfo/9", "inotify wd:1 ino:1 sdev:1 mask:fc6 ignored_mask:0\n")
	f := n.examine().Findings[0]
	if f.ID != "plugins-registry-covered" || !strings.Contains(f.Found, "kubelet (pid 812, kubelet.service) has another directory at "+n.registry()+": BindPaths=") ||
		!strings.Contains(lines(f.Fix), " BindPaths= > /etc/systemd/system/kubelet.service.d/zz-doctor-mounts.conf") {
		t.Errorf("%+v", f)
	}
}

// Why a driver's unit was never started, or its program cannot be.
func TestDriverThatWasNeverStarted(t *testing.T) {
	n := newNode(t)
	n.driver.stop()
	const file, dropIn = "/etc/systemd/system/csi-nfs.service", "/etc/systemd/system/csi-nfs.service.d/x.conf"
	opt := n.path("opt/nfs")
	n.write(file, "[Service]\nExecStart="+opt+" --endpoint unix://"+n.socket()+"\n")
	n.write(dropIn, "[Unit]\nRequires=multipathd.service\nAfter=multipathd.service\n")
	unit := map[string]string{"LoadState": "loaded", "ActiveState": "inactive", "SubState": "dead", "Result": "success", "FragmentPath": file, "DropInPaths": dropIn,
		"Requires": "system.slice multipathd.service"}
	n.units["csi-nfs.service"], n.units["system.slice"] = unit, map[string]string{"LoadState": "loaded"}
	f := n.examine().Findings[0]
	if !strings.Contains(f.Found, ", which requires multipathd.service: there is no such unit") || !strings.Contains(lines(f.Fix), "# install what has multipathd.service, or take it out of "+dropIn+":2\nsystemctl daemon-reload\n") {
		t.Errorf("%+v", f)
	}
	unit["Requires"], unit["journal"] = "system.slice", "NFS was skipped because of an unmet condition check (ConditionPathExists=/etc/nfs/enabled)."
	if f = n.examine().Findings[0]; !strings.Contains(f.Found, `: "NFS was skipped because of an unmet condition check (ConditionPathExists=/etc/nfs/enabled)."; /etc/nfs does not exist; `+dropIn+":2 sets ") {
		t.Errorf("%+v", f)
	}
	unit["ActiveState"], unit["Result"], unit["ExecMainStatus"], unit["journal"] = "failed", "exit-code", "203", "Failed at step EXEC spawning "+opt+": Permission denied"
	unit["ExecStart"] = "{ path=" + opt + " ; argv[]=" + opt + " --endpoint x ; ignore_errors=no }"
	if f = n.examine().Findings[0]; !strings.Contains(lines(f.Fix), "# put "+opt+" back, or correct "+file+":2\n") {
		t.Errorf("%+v", f)
	}
	unit["NRestarts"] = "4"
	if f = n.examine().Findings[0]; !strings.Contains(f.Found, ", restarted 4 times: systemd has given up") || !strings.Contains(lines(f.Fix), "systemctl reset-failed csi-nfs.service\nsystemctl restart ") {
		t.Errorf("%+v", f)
	}
	for program, want := range map[string]string{
		"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xf3\x00": "# install the " + opt + " for " + runtime.GOARCH + "\n",
		"exec nfsd\n":         "# install " + opt + " again; a script must begin with #! and an interpreter that exists, without a carriage return\n# put " + opt + " back, or correct " + file + ":2\n",
		"#!/bin/sh\r\nnfsd\n": "# install " + opt + " again; a script must begin with #! and an interpreter that exists, without a carriage return\n# put " + opt + " back, or correct " + file + ":2\n",
	} {
		n.write("opt/nfs", program)
		if err := os.Chmod(opt, 0o755); err != nil {
			t.Fatal(err)
		}
		if f = n.examine().Findings[0]; !strings.Contains(lines(f.Fix), want) {
			t.Errorf("%q: %+v", program, f.Fix)
		}
	}
	n.remove(opt)
	n.write("etc/fstab", "/dev/sda2 "+n.path("opt")+" xfs defaults 0 0\n")
	if f = n.examine().Findings[0]; !strings.Contains(lines(f.Fix), "\nmount "+n.path("opt")+"\n") {
		t.Errorf("%+v", f.Fix)
	}
	n.write("opt/nfs", "#!/bin/sh\n")
	if err := errors.Join(os.Chmod(opt, 0o644), os.Chmod(n.path("csi"), 0o555)); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(n.path("csi"), n.path("away")); err != nil {
		t.Fatal(err)
	}
	n.write("csi", "")
	if f = n.examine().Findings[0]; !strings.Contains(f.Found, "csi is a regular file, not a directory; csi-nfs.service is failed") || lines(f.Fix) != "mv -n "+n.path("csi")+" "+n.path("csi.old")+"\nmkdir "+n.path("csi")+"\nchmod 0755 "+opt+"\nsystemctl daemon-reload\nsystemctl reset-failed csi-nfs.service\nsystemctl restart --no-block csi-nfs.service" {
		t.Errorf("%+v", f)
	}
	n.remove(n.path("csi"))
	if err := os.Rename(n.path("away"), n.path("csi")); err != nil {
		t.Fatal(err)
	}
	if f = n.examine().Findings[0]; !strings.Contains(f.Found, "csi has mode 0555, which keeps its owner out; csi-nfs.service is failed") || !strings.HasPrefix(lines(f.Fix), "chmod u+rwX "+n.path("csi")+"\n") {
		t.Errorf("%+v", f)
	}
	if f = n.examine().Findings[0]; !strings.Contains(lines(f.Fix), "\nchmod 0755 "+opt+"\n") {
		t.Errorf("%+v", f.Fix)
	}
	unit["ActiveState"], unit["SubState"], unit["Result"] = "active", "running", "success"
	ln, err := net.Listen("unix", n.socket())
	if err != nil {
		t.Fatal(err)
	}
	ln.(*net.UnixListener).SetUnlinkOnClose(false)
	ln.Close()
	if f = n.examine().Findings[0]; f.ID != "driver-socket-stale" || !strings.HasSuffix(f.Found, ", and csi-nfs.service runs: the file is not the one that it created") {
		t.Errorf("%+v", f)
	}
}

// A daemon that runs as another user cannot write, whatever its sandbox opens.
func TestDaemonOfAnotherUser(t *testing.T) {
	n := newNode(t)
	const file = "/etc/systemd/system/csi-registrar.service.d/user.conf"
	n.write(file, "[Service]\nUser=nobody\n")
	n.units[serviceUnit]["User"], n.units[serviceUnit]["DropInPaths"] = "nobody", file
	f := n.examine().Findings[0]
	n.write(file, "[Service]\nDynamicUser=yes\n")
	if f := n.examine().Findings[0]; !strings.HasSuffix(f.Found, ", because of DynamicUser= in "+file+":2") {
		t.Errorf("%+v", f)
	}
	if f.ID != "root-dir-not-writable" || !strings.HasPrefix(f.Found, "csi-registrar.service runs as nobody, ") || !strings.HasSuffix(f.Found, ", because of User= in "+file+":2") ||
		!strings.Contains(lines(f.Fix), "'[Service]' User= DynamicUser=no > /etc/systemd/system/csi-registrar.service.d/zz-doctor-user.conf\n") {
		t.Errorf("%+v", f)
	}
}

// The error of a unit that runs is one of this run.
func TestErrorOfAnEarlierRun(t *testing.T) {
	n := newNode(t)
	n.process(os.Getpid(), "nfs", "0::/system.slice/csi-nfs.service")
	n.units["csi-nfs.service"] = map[string]string{"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "InvocationID": "5",
		"journal": "error: of run 4 _SYSTEMD_INVOCATION_ID=4"}
	n.driver.set(func(f *fakeDriver) { f.notReady = true })
	if f, _ := finding(n.examine(), "driver-not-ready"); strings.Contains(f.Found, "of run 4") {
		t.Errorf("%+v", f)
	}
	proc, err := os.ReadFile(n.path(fmt.Sprintf("proc/%d/status", os.Getpid())))
	if err != nil {
		t.Fatal(err)
	}
	n.write(fmt.Sprintf("proc/%d/status", os.Getpid()), string(proc)+"State:\tT (stopped)\n")
	if f, _ := finding(n.examine(), "driver-not-ready"); !strings.Contains(f.Found, "csi-nfs.service) is stopped by a signal, SIGSTOP") || !strings.Contains(lines(f.Fix), fmt.Sprintf("kill -CONT %d\n", os.Getpid())) {
		t.Errorf("%+v", f)
	}
	n.write(fmt.Sprintf("proc/%d/status", os.Getpid()), string(proc))
	n.units["csi-nfs.service"]["journal"] += "\nerror: of run 5 _SYSTEMD_INVOCATION_ID=5"
	if f, _ := finding(n.examine(), "driver-not-ready"); !strings.Contains(f.Found, "of run 5") {
		t.Errorf("%+v", f)
	}
	maps.Copy(n.units["csi-nfs.service"], map[string]string{"ActiveState": "failed", "SubState": "failed", "Result": "core-dump", "ExecMainCode": "3", "ExecMainStatus": "31",
		"journal": "Failed at step EXEC INVOCATION_ID=4\nMain process exited, code=dumped, status=31/SYS INVOCATION_ID=5"})
	n.write("etc/systemd/system/csi-nfs.service", "[Service]\nExecStart=/usr/bin/nfs "+n.socket()+"\n")
	n.driver.stop()
	if f := n.examine().Findings[0]; !strings.Contains(f.Found, `: "Main process exited, code=dumped, status=31/SYS `) || strings.Contains(f.Found, "Failed at step") {
		t.Errorf("%+v", f)
	}
}
