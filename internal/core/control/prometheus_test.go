package control

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/node/status"
)

// The nodes of TestPrometheus. With 5,000 of them and 13 drivers there are 500,000 series.
const (
	promNodes   = 5000
	promDrivers = 13
	promLimit   = time.Second     // for each panel
	promEvery   = 5 * time.Second // between two evaluations of the rules
)

// The last of ten minutes of samples, one a minute. They are within one block of two hours.
var promEnd = time.Date(2026, 1, 1, 1, 10, 0, 0, time.UTC)

// TestPrometheus runs a real Prometheus with the series of a large cluster, in which the rollout of
// one driver has failed and many other things are wrong on some nodes. It measures the evaluation
// of all rules, and each query of the dashboard. Suite monitoring runs it.
func TestPrometheus(t *testing.T) {
	cache := os.Getenv("MONITORING_CACHE")
	if cache == "" {
		t.Skip("MONITORING_CACHE is not set: scripts/test monitoring sets it")
	}
	data := filepath.Join(cachedSeries(t, cache), "data")
	rules := alwaysAtTheEnd(t)
	p := startPrometheus(t, data, rules)

	series := p.scalar(t, `count({__name__=~"up|csi_registrar_.*"})`, promEnd)
	t.Logf("%.0f series", series)
	if series < 500_000 {
		t.Errorf("%.0f series, 500,000 are the least", series)
	}
	p.measureRules(t, int(series))
	now := time.Now()
	for _, c := range []struct {
		expr  string
		least float64
		most  float64
	}{
		{`driver:csi_registrar_missing:ratio{driver="d7.example"}`, 0.9, 1},
		{`count(instance:csi_registrar_problem:5m)`, promNodes, 2 * promNodes},
		{`driver:csi_registrar_nodes:count{driver=""}`, promNodes, promNodes},
		{`count(ALERTS{alertname="CSIDriverMissing",driver="d7.example"})`, 1, 1},
		{`count(ALERTS)`, 10, 40},
	} {
		if got := p.scalar(t, c.expr, now); got < c.least || got > c.most {
			t.Errorf("%s is %v, %v to %v is expected", c.expr, got, c.least, c.most)
		}
	}
	recorded := p.query(t, `{__name__=~".*:csi_registrar_.*"}`, now)
	p.stop(t)

	// The series that the rules recorded, for the range of the dashboard.
	history := filepath.Join(t.TempDir(), "history")
	writeFile(t, history, func(w io.Writer) {
		for _, r := range recorded {
			samples, name := 6*60, r.Metric["__name__"]
			if strings.HasPrefix(name, "instance:") {
				samples = 1
			}
			var labels []string
			for k, v := range r.Metric {
				if k != "__name__" {
					labels = append(labels, fmt.Sprintf("%s=%q", k, v))
				}
			}
			for i := range samples {
				fmt.Fprintf(w, "%s{%s} %v %d\n", name, strings.Join(labels, ","), r.Value[1], promEnd.Add(-time.Duration(samples-1-i)*time.Minute).Unix())
			}
		}
		fmt.Fprintln(w, "# EOF")
	})
	createBlocks(t, history, data)
	startPrometheus(t, data, "").measurePanels(t)
}

// promDocument is the status of a node.
func promDocument(node, minute int) status.Document {
	start := promEnd.Add(-24 * time.Hour)
	s := status.Document{
		Version: "0.1.0", StartedAt: start, NodeVolumes: &status.NodeVolumes{},
		Kubelet: status.Kubelet{PID: 1, ConfirmedAt: start},
	}
	if node%10 == 0 {
		s.Version = "0.2.0"
	}
	for i := range promDrivers {
		s.Drivers = append(s.Drivers, status.Driver{
			Name: fmt.Sprintf("d%d.example", i), State: "registered", Driver: status.Ready, Registration: status.Registered,
			LastGetInfoAt: start, Accepted: 1, Took: time.Second / 2,
		})
	}
	set := func(driver int, state status.RegistrationState, of status.DriverState) {
		s.Drivers[driver].State, s.Drivers[driver].Registration, s.Drivers[driver].Driver = status.State(of, state), state, of
	}
	if minute > 2 {
		set(7, status.None, status.Absent)
	}
	switch node % 100 {
	case 3:
		s.ConfigError = "error"
	case 4:
		s.Kubelet.EndedAt = start
	case 5:
		set(0, status.Registered, status.Absent)
	case 6:
		set(1, status.Refused, status.Ready)
	case 7:
		set(2, status.Conflict, status.Ready)
		s.Drivers[2].ServedBy.PID = 1
	case 8:
		s.Stuck = []status.StuckCall{{Path: "/mnt/csi.sock"}}
	case 9:
		s.Polling = "no inotify"
	case 10:
		s.Drivers[3].RestartsTotal, s.Drivers[3].DriverRestarts = uint64(minute), min(minute, status.ManyRestarts)
	case 11:
		s.Drivers[4].NotKept, s.Drivers[4].DampedUntil = "full", promEnd
	}
	return s
}

// promText has the samples of a node in a minute, as Prometheus stores them.
func promText(node, minute int) []byte {
	var out bytes.Buffer
	labels := fmt.Sprintf(`job="csi-registrar",instance="node-%d:9809"`, node)
	at := promEnd.Add(time.Duration(minute-10) * time.Minute).Unix()
	up := 1
	if node%500 == 12 {
		up = 0
	}
	fmt.Fprintf(&out, "up{%s} %d %d\n", labels, up, at)
	if up == 0 {
		return out.Bytes()
	}
	for line := range bytes.Lines(exposition(promDocument(node, minute))) {
		if line[0] == '#' {
			continue
		}
		name, value, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		name, own, found := bytes.Cut(name, []byte("{"))
		if found {
			own = append([]byte(","), bytes.TrimSuffix(own, []byte("}"))...)
		}
		fmt.Fprintf(&out, "%s{%s%s} %s %d\n", name, labels, own, value, at)
	}
	return out.Bytes()
}

// cachedSeries returns a directory with a copy of the blocks, which are made once.
func cachedSeries(t *testing.T, cache string) (dir string) {
	t.Helper()
	sum := sha256.New()
	for node := range 100 {
		sum.Write(promText(node, 10))
	}
	fmt.Fprint(sum, promNodes, promDrivers, promEnd)
	blocks := filepath.Join(cache, fmt.Sprintf("%x", sum.Sum(nil)[:8]))
	if _, err := os.Stat(blocks); err != nil {
		if err := errors.Join(os.RemoveAll(cache), os.MkdirAll(cache, 0o755)); err != nil {
			t.Fatal(err)
		}
		text := filepath.Join(cache, "text")
		start := time.Now()
		writeFile(t, text, func(w io.Writer) {
			for minute := range 11 {
				for node := range promNodes {
					if _, err := w.Write(promText(node, minute)); err != nil {
						t.Fatal(err)
					}
				}
			}
			fmt.Fprintln(w, "# EOF")
		})
		createBlocks(t, text, blocks+".new")
		if err := errors.Join(os.Remove(text), os.Rename(blocks+".new", blocks)); err != nil {
			t.Fatal(err)
		}
		t.Logf("generated in %s", time.Since(start).Round(time.Second))
	}
	dir, err := os.MkdirTemp(cache, "run")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	// Prometheus never changes a file of a block.
	err = filepath.WalkDir(blocks, func(path string, entry os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		to := filepath.Join(dir, "data", strings.TrimPrefix(path, blocks))
		if entry.IsDir() {
			return os.MkdirAll(to, 0o755)
		}
		return os.Link(path, to)
	})
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func createBlocks(t *testing.T, text, dir string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), promtool(t), "tsdb", "create-blocks-from", "openmetrics", text, dir).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func writeFile(t *testing.T, path string, write func(io.Writer)) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	w := bufio.NewWriterSize(f, 1<<20)
	write(w)
	if err := errors.Join(w.Flush(), f.Close()); err != nil {
		t.Fatal(err)
	}
}

// alwaysAtTheEnd returns a copy of the rules that read the series at promEnd, whatever the time is.
func alwaysAtTheEnd(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	metric := regexp.MustCompile(`\b[a-z_:]*(?:up\b|node_textfile_mtime_seconds|csi_registrar_)[a-z0-9_:]*(\{[^}]*\})?(\[\w+\])?`)
	var out strings.Builder
	expr, changed := false, 0
	for line := range strings.Lines(string(text)) {
		key := strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(key, "expr:"):
			expr = true
		case regexp.MustCompile(`^(for:|labels:|annotations:|- |#)`).MatchString(key):
			expr = false
		}
		if expr {
			line = metric.ReplaceAllStringFunc(line, func(s string) string {
				if name, _, _ := strings.Cut(s, "{"); strings.Contains(name, ":") || strings.HasPrefix(name, "group") {
					return s
				}
				changed++
				return fmt.Sprint(s, " @ ", promEnd.Unix())
			})
		}
		out.WriteString(line)
	}
	if changed < 20 {
		t.Fatalf("%d selectors were changed:\n%s", changed, out.String())
	}
	file := filepath.Join(t.TempDir(), "rules.yml")
	if err := os.WriteFile(file, []byte(out.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

type prometheus struct {
	process *exec.Cmd
	url     string
	log     *bytes.Buffer
}

// startPrometheus starts a Prometheus on two processors, with the rules if there are any.
func startPrometheus(t *testing.T, data, rules string) *prometheus {
	t.Helper()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().String()
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	config := map[string]any{"global": map[string]string{"evaluation_interval": promEvery.String()}}
	if rules != "" {
		config["rule_files"] = []string{rules}
	}
	text, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "prometheus.yml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	p := &prometheus{url: "http://" + address, log: &bytes.Buffer{}}
	p.process = exec.Command("prometheus", "--config.file="+file, "--storage.tsdb.path="+data, "--web.listen-address="+address,
		"--storage.tsdb.retention.time=100y", "--storage.tsdb.min-block-duration=2h", "--storage.tsdb.max-block-duration=2h")
	p.process.Env = append(os.Environ(), "GOMAXPROCS=2")
	p.process.Stdout, p.process.Stderr = p.log, p.log
	p.process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.stop(t) })
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		if answer, err := http.Get(p.url + "/-/ready"); err == nil {
			_ = answer.Body.Close()
			if answer.StatusCode == http.StatusOK {
				return p
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("prometheus is not ready:\n%s", p.log)
		}
	}
}

func (p *prometheus) stop(t *testing.T) {
	if p.process == nil {
		return
	}
	if err := p.process.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	if err := p.process.Wait(); err != nil {
		t.Errorf("%v\n%s", err, p.log)
	}
	p.process = nil
}

// get reads an answer of the API, and returns how long that took.
func (p *prometheus) get(t *testing.T, path string, query url.Values, data any) time.Duration {
	t.Helper()
	start := time.Now()
	request, err := http.NewRequestWithContext(context.WithoutCancel(t.Context()), http.MethodGet, p.url+"/api/v1/"+path+"?"+query.Encode(), nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(answer.Body)
	took := time.Since(start)
	if err := errors.Join(err, answer.Body.Close()); err != nil {
		t.Fatal(err)
	}
	var document struct {
		Status string
		Error  string
		Data   json.RawMessage
	}
	if err := json.Unmarshal(body, &document); err != nil || document.Status != "success" {
		t.Fatalf("%s %s: %v %s", path, query, err, document.Error)
	}
	if err := json.Unmarshal(document.Data, data); err != nil {
		t.Fatal(err)
	}
	return took
}

type promSample struct {
	Metric map[string]string
	Value  [2]any
}

func (p *prometheus) query(t *testing.T, expr string, at time.Time) []promSample {
	t.Helper()
	var data struct{ Result []promSample }
	p.get(t, "query", url.Values{"query": {expr}, "time": {fmt.Sprint(at.Unix())}}, &data)
	return data.Result
}

func (p *prometheus) scalar(t *testing.T, expr string, at time.Time) (value float64) {
	t.Helper()
	result := p.query(t, expr, at)
	if len(result) != 1 {
		t.Errorf("%s has %d results", expr, len(result))
		return 0
	}
	if _, err := fmt.Sscan(fmt.Sprint(result[0].Value[1]), &value); err != nil {
		t.Fatal(err)
	}
	return value
}

// measureRules waits for five evaluations; the fastest one counts. The rules must read fewer
// samples than there are series, a figure that is the same in each run. Their time is not: on two
// quiet processors it is 0.7 to 1.5 s. It must be less than promEvery, so that none is left out.
func (p *prometheus) measureRules(t *testing.T, series int) {
	t.Helper()
	type group struct {
		EvaluationTime float64
		LastEvaluation time.Time
		Rules          []struct {
			Name, Query, LastError, Health string
			EvaluationTime                 float64
		}
	}
	var best group
	seen := map[time.Time]bool{}
	for deadline := time.Now().Add(5 * time.Minute); len(seen) < 5; time.Sleep(time.Second) {
		var data struct{ Groups []group }
		p.get(t, "rules", nil, &data)
		if len(data.Groups) != 1 {
			t.Fatalf("%d groups", len(data.Groups))
		}
		if g := data.Groups[0]; !g.LastEvaluation.IsZero() && !seen[g.LastEvaluation] {
			if len(seen) == 0 || g.EvaluationTime < best.EvaluationTime {
				best = g
			}
			seen[g.LastEvaluation] = true
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d evaluations in 5 minutes", len(seen))
		}
	}
	samples := 0
	for _, r := range best.Rules {
		if r.Health != "ok" {
			t.Errorf("%s is %s: %s", r.Name, r.Health, r.LastError)
		}
		var data struct {
			Stats struct {
				Samples struct{ TotalQueryableSamples int }
			}
		}
		p.get(t, "query", url.Values{"query": {r.Query}, "stats": {"all"}}, &data)
		read := data.Stats.Samples.TotalQueryableSamples
		samples += read
		if read > series/100 {
			t.Logf("%4.0f ms %6d samples %s", r.EvaluationTime*1000, read, r.Name)
		}
	}
	t.Logf("%4.0f ms %6d samples all rules", best.EvaluationTime*1000, samples)
	if best.EvaluationTime >= promEvery.Seconds() {
		t.Errorf("the rules take %.1f s, and are evaluated each %s", best.EvaluationTime, promEvery)
	}
	if samples == 0 || samples >= series {
		t.Errorf("the rules read %d samples; fewer than the %d series is good", samples, series)
	}
}

// measurePanels asks each query three times; the fastest one counts. As in Grafana, a range has a
// point for each two or three pixels.
func (p *prometheus) measurePanels(t *testing.T) {
	t.Helper()
	variables := strings.NewReplacer("$__rate_interval", "4m", "$instance", "node-4:9809", "$driver", ".*")
	for _, panel := range readDashboard(t).Panels {
		for _, q := range panel.Targets {
			path, query := "query", url.Values{"query": {variables.Replace(q.Expr)}, "time": {fmt.Sprint(promEnd.Unix())}}
			if q.Range {
				path = "query_range"
				query.Set("start", fmt.Sprint(promEnd.Add(-6*time.Hour).Unix()))
				query.Set("end", fmt.Sprint(promEnd.Unix()))
				query.Set("step", "30")
			}
			var best time.Duration
			var data struct{ Result []json.RawMessage }
			for i := range 3 {
				if took := p.get(t, path, query, &data); i == 0 || took < best {
					best = took
				}
			}
			t.Logf("%4d ms %4d series %s %s", best.Milliseconds(), len(data.Result), panel.Title, q.RefID)
			if best > promLimit {
				t.Errorf("panel %q, query %s needs %s, at most %s is good", panel.Title, q.RefID, best, promLimit)
			}
			// These have series only for what went wrong.
			if panel.Title != "Degraded" && panel.Title != "Registered again" && len(data.Result) == 0 {
				t.Errorf("panel %q is empty", panel.Title)
			}
		}
	}
}
