package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/worker"
	"csi-registrar/internal/test/fake"
)

const name = "nfs.csi.example.com"

// node is a fake node in a temporary directory: configuration, a driver on a real socket, /proc
// with a kubelet, systemd, and a daemon that does what doctor can see of the real one.
type node struct {
	t       *testing.T
	root    string // of configuration and of /proc
	rootDir string // of the kubelet
	units   units
	driver  *fakeDriver
	daemon  bool   // whether it runs
	ctl     func() // closes the control socket
	status  status.Document
	regs    map[string]func() // close the registration sockets
	refuse  string            // the kubelet's error for every driver
	holdReg bool              // the daemon publishes nothing
	recent  time.Duration     // Options.Recent
}

// once is the Hints of a driver that is queried once.
type once chan struct{}

func (o once) Hints() <-chan struct{} { return o }
func (o once) Hint()                  {}
func (o once) Close()                 {}

type units map[string]map[string]string

func (u units) Show(ctx context.Context, unit string, properties ...string) (map[string]string, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	p, ok := u[unit]
	if !ok {
		p = map[string]string{"LoadState": "not-found", "ActiveState": "inactive"}
	}
	p = maps.Clone(p)
	maps.DeleteFunc(p, func(name, _ string) bool { return !slices.Contains(properties, name) })
	return p, nil
}

func (u units) Journal(_ context.Context, unit string, args ...string) []string {
	lines := strings.Split(u[unit]["journal"], "\n")
	for _, arg := range args {
		if strings.HasPrefix(strings.TrimPrefix(arg, "_SYSTEMD_"), "INVOCATION_ID=") {
			lines = slices.DeleteFunc(lines, func(l string) bool { return !strings.HasSuffix(l, arg) })
		}
		if grep, ok := strings.CutPrefix(arg, "--grep="); ok {
			lines = slices.DeleteFunc(lines, func(l string) bool { return !regexp.MustCompile("(?i)" + grep).MatchString(l) })
		}
	}
	if slices.Contains(args, "--reverse") {
		slices.Reverse(lines)
	}
	return lines
}

// newNode creates a healthy node.
func newNode(t *testing.T) *node {
	t.Helper()
	root := fake.ShortDir(t)
	n := &node{t: t, root: root, rootDir: filepath.Join(root, "kubelet"), regs: map[string]func(){}, recent: 1}
	t.Cleanup(func() {
		n.stopDaemon()
		n.driver.stop()
	})
	n.mkdir(filepath.Join(n.rootDir, "plugins_registry"), 0o750)
	n.write("proc/self/mountinfo", "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
	n.mkdir(n.path("csi"), 0o755)
	n.write("etc/csi-registrar/config.toml", fmt.Sprintf("[kubelet]\nroot_dir = %q\n", n.rootDir))
	n.write("usr/lib/csi-registrar/conf.d/10-nfs.toml", n.table(""))
	n.process(1, "systemd", "0::/init.scope")
	n.startKubelet()
	n.units = units{
		serviceUnit: {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "UnitFileState": "enabled",
			"NeedDaemonReload": "no", "FileDescriptorStoreMax": "512", "WatchdogUSec": "20s",
			"ExecStart":     "{ path=/usr/bin/csi-registrar ; argv[]=/usr/bin/csi-registrar run --keep-sockets ; ignore_errors=no ; }",
			"ProtectSystem": "strict", "ReadWritePaths": "-/run/csi-registrar -" + n.rootDir, "ProtectHome": "yes", "PrivateTmp": "no"},
		httpUnit: {"LoadState": "loaded", "ActiveState": "active", "Listen": "127.0.0.1:9809 (Stream)"},
	}
	n.driver = &fakeDriver{name: name, nodeID: "node-1", topology: map[string]string{"topology.example.com/zone": "a"}}
	n.driver.start(t, n.socket())
	n.daemon = true
	n.restartDaemon()
	return n
}

func (n *node) path(elem ...string) string { return filepath.Join(n.root, filepath.Join(elem...)) }
func (n *node) socket() string             { return n.path("csi/csi.sock") }
func (n *node) registry() string           { return filepath.Join(n.rootDir, "plugins_registry") }
func (n *node) regSocket() string          { return filepath.Join(n.registry(), name+"-reg.sock") }

// table returns the driver's table with additional lines.
func (n *node) table(more string) string {
	return fmt.Sprintf("[driver.%q]\nsocket = %q\n%s\n", name, n.socket(), more)
}

func (n *node) mkdir(dir string, mode os.FileMode) {
	n.t.Helper()
	if err := os.MkdirAll(dir, mode); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) write(file, content string) {
	n.t.Helper()
	n.mkdir(filepath.Dir(n.path(file)), 0o755)
	if err := os.WriteFile(n.path(file), []byte(content), 0o644); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) remove(path string) {
	n.t.Helper()
	if err := os.RemoveAll(path); err != nil {
		n.t.Fatal(err)
	}
}

// process adds a process of root to /proc.
func (n *node) process(pid int, comm, cgroup string) {
	n.t.Helper()
	dir := fmt.Sprintf("proc/%d/", pid)
	n.write(dir+"comm", comm+"\n")
	n.write(dir+"cgroup", cgroup+"\n")
	n.write(dir+"status", "Name:\tx\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\n")
}

// volume creates the kubelet's directory of a volume. If data is "no data", there is no
// vol_data.json.
func (n *node) volume(dir, data string, age time.Duration) (path string) {
	n.t.Helper()
	dir = "kubelet/" + dir
	n.mkdir(n.path(dir), 0o750)
	if data != "no data" {
		n.write(dir+"/vol_data.json", data)
		at := time.Now().Add(-age)
		if err := errors.Join(os.Chtimes(n.path(dir, "vol_data.json"), at, at), os.Chtimes(n.path(dir), at, at)); err != nil {
			n.t.Fatal(err)
		}
	}
	return n.path(dir)
}

// mounted adds a mount at a path below the kubelet's root directory.
func (n *node) mounted(path string) {
	n.write("proc/self/mountinfo", "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 21 0:1 / "+n.path("kubelet", path)+" rw - nfs x rw\n")
}

// startKubelet adds a kubelet that watches the current plugins_registry.
func (n *node) startKubelet() {
	n.t.Helper()
	n.process(812, "kubelet", "0::/system.slice/kubelet.service")
	delete(n.units["kubelet.service"], "journal") // of an earlier process
	n.listens(812, n.rootDir)
	n.mkdir(n.registry(), 0o750)
	n.write("proc/812/fdinfo/3", "pos:\t0\nflags:\t02\n")
	n.write("proc/812/fdinfo/9", "pos:\t0\nflags:\t02004000\n"+inotifyLine(n.t, n.registry()))
}

// listens adds sockets below the root directories to a process, and sockets of other processes to
// the list.
func (n *node) listens(pid int, rootDirs ...string) {
	n.t.Helper()
	fd := n.path(fmt.Sprintf("proc/%d/fd", pid))
	n.remove(fd)
	n.mkdir(fd, 0o700)
	list := "Num       RefCount Protocol Flags    Type St Inode Path\n" +
		"0000000000000000: 00000002 00000000 00010000 0001 01 900 /others/pod-resources/1\n" +
		"0000000000000000: 00000003 00000000 00000000 0001 03 901\n"
	for i, dir := range append(rootDirs, "/run/other") {
		if err := os.Symlink(fmt.Sprintf("socket:[%d]", 100+i), filepath.Join(fd, fmt.Sprint(i))); err != nil {
			n.t.Fatal(err)
		}
		if i < len(rootDirs) {
			dir += "/pod-resources"
		}
		list += fmt.Sprintf("0000000000000000: 00000002 00000000 00010000 0001 01 %5d %s/3141592\n", 100+i, dir)
	}
	n.write(fmt.Sprintf("proc/%d/net/unix", pid), list)
}

func inotifyLine(t *testing.T, dir string) string {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("inotify wd:1 ino:%x sdev:%x mask:fc6 ignored_mask:0 fhandle-bytes:8\n", st.Ino,
		unix.Major(st.Dev)<<20|unix.Minor(st.Dev))
}

// restartDaemon has the daemon query the drivers, as at its start and at a reload.
func (n *node) restartDaemon() {
	n.t.Helper()
	n.stopDaemon()
	if !n.daemon {
		return
	}
	res := config.Load(config.Source{Root: n.root})
	n.status = status.Document{Version: "1", StartedAt: time.Now().Add(-time.Hour), PluginsRegistry: safetext.Claim(res.Config.Kubelet.PluginsRegistry())}
	if len(res.Errors) > 0 {
		n.status.ConfigError = res.Errors.Error()
	}
	for _, d := range res.Config.Drivers {
		n.status.Drivers = append(n.status.Drivers, n.register(d))
	}
	n.serveStatus()
}

// register returns the status of a driver and publishes its registration socket if it is ready.
func (n *node) register(d config.Driver) status.Driver {
	st := status.Driver{Name: d.Name, Socket: safetext.Claim(d.Socket), Endpoint: safetext.Claim(d.Endpoint), State: status.Disabled,
		Driver: status.Absent, Registration: status.None, Since: time.Now().Add(-time.Minute)}
	if !d.Enabled {
		return st
	}
	limit := n.limit()
	ctx, cancel := context.WithTimeout(n.t.Context(), limit)
	defer cancel()
	connection := d.Connection
	connection.Timeout = limit * 2 / 3
	c := driver.New(connection,
		slog.New(slog.DiscardHandler), make(once, 1), worker.NewPool())
	r := c.Ask(ctx, driver.Due, nil)
	c.Close()
	st.Driver, st.Reason = r.Driver, r.Reason
	path := filepath.Join(string(n.status.PluginsRegistry), d.Name+"-reg.sock")
	switch _, err := os.Lstat(path); {
	case r.Driver != status.Ready || n.holdReg:
	case err == nil:
		st.Registration, st.Reason = status.Conflict, path+" is another program's"
	default:
		st.Registration, st.RegistrationSocket = status.Registered, safetext.Claim(path)
		st.RegisteredAt, st.LastGetInfoAt = time.Now(), time.Now()
		if n.refuse != "" {
			st.Registration, st.KubeletError, st.RegisteredAt = status.Refused, n.refuse, time.Time{}
		}
		n.regs[d.Name] = serveRegistration(n.t, path, d.Name, d.Endpoint)
	}
	st.State = status.State(st.Driver, st.Registration)
	return st
}

func (n *node) stopDaemon() {
	if n.ctl != nil {
		n.ctl()
		n.ctl = nil
	}
	for name, stop := range n.regs {
		stop()
		delete(n.regs, name)
	}
}

func (n *node) serveStatus() {
	n.t.Helper()
	n.mkdir(n.path("run/csi-registrar"), 0o755)
	ln, err := net.Listen("unix", control.Path(n.root))
	if err != nil {
		n.t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		json.NewEncoder(w).Encode(n.status)
	})}
	done := make(chan struct{})
	go func() { srv.Serve(ln); close(done) }()
	n.ctl = func() {
		srv.Close()
		ln.Close() // Serve may not have begun
		<-done
	}
}

// limit returns the time limit of the driver's calls; it is short if one hangs.
func (n *node) limit() time.Duration {
	n.driver.mu.Lock()
	defer n.driver.mu.Unlock()
	if n.driver.hang != "" {
		return 300 * time.Millisecond
	}
	return time.Minute
}

func (n *node) source() config.Source { return config.Source{Root: n.root} }

// examine runs doctor.
func (n *node) examine(drivers ...string) Report {
	n.t.Helper()
	return Run(n.t.Context(), Options{Source: config.Source{Root: n.root}, Drivers: drivers, Units: n.units, Root: n.root, NodeInfoTimeout: n.limit(), Recent: n.recent})
}

// follow applies a fix. It runs commands on files and simulates those of systemd, the daemon and
// the kubelet. It returns false if a step must be done by hand.
func (n *node) follow(fix []Fix) bool {
	n.t.Helper()
	done := false
	service := n.units[serviceUnit]
	for _, f := range fix {
		line := f.String()
		words := strings.Fields(line)
		switch {
		case f.IsComment():
		case strings.Contains(line, rootdir.DropInFile):
			service["ReadWritePaths"] += " " + config.Load(config.Source{Root: n.root}).Config.Kubelet.RootDir
			done = true
		case strings.Contains(line, "zz-doctor-filedescriptorstoremax"):
			service["FileDescriptorStoreMax"] = "512"
		case words[0] == "mv" && strings.HasSuffix(line, ".off"):
			if err := os.Rename(n.path(words[2]), n.path(words[3])); err != nil {
				n.t.Fatal(err)
			}
			service["LoadState"], service["Result"] = "loaded", "success"
		case strings.HasPrefix(line, "systemctl thaw "):
			n.units[words[2]]["FreezerState"] = "running"
			done = true
		case line == "kill -CONT 812":
			n.process(812, "kubelet", "0::/system.slice/kubelet.service")
			done = true
		case strings.Contains(line, "zz-doctor-execstart"):
			service["ExecStart"] = "/usr/bin/csi-registrar run --keep-sockets"
		case strings.Contains(line, "zz-doctor-watchdogsec"):
			service["WatchdogUSec"] = "20s"
		case strings.Contains(line, "zz-doctor-listenstream"):
			n.units[httpUnit]["Listen"] = "127.0.0.1:9809 (Stream)"
		case strings.Contains(line, filepath.Dir(rootdir.DropInFile)), strings.Contains(line, httpUnit+".d"), words[0] == "journalctl", line == "csi-registrar config check", line == "systemctl daemon-reload", strings.HasPrefix(line, "systemctl --no-pager status "):
		case strings.HasPrefix(line, "systemctl unmask"):
			if unit := n.units[words[len(words)-1]]; unit != nil {
				unit["LoadState"] = "loaded"
			}
		case strings.HasPrefix(line, "systemctl reset-failed"):
			service["ActiveState"] = "inactive"
		case line == "systemctl start "+serviceUnit, line == "systemctl restart "+serviceUnit, line == "systemctl enable --now "+serviceUnit:
			service["ActiveState"], service["UnitFileState"], n.daemon = "active", "enabled", true
			n.restartDaemon()
			done = true
		case strings.HasPrefix(line, "csi-registrar re"):
			n.restartDaemon()
			done = true
		case line == "systemctl restart kubelet.service", line == "systemctl start kubelet.service":
			n.startKubelet()
			n.restartDaemon()
			done = true
		case isShell(words[0]) && strings.Contains(line, n.root):
			if out, err := exec.CommandContext(n.t.Context(), "sh", "-c", line).CombinedOutput(); err != nil {
				n.t.Errorf("%s: %v\n%s", line, err, out)
			}
			n.restartDaemon()
			done = true
		default:
			return false
		}
	}
	return done
}

func isShell(word string) bool {
	switch word {
	case "rm", "rmdir", "chmod", "chown", "iconv", "mkdir", "mv", "printf", "sed":
		return true
	}
	return false
}

func serveRegistration(t *testing.T, path, name, endpoint string) (stop func()) {
	t.Helper()
	return servePlugin(t, path, registration{kind: registerapi.CSIPlugin, name: name, endpoint: endpoint})
}

func servePlugin(t *testing.T, path string, r registration) (stop func()) {
	t.Helper()
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	registerapi.RegisterRegistrationServer(s, r)
	return serving(s, ln)
}

// serving starts a server. stop ends it and waits until the socket is removed.
func serving(s *grpc.Server, ln net.Listener) (stop func()) {
	done := make(chan struct{})
	go func() { s.Serve(ln); close(done) }()
	return func() { s.Stop(); <-done }
}

type registration struct {
	registerapi.UnimplementedRegistrationServer
	kind, name, endpoint string
}

func (r registration) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{Type: r.kind, Name: r.name, Endpoint: r.endpoint, SupportedVersions: []string{"1.0.0"}}, nil
}

// fakeDriver is a CSI driver with faults.
type fakeDriver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedNodeServer
	mu           sync.Mutex // guards the faults, which change while calls hang
	name, nodeID string
	topology     map[string]string
	max          int64
	notReady     bool
	hang         string        // the method that does not answer
	slow         time.Duration // how long Probe takes
	fail         string        // the method that answers with an error
	calls        chan struct{} // a call that hangs
	noNode       bool          // no node service, as at a controller's socket

	end  func()
	ln   *net.UnixListener
	path string
}

// set changes the faults.
func (f *fakeDriver) set(change func(*fakeDriver)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

// asked returns a channel that receives when a call hangs.
func (f *fakeDriver) asked() chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.calls == nil {
		f.calls = make(chan struct{}, 1)
	}
	return f.calls
}

func (f *fakeDriver) start(t *testing.T, path string) {
	t.Helper()
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	f.ln, f.path = ln, path
	s := grpc.NewServer(grpc.UnaryInterceptor(f.faults))
	csi.RegisterIdentityServer(s, f)
	if !f.noNode {
		csi.RegisterNodeServer(s, f)
	}
	f.end = serving(s, ln)
}

func (f *fakeDriver) stop() {
	if f.end != nil {
		f.end()
		f.end = nil
	}
}

func (f *fakeDriver) restart(t *testing.T) {
	f.stop()
	os.Remove(f.path)
	f.start(t, f.path)
}

func (f *fakeDriver) faults(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	method := info.FullMethod[strings.LastIndexByte(info.FullMethod, '/')+1:]
	f.mu.Lock()
	hang, fail := f.hang == method, f.fail == method
	f.mu.Unlock()
	switch {
	case hang:
		select {
		case f.asked() <- struct{}{}:
		default:
		}
		<-ctx.Done()
		return nil, ctx.Err()
	case fail:
		return nil, grpcstatus.Error(codes.Internal, "no \x1b[31mkernel module\nloaded")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if method == "Probe" {
		time.Sleep(f.slow)
	}
	return handle(ctx, req)
}

func (f *fakeDriver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: f.name}, nil
}

func (f *fakeDriver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(!f.notReady)}, nil
}

func (f *fakeDriver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	r := &csi.NodeGetInfoResponse{NodeId: f.nodeID, MaxVolumesPerNode: f.max}
	if len(f.topology) > 0 {
		r.AccessibleTopology = &csi.Topology{Segments: f.topology}
	}
	return r, nil
}
