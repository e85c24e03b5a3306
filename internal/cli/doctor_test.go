package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/test/fake"
	"csi-registrar/internal/tool/doctor"
)

// examined returns a report with findings.
func examined() doctor.Report {
	return doctor.Report{
		Findings: []doctor.Finding{
			{ID: "root-dir-mismatch", Step: "kubelet", Severity: doctor.Problem,
				Found:    "kubelet (pid 812, kubelet.service) has the root directory /data/kubelet, but csi-registrar publishes below /var/lib/kubelet (default)",
				Expected: `root_dir = "/data/kubelet" under [kubelet]`,
				Fix: []doctor.Fix{{Command: safetext.Run("mkdir", "-p", "/etc/csi-registrar/conf.d")},
					{Command: safetext.Command{Name: "printf", Args: []string{`[kubelet]\nroot_dir = "%s"\n`, "/data/kubelet"}, Stdout: "/etc/csi-registrar/conf.d/90-kubelet.toml"}},
					{Command: safetext.Run("systemctl", "daemon-reload")}, {Command: safetext.Run("systemctl", "restart", "csi-registrar.service")}}},
			{ID: "driver-socket-stale", Driver: "nfs.csi.k8s.io", Step: "socket", Severity: doctor.Problem,
				Found:    "nobody listens on /run/csi-nfs/csi.sock: it was left behind by a driver that has ended",
				Expected: "the driver runs and listens there",
				Fix: []doctor.Fix{{Comment: "restart the driver: its unit or pod is not known, because it has not served the socket since the daemon started"},
					{Command: safetext.Run("rm", "/run/csi-nfs/csi.sock")}}},
			{ID: "http-failed", Step: "http", Severity: doctor.Warning, Found: "csi-registrar-http.socket, for health and metrics on 127.0.0.1:9809, has failed"},
		},
		Checks: []doctor.Check{
			{Step: "configuration", Result: doctor.OK, Says: "3 files, 2 drivers"},
			{Step: "kubelet", Result: doctor.Problem, Says: "kubelet (pid 812, kubelet.service) has the root directory /data/kubelet, but csi-registrar publishes below /var/lib/kubelet (default)"},
			{Step: "unit", Result: doctor.Skipped, Says: "systemd does not run here"},
			{Step: "http", Result: doctor.Warning, Says: "csi-registrar-http.socket, for health and metrics on 127.0.0.1:9809, has failed"},
			{Driver: "nfs.csi.k8s.io", Step: "socket", Result: doctor.Problem, Says: "nobody listens on /run/csi-nfs/csi.sock: it was left behind by a driver that has ended"},
			{Driver: "nfs.csi.k8s.io", Step: "registration", Result: doctor.Warning, Says: "registered"},
			{Driver: "ebs.csi.aws.com", Step: "GetPluginInfo", Result: doctor.OK, Says: "ebs.csi.aws.com 1.2", TookMS: 0.42},
			{Driver: "ebs.csi.aws.com", Step: "NodeGetInfo", Result: doctor.OK, Says: "node id i-0123, at most 25 volumes, 1 topology keys", TookMS: 5020.345},
			{Driver: "ebs.csi.aws.com", Step: "registration", Result: doctor.OK, Says: "registered, confirmed by the kubelet 2026-01-02 15:04:05"},
		},
	}
}

func TestDoctorText(t *testing.T) {
	faulty := examined()
	healthy := doctor.Report{Healthy: true, Checks: faulty.Checks[6:]}
	warned := doctor.Report{Healthy: true, Checks: faulty.Checks[3:4], Findings: faulty.Findings[2:]}
	for name, c := range map[string]struct {
		r     doctor.Report
		p     page
		whole bool
	}{
		"faulty":  {faulty, page{columns: 80}, false},
		"colour":  {faulty, page{columns: 80, colour: true}, false},
		"narrow":  {faulty, page{columns: 50}, false},
		"healthy": {healthy, page{columns: 80}, false},
		"named":   {healthy, page{columns: 80}, true},
		"warned":  {warned, page{columns: 80}, false},
	} {
		got := doctorText(c.r, c.p, c.whole)
		golden(t, "doctor/"+name+".txt", got)
		harmless(t, name, got, c.p.colour)
		for line := range strings.Lines(got) {
			whole := strings.Contains(line, "printf ") || strings.Contains(line, "systemctl ")
			if n := visibleLength(line); n > c.p.columns && !whole {
				t.Errorf("%s: %d columns: %s", name, n, line)
			}
		}
	}
}

// A healthy node is a page.
func TestDoctorOfManyDrivers(t *testing.T) {
	var r doctor.Report
	for i := range 20 {
		d := fmt.Sprintf("a-driver-%d.csi.example.com", i)
		r.Checks = append(r.Checks, doctor.Check{Driver: d, Step: "Probe", Result: doctor.OK})
	}
	if text := doctorText(r, page{columns: 80}, false); strings.Count(text, "\n") > 16 || !strings.Contains(text, "20 drivers without findings\n  ok ") || !strings.Contains(text, ", and 17 more\n") {
		t.Errorf("%s", text)
	}
}

type noSystemd struct{}

func (noSystemd) Show(context.Context, string, ...string) (map[string]string, error) {
	return nil, doctor.ErrNoSystemd
}

func (noSystemd) Journal(context.Context, string, ...string) []string { return nil }

func TestDoctorOnAnEmptyNode(t *testing.T) {
	fake.CheckLeaks(t)
	root := fake.ShortDir(t)
	if err := os.MkdirAll(filepath.Join(root, "proc/1"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "proc/1/comm"), []byte("init\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	o := doctor.Options{Source: config.Source{Root: root}, Units: noSystemd{}, Root: root, NodeInfoTimeout: time.Second}
	run := func(asJSON bool) (int, string) {
		s := newSession()
		code := s.env.report(runDoctor(t.Context(), s.env, o, asJSON))
		if errs := s.stderr.String(); errs != "" {
			t.Errorf("standard error has %q", errs)
		}
		return code, s.stdout.String()
	}
	code, out := run(true)
	var doc struct {
		Healthy  *bool
		Findings []struct {
			ID, Step, Severity, Found string
			Fix                       []string
		}
		Checks []struct{ Step, Result string }
	}
	if err := json.Unmarshal([]byte(out), &doc); err != nil {
		t.Fatal(err)
	}
	if code != exitFailed || doc.Healthy == nil || *doc.Healthy || len(doc.Findings) == 0 || doc.Findings[0].ID != "no-kubelet" || doc.Findings[0].Step != "kubelet" || len(doc.Checks) == 0 {
		t.Errorf("code %d\n%s", code, out)
	}
	if fix := doc.Findings[0].Fix; len(fix) != 2 || fix[0] != "systemctl start kubelet.service" {
		t.Errorf("%+v", fix)
	}
	o.Drivers = []string{"nfs.csi.k8s.io"}
	code, out = run(false)
	if code != exitFailed || !strings.HasPrefix(out, "the node\n") || !strings.Contains(out, "no file configures it") {
		t.Errorf("code %d\n%s", code, out)
	}
}
