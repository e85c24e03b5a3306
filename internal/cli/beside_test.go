package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/test/fake"
)

// besideNode is a node with a kubelet and a driver, on which more than one program may register.
type besideNode struct {
	daemonNode
	socket, registry string
	dropIn           string
	kubelet          *fake.Kubelet
	driver           *fake.Driver
}

func newBesideNode(t *testing.T) *besideNode {
	t.Helper()
	root := fake.ShortDir(t)
	n := &besideNode{
		daemonNode: daemonNode{T: t, root: root, log: newOutput()}, socket: filepath.Join(root, "d.sock"),
		registry: filepath.Join(root, "k/plugins_registry"), dropIn: filepath.Join(root, "etc/csi-registrar/conf.d/60-d.toml"),
	}
	for _, dir := range []string{n.registry, filepath.Dir(n.dropIn), filepath.Join(root, "run")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n.write(filepath.Join(root, "etc/csi-registrar/config.toml"), fmt.Sprintf("[kubelet]\nroot_dir = %q\n", filepath.Join(root, "k")))
	n.driver = fake.NewDriver(n.socket, fake.Healthy("d.example"))
	if _, err := n.driver.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.driver.Kill)
	var err error
	if n.manager, err = fake.StartManager(root); err != nil {
		t.Fatal(err)
	}
	if n.kubelet, err = fake.StartKubelet(n.registry, fake.NewAPIServer(), func(fake.Event) {}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(n.kubelet.Stop(), n.manager.Close()); err != nil {
			t.Error(err)
		}
	})
	return n
}

func (n *besideNode) write(path, text string) {
	n.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		n.Fatal(err)
	}
}

func (n *besideNode) addDropIn() {
	n.write(n.dropIn, fmt.Sprintf("[driver.\"d.example\"]\nsocket = %q\nsocket_owner = \"any\"\n", n.socket))
}

// end ends a process in order.
func (n *besideNode) end(p *exec.Cmd) {
	n.Helper()
	if err := errors.Join(p.Process.Signal(syscall.SIGTERM), p.Wait()); err != nil {
		n.Error(err)
	}
}

// status returns the state of the driver, empty if it is not configured, and the exit code.
func (n *besideNode) status() (state string, code int) {
	s, err := control.NewClient(control.Path(n.root)).Status(n.Context())
	code, _, _ = try(n.T, "status", "d.example", "--config-root", n.root)
	if err != nil {
		return "", code
	}
	d, _ := s.Driver("d.example")
	return d.State, code
}

// readyz returns the code of /readyz/DRIVER; 0: there is no answer.
func (n *besideNode) readyz() int {
	n.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", control.Path(n.root))
	}}}
	r, err := client.Get("http://localhost/readyz/d.example")
	if err != nil {
		return 0
	}
	if err := r.Body.Close(); err != nil {
		n.Error(err)
	}
	return r.StatusCode
}

// podSidecar is node-driver-registrar: it has the path while it runs.
type podSidecar struct {
	registerapi.UnimplementedRegistrationServer
	endpoint string
}

func (s *podSidecar) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{Type: registerapi.CSIPlugin, Name: "d.example", Endpoint: s.endpoint, SupportedVersions: []string{"1.0.0"}}, nil
}

func (s *podSidecar) NotifyRegistrationStatus(context.Context, *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	return &registerapi.RegistrationStatusResponse{}, nil
}

// serveSidecar starts a sidecar, and returns what ends it.
func (n *besideNode) serveSidecar() (stop func()) {
	n.Helper()
	l, err := net.Listen("unix", filepath.Join(n.registry, "d.example-reg.sock"))
	if err != nil {
		n.Fatal(err)
	}
	server, served := grpc.NewServer(), make(chan error, 1)
	registerapi.RegisterRegistrationServer(server, &podSidecar{endpoint: n.socket})
	go func() { served <- server.Serve(l) }()
	return sync.OnceFunc(func() {
		server.Stop()
		if err := <-served; err != nil {
			n.Error(err)
		}
	})
}

// sidecarTable reads the table of from-the-sidecar.md: its rows, by the first three columns.
func sidecarTable(t *testing.T) map[[3]string][]string {
	t.Helper()
	text, err := os.ReadFile("../../packaging/doc/from-the-sidecar.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := map[[3]string][]string{}
	_, table, _ := strings.Cut(string(text), "| daemon | drop-in | sidecar |")
	table, _, _ = strings.Cut(table, "\n\n")
	for _, line := range strings.Split(table, "\n")[2:] {
		var cells []string
		for cell := range strings.SplitSeq(strings.Trim(line, "| "), "|") {
			cells = append(cells, strings.TrimSpace(cell))
		}
		rows[[3]string(cells[:3])] = cells[3:]
	}
	return rows
}

// The table of from-the-sidecar.md is what a daemon, a drop-in and a sidecar give together.
func TestSidecarTable(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: a registrar of another user does not count")
	}
	t.Parallel()
	got := map[[3]string][]string{}
	n := newBesideNode(t)
	observe := func(daemon, dropIn, sidecar string) {
		t.Helper()
		state, code := n.status()
		wait, _, _ := try(t, "wait", "d.example", "--timeout", "200ms", "--config-root", n.root)
		alert := map[string]string{"conflict": "CSIDriverConflict"}[state]
		if code == exitNotRunning {
			alert = "CSIRegistrarAbsent"
		}
		or := func(s, none string) string {
			if s == "" || s == "0" {
				return none
			}
			return s
		}
		got[[3]string{daemon, dropIn, sidecar}] = []string{or(state, "none"), strconv.Itoa(code), strconv.Itoa(wait), or(strconv.Itoa(n.readyz()), "none"), or(alert, "none")}
	}
	registered := func(want bool) {
		t.Helper()
		n.eventually(fmt.Sprintf("registered is %t", want), func() bool { _, ok := n.kubelet.Registered()["d.example"]; return ok == want })
	}

	observe("stopped", "no", "no")
	stop := n.serveSidecar()
	defer func() { stop() }()
	registered(true)
	observe("stopped", "no", "runs")
	n.addDropIn()
	observe("stopped", "yes", "runs")
	n.start()
	n.eventually("it is a conflict", func() bool { state, _ := n.status(); return state == "conflict" })
	if code := n.readyz(); code != 503 {
		t.Errorf("/readyz of a sidecar that was found just now: %d", code)
	}
	time.Sleep(15 * time.Second) // so long it must have been there
	if code, _, stderr := try(t, "reregister", "d.example", "--config-root", n.root); code != 0 {
		t.Errorf("reregister: %d %s", code, stderr) // asks at once
	}
	n.eventually("the sidecar serves the driver", func() bool { return n.readyz() == 200 })
	observe("runs", "yes", "runs")
	stop()
	registered(false)
	registered(true)
	n.eventually("it is registered", func() bool { state, _ := n.status(); return state == "registered" })
	observe("runs", "yes", "no")
	reload := func() {
		t.Helper()
		if code, _, stderr := try(t, "reload", "--config-root", n.root); code != 0 {
			t.Errorf("reload: %d %s", code, stderr)
		}
	}
	if err := os.Remove(n.dropIn); err != nil {
		t.Fatal(err)
	}
	reload()
	registered(false)
	observe("runs", "no", "no")
	stop = n.serveSidecar()
	registered(true)
	observe("runs", "no", "runs")
	n.end(n.daemon)
	stop()
	n.addDropIn()
	observe("stopped", "yes", "no")

	want := sidecarTable(t)
	if len(want) != 8 {
		t.Errorf("the table has %d rows", len(want))
	}
	for row, cells := range got {
		if fmt.Sprint(cells) != fmt.Sprint(want[row]) {
			t.Errorf("%q: %q, the table says %q", row, cells, want[row])
		}
	}
	// The alert that the last column names.
	rules, err := os.ReadFile("../../packaging/prometheus/csi-registrar.rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	severities := map[string]string{}
	for rule := range strings.SplitSeq(string(rules), "- alert: ") {
		if name, text, _ := strings.Cut(rule, "\n"); name == "CSIDriverConflict" && strings.Contains(text, `{problem="conflict"}`) {
			_, after, _ := strings.Cut(text, "for: ")
			after, _, _ = strings.Cut(after, "\n")
			_, severity, _ := strings.Cut(text, "severity: ")
			severities[after], _, _ = strings.Cut(severity, "\n")
		}
	}
	if !maps.Equal(severities, map[string]string{"10m": "info", "1d": "warning"}) {
		t.Errorf("CSIDriverConflict after: severity is %v", severities)
	}
}

// A csi-registrar with the flags of node-driver-registrar, in the driver's pod, beside that of the
// host: the host's has the path, the other one waits, healthy, and publishes when the path is free.
func TestSidecarModeBesideTheDaemon(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: nothing is taken from another user")
	}
	t.Parallel()
	n := newBesideNode(t)
	n.addDropIn()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().String()
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	beside := exec.CommandContext(context.WithoutCancel(t.Context()), os.Args[0], "run", "--csi-address="+n.socket,
		"--kubelet-registration-path="+n.socket, "--plugin-registration-path="+n.registry, "--http-endpoint="+address)
	beside.Env = append(os.Environ(), asProgram+"=1")
	beside.Stderr = n.log
	if err := beside.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = beside.Process.Kill() }() // it has ended, if the test passed
	healthy := func() bool {
		r, err := http.Get("http://" + address + "/healthz")
		if err != nil {
			return false
		}
		_, _ = io.Copy(io.Discard, r.Body)
		return errors.Join(r.Body.Close()) == nil && r.StatusCode == 200
	}
	registered := func() bool { _, ok := n.kubelet.Registered()["d.example"]; return ok }
	n.eventually("the sidecar registers the driver", func() bool { return registered() && healthy() })

	n.start()
	n.eventually("the daemon registers the driver", func() bool { state, _ := n.status(); return state == "registered" })
	n.eventually("the sidecar is healthy", healthy)
	for range 2 { // a restart keeps the socket
		n.end(n.daemon)
		n.start()
		n.eventually("the daemon has the driver", func() bool { state, _ := n.status(); return state == "registered" })
		n.eventually("the sidecar is healthy", healthy)
	}
	if err := os.Remove(n.dropIn); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr := try(t, "reload", "--config-root", n.root); code != 0 {
		t.Errorf("reload: %d %s", code, stderr)
	}
	n.eventually("the sidecar registers the driver again", func() bool {
		c, err := net.Dial("unix", filepath.Join(n.registry, "d.example-reg.sock"))
		return err == nil && c.Close() == nil && registered() && healthy()
	})
	n.end(beside)
}

// believer makes a node whose kubelet an earlier daemon told a wrong endpoint, as a compromised one
// could: its listener and its record are in place, and the daemon has ended. The driver serves at
// the right one.
func believer(t *testing.T) (n *besideNode, wrong string) {
	t.Helper()
	n = newBesideNode(t)
	right := n.socket
	wrong = filepath.Join(n.root, "wrong.sock")
	accomplice := fake.NewDriver(wrong, fake.Healthy("d.example"))
	if _, err := accomplice.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(accomplice.Kill)
	n.socket = wrong
	n.addDropIn()
	n.start()
	n.told(wrong)
	// The record is written before the kubelet's call is answered: without the answer the kubelet
	// would ask the next process.
	n.eventually("it is recorded", func() bool { state, _ := n.status(); return state == "registered" && n.kubelet.Idle() })
	if err := n.daemon.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = n.daemon.Wait() // it was killed
	n.socket = right
	n.addDropIn()
	return n, wrong
}

// told waits until the kubelet has registered the driver with an endpoint.
func (n *besideNode) told(endpoint string) {
	n.Helper()
	n.eventually("the kubelet has "+endpoint, func() bool { return n.kubelet.Registered()["d.example"].Endpoint == endpoint })
}

// forge makes the record say what the files say.
func (n *besideNode) forge(wrong string) {
	n.Helper()
	path := filepath.Join(n.root, "run/csi-registrar/registrations/d.example.json")
	record, err := os.ReadFile(path)
	if err != nil {
		n.Fatal(err)
	}
	if !strings.Contains(string(record), wrong) {
		n.Fatalf("the record does not have %s: %s", wrong, record)
	}
	n.write(path, strings.ReplaceAll(string(record), wrong, n.socket))
	if err := os.Chmod(path, 0o600); err != nil {
		n.Fatal(err)
	}
}

// An earlier process announced an endpoint that is not configured: it is replaced although the
// driver is absent.
func TestTakeoverWithItsRecord(t *testing.T) {
	t.Parallel()
	for _, driver := range []string{"serves", "is absent"} {
		t.Run("the driver "+driver, func(t *testing.T) {
			n, wrong := believer(t)
			if driver == "is absent" {
				n.driver.Kill()
			}
			n.start()
			n.eventually("the kubelet does not have "+wrong, func() bool { return n.kubelet.Registered()["d.example"].Endpoint != wrong })
			if driver == "is absent" {
				if _, err := n.driver.Start(); err != nil {
					t.Fatal(err)
				}
			}
			n.told(n.socket)
			n.end(n.daemon)
		})
	}
}

// If the forged record agrees with the files, nothing shows that the kubelet was told another
// endpoint. The commands in SECURITY.md correct that.
func TestTakeoverWithAForgedRecord(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"reregister", "stop and start"} {
		t.Run(what, func(t *testing.T) {
			n, wrong := believer(t)
			n.forge(wrong)
			n.start()
			n.eventually("it believes", func() bool { state, code := n.status(); return state == "registered" && code == 0 })
			n.told(wrong) // as SECURITY.md says
			switch what {
			case "reregister":
				n.eventually("the driver is registered again", func() bool { // once it was asked
					code, _, _ := try(t, "reregister", "d.example", "--config-root", n.root)
					return code == 0
				})
			default:
				n.end(n.daemon)
				if err := n.manager.Drop(); err != nil { // what a stop does to the store
					t.Fatal(err)
				}
				n.start()
			}
			n.told(n.socket)
			n.end(n.daemon)
		})
	}
}
