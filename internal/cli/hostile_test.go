package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/test/fake"
	"csi-registrar/internal/test/hostile"
	"csi-registrar/internal/tool/doctor"
)

// evil is the untrusted text on the hostile node; evilName is its form in file names.
const (
	evil     = hostile.Line
	evilName = "\x1b[2J;reboot $(id) \"'\nhint: run curl"
)

var (
	marked   = regexp.MustCompile(`"(\\.|[^"\\])*"`) // safetext.Quote, TOML and JSON
	shellied = regexp.MustCompile(`(\$?'[^']*'(\\')?)+`)
	outside  = regexp.MustCompile("curl|[$]\\(id|;reboot|`id`|\\x1b|\\x60id")
)

// checkMarked checks that all of evil in a text is quoted and harmless.
func checkMarked(t *testing.T, what, text string) {
	t.Helper()
	harmless(t, what, text, false)
	if found := hostile.Forged.FindString(text); found != "" {
		t.Errorf("%s: a forged line %q in\n%s", what, found, text)
	}
	rest := marked.ReplaceAllString(strings.Join(strings.Fields(text), " "), "")
	if found := outside.FindString(rest); found != "" {
		t.Errorf("%s: %q is not in quotes in\n%s\nwithout quotes: %s", what, found, text, rest)
	}
}

// hostileDriver returns evil in every field.
type hostileDriver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	name string
	err  error
}

func (h hostileDriver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: h.name, VendorVersion: evil}, h.err
}

func (h hostileDriver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: evil, AccessibleTopology: &csi.Topology{Segments: map[string]string{evil: evil, "a.example/zone": evil}}}, nil
}

type hostileRegistrar struct {
	registerapi.UnimplementedRegistrationServer
	kind, name string
	err        error
}

func (h hostileRegistrar) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{Type: h.kind, Name: h.name, Endpoint: "/" + evil, SupportedVersions: []string{evil}}, h.err
}

// hostileUnits has the properties of a unit with an untrusted drop-in.
type hostileUnits map[string]string

func (u hostileUnits) Show(context.Context, string, ...string) (map[string]string, error) {
	return u, nil
}

func (u hostileUnits) Journal(context.Context, string, ...string) []string {
	return []string{u["LoadError"]}
}

// hostileNode creates a node on which every untrusted name and text is evil.
func hostileNode(t *testing.T) (root string) {
	t.Helper()
	root = fake.ShortDir(t)
	write := func(name, text string) {
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	serve := func(path string, register func(*grpc.Server)) {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		ln, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		s := grpc.NewServer()
		register(s)
		done := make(chan struct{})
		go func() { defer close(done); s.Serve(ln) }()
		t.Cleanup(func() { s.Stop(); <-done })
	}
	process := func(pid, uid int, comm string) {
		dir := fmt.Sprintf("proc/%d/", pid)
		write(dir+"comm", comm+"\n")
		write(dir+"cgroup", "0::/"+evilName+".service\n0::/$(id).service\n")
		write(dir+"status", "Uid:"+strings.Repeat(fmt.Sprintf("\t%d", uid), 4)+"\n")
	}
	process(1, 0, evil)
	process(7, 65534, "kubelet")
	process(8, 0, "kubelet")
	if err := errors.Join(os.Mkdir(filepath.Join(root, "proc/8/fd"), 0o700), os.Symlink("socket:[100]", filepath.Join(root, "proc/8/fd/1"))); err != nil {
		t.Fatal(err)
	}
	write("proc/8/net/unix", "0: 2 0 10000 1 1 100 /"+strings.ReplaceAll(evil, "\n", "")+"/pod-resources/1\n")
	process(os.Getpid(), 0, evil) // who serves the sockets
	write("etc/csi-registrar/config.toml", fmt.Sprintf("[kubelet]\nroot_dir = %q\n", filepath.Join(root, "k")))
	write("etc/csi-registrar/conf.d/40"+evilName+".toml", "")
	table := func(name string) string {
		return fmt.Sprintf("[driver.%q]\nsocket = %q\n", name, filepath.Join(root, "s", name))
	}
	write("usr/lib/csi-registrar/conf.d/40"+evilName+".toml", table("masked"))
	write("usr/lib/csi-registrar/conf.d/50"+evilName+".toml", fmt.Sprintf("[driver.faulty]\nsocket = %q\n[driver.%q]\nx = 1\n", "relative", "x;reboot $(id)"))
	write("usr/lib/csi-registrar/conf.d/60"+evilName+".toml", table("fails")+table("renamed")+table("says")+table("gone")+table("twice")+table("off")+"enabled = false\n")
	identity := func(name string, err error) func(*grpc.Server) {
		return func(s *grpc.Server) {
			csi.RegisterIdentityServer(s, hostileDriver{name: name, err: err})
			csi.RegisterNodeServer(s, hostileDriver{})
		}
	}
	serve("s/fails", identity("", grpcstatus.Error(codes.Internal, evil)))
	serve("s/renamed", identity(evil, nil))
	serve("s/says", identity("says", nil))
	serve("s/off", identity("off", nil))
	serve("s/masked", identity("masked", nil))
	serve("s/x;reboot $(id)", identity("x", nil))
	registrar := func(r hostileRegistrar) func(*grpc.Server) {
		return func(s *grpc.Server) { registerapi.RegisterRegistrationServer(s, r) }
	}
	serve("k/plugins_registry/\x1b[2J;reboot $(id)", registrar(hostileRegistrar{kind: registerapi.CSIPlugin, name: "twice"}))
	serve("k/plugins_registry/a", registrar(hostileRegistrar{kind: evil, name: evil}))
	serve("k/plugins_registry/b", registrar(hostileRegistrar{err: grpcstatus.Error(codes.Internal, evil)}))
	return root
}

// hostileDocument sets a status document with nothing escaped.
func hostileDocument(d *fakeDaemon) {
	d.set(func(s *status.Document) {
		s.ConfigError, s.PluginsRegistry, s.Polling = evil, "/"+evil, evil
		s.Stuck = []status.StuckCall{{Path: "/" + evil, Since: noon}}
		for _, name := range []string{"fails", "renamed", "says", "gone", "twice", evil} {
			s.Drivers = append(s.Drivers, status.Driver{Name: name, State: "refused", Driver: status.Ready, Registration: status.Refused, Since: noon,
				Reason: evil, Socket: "/" + evil, Endpoint: "/" + evil, KubeletError: evil, DriverVersion: evil, NodeID: evil,
				Topology: map[string]string{evil: evil}, RegistrationSocket: "/" + evil})
		}
	})
}

// TestHostileNode checks that no command prints untrusted text unescaped, as a line of its own, or
// in a command that the user is told to run.
func TestHostileNode(t *testing.T) {
	root := hostileNode(t)
	manifest := filepath.Join(root, evilName+".yaml")
	quoted := func(s string) string {
		data, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	e := quoted(evil)
	yaml := fmt.Sprintf(`{kind: DaemonSet, metadata: {name: %[1]s, namespace: %[1]s}, spec: {template: {spec: {
		volumes: [{name: %[1]s, hostPath: {path: %[1]s}}, {name: r, hostPath: {path: /var/lib/kubelet/plugins_registry}}],
		containers: [
			{name: %[1]s, image: node-driver-registrar, args: [--csi-address=/csi/csi.sock, --kubelet-registration-path=/run/x/csi.sock],
				volumeMounts: [{name: %[1]s, mountPath: /csi}, {name: r, mountPath: /registration}]},
			{name: a, args: [--drivername, %[1]s]}, {name: b, args: [--drivername=b]}]}}}}`, e)
	manifests := []string{yaml, strings.Replace(yaml, "path: "+e, "path: /run/x", 1), strings.ReplaceAll(yaml, "/csi/csi.sock", "$(curl)"), e, "{kind: DaemonSet, spec: " + e + "}", "a: [" + evil}
	if err := os.WriteFile(manifest, []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, daemon := range []bool{false, true} {
		if daemon {
			d := newFake()
			d.reloadErr = errors.New(evil)
			hostileDocument(d)
			d.serve(t, root)
		}
		for _, args := range [][]string{
			{"status"}, {"status", "says"}, {"status", "--json"}, {"wait", "--timeout", "50ms"}, {"wait", "--timeout", "50ms", "says", "none"},
			{"reload"}, {"reregister", "says"}, {"config", "check"}, {"config", "show"},
			{"import", manifest}, {"help"}, {"version"}, {"cleanup", "--if-stopped"},
			{"status", evil}, {"doctor", evil}, {evil}, {"--" + evil},
		} {
			what := fmt.Sprintf("%.40q, daemon %v", args, daemon)
			if args[0] != "import" && args[0] != "help" && args[0] != "version" && args[0] != "cleanup" && args[0] != evil && args[0] != "--"+evil {
				args = append(args, "--config-root", root)
			}
			_, out, errs := try(t, args...)
			checkOutput(t, what, out, errs)
		}
		o := doctor.Options{Source: config.Source{Root: root}, Root: root, Units: hostileUnits{"LoadState": "error", "LoadError": evil, "Listen": evil}}
		checkDoctor(t, o)
		o.Units = hostileUnits{"LoadState": "loaded", "ActiveState": "active", "ProtectSystem": "strict", "ReadWritePaths": evil, "Listen": "[::]:1;reboot (x)", "ExecStart": "--http-endpoint=;reboot$(id) --x"}
		checkDoctor(t, o)
	}
	for i, m := range manifests {
		s := newSession()
		s.env.stdin = strings.NewReader(m)
		code := s.run(t.Context(), "import", "-")
		checkOutput(t, fmt.Sprintf("manifest %d", i), s.stdout.String(), s.stderr.String())
		if code == 0 {
			t.Errorf("manifest %d is imported", i)
		}
	}
}

// checkOutput checks that nothing in a command's output is forged or unescaped. The daemon quotes
// drivers itself, so quotes are only required in hints.
func checkOutput(t *testing.T, what, out, errs string) {
	t.Helper()
	for _, text := range []string{out, errs} {
		harmless(t, what, text, false)
		if found := hostile.Forged.FindString(text); found != "" {
			t.Errorf("%s: a forged line %q in\n%s", what, found, text)
		}
		for line := range strings.Lines(text) {
			if hint, ok := strings.CutPrefix(line, "hint: "); ok {
				checkMarked(t, what, hint)
			}
		}
	}
}

func checkDoctor(t *testing.T, o doctor.Options) {
	t.Helper()
	r := doctor.Run(t.Context(), o)
	if len(r.Findings) < 5 || len(r.Checks) < 10 {
		t.Errorf("too few findings: %+v", r)
	}
	for _, c := range r.Checks {
		checkMarked(t, string(c.Step), c.Says)
	}
	for _, f := range r.Findings {
		checkMarked(t, string(f.Step), f.Found)
		checkMarked(t, string(f.Step), f.Expected)
		checkMarked(t, string(f.Step), f.Driver)
		for _, fix := range f.Fix {
			// A shell may execute a comment.
			line := fix.String()
			harmless(t, line, line, false)
			if rest := shellied.ReplaceAllString(strings.ReplaceAll(line, " && ", " "), ""); outside.MatchString(rest) {
				t.Errorf("%s: %s", f.Step, line)
			}
			if !fix.IsComment() && safetext.ShellWord(fix.Command.Name) != fix.Command.Name {
				t.Errorf("%s runs %q", f.Step, fix.Command.Name)
			}
		}
	}
	s := newSession()
	s.env.report(runDoctor(t.Context(), s.env, o, true))
	s.env.report(runDoctor(t.Context(), s.env, o, false))
	checkOutput(t, "doctor", s.stdout.String(), s.stderr.String())
}
