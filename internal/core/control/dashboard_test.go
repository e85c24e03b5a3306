package control

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"csi-registrar/internal/node/status"
)

const (
	dashboardFile = "../../../packaging/grafana/csi-registrar.json"
	rulesFile     = "../../../packaging/prometheus/csi-registrar.rules.yml"
)

// states are the values of the label state, in the order of a driver's life.
var states = []string{
	status.Disabled, status.Invalid,
	string(status.Absent), string(status.Starting), string(status.Ready), string(status.Hanging), string(status.Mismatch),
	string(status.Published), string(status.Registered), string(status.Refused), string(status.Conflict),
}

// dashboard has the parts of Grafana's dashboard that the tests check.
type dashboard struct {
	UID           string `json:"uid"`
	Title         string `json:"title"`
	SchemaVersion int    `json:"schemaVersion"`
	Templating    struct {
		List []struct {
			Name  string
			Query any // a string for a data source, otherwise an object
		}
	}
	Panels []struct {
		ID          int
		Type, Title string
		Description string
		GridPos     struct{ X, Y, W, H int }
		Targets     []struct {
			RefID string `json:"refId"`
			Expr  string
			Range bool
		}
	}
}

func readDashboard(t *testing.T) (d dashboard) {
	t.Helper()
	text, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestDashboard(t *testing.T) {
	d := readDashboard(t)
	if d.UID == "" || d.Title == "" || d.SchemaVersion < 36 || len(d.Panels) == 0 {
		t.Errorf("uid %q, title %q, schema version %d, %d panels", d.UID, d.Title, d.SchemaVersion, len(d.Panels))
	}
	ids, taken := map[int]string{}, map[[2]int]string{}
	for _, p := range d.Panels {
		if other, twice := ids[p.ID]; twice || p.ID <= 0 {
			t.Errorf("panel %q has the id %d, as %q", p.Title, p.ID, other)
		}
		ids[p.ID] = p.Title
		if p.Type == "" || p.Title == "" || p.Type != "row" && (p.Description == "" || len(p.Targets) == 0) {
			t.Errorf("panel %d (%q) has no type, title, description or query", p.ID, p.Title)
		}
		refs := map[string]bool{}
		for _, q := range p.Targets {
			if q.RefID == "" || refs[q.RefID] || q.Expr == "" {
				t.Errorf("panel %q: query %q without a name of its own, or empty", p.Title, q.RefID)
			}
			refs[q.RefID] = true
		}
		g := p.GridPos
		if g.W < 1 || g.H < 1 || g.X < 0 || g.X+g.W > 24 {
			t.Errorf("panel %q is outside of the grid: %+v", p.Title, g)
		}
		for x := g.X; x < g.X+g.W; x++ {
			for y := g.Y; y < g.Y+g.H; y++ {
				if other, twice := taken[[2]int{x, y}]; twice {
					t.Fatalf("panels %q and %q overlap", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
	}
}

var (
	metricName = regexp.MustCompile(`[a-z_:]*csi_registrar_[a-z0-9_:]+`)
	record     = regexp.MustCompile(`(?m)- record: (\S+)$`)
	selector   = regexp.MustCompile(`csi_registrar_[a-z0-9_:]+(\{[^}]*\})?`)
	variable   = regexp.MustCompile(`\$\{?([a-zA-Z_]+)`)
	matcher    = regexp.MustCompile(`\b(state|result)\s*(?:=~?|!~|!=)\s*"([^"]*)"`)
)

// After a metric is renamed, an alert with the old name would never fire.
func TestDashboardAndRulesNameExistingMetrics(t *testing.T) {
	there := map[string]bool{}
	for _, name := range metricName.FindAllString(string(exposition(sample())), -1) {
		there[name] = true
	}
	values := map[string][]string{"state": states, "result": {"registered", "refused"}}
	check := func(where, expr string) {
		for _, name := range metricName.FindAllString(expr, -1) {
			if !there[name] {
				t.Errorf("%s: there is no metric %s", where, name)
			}
		}
		for _, m := range matcher.FindAllStringSubmatch(expr, -1) {
			for v := range strings.SplitSeq(m[2], "|") {
				if !slices.Contains(values[m[1]], v) {
					t.Errorf("%s: the label %s is never %q", where, m[1], v)
				}
			}
		}
	}
	rules, err := os.ReadFile(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	recorded := record.FindAllStringSubmatch(string(rules), -1)
	if len(recorded) == 0 || len(recorded) > 10 {
		t.Errorf("%d recording rules, at most 10 are good", len(recorded))
	}
	used := string(rules)
	for _, m := range recorded {
		there[m[1]] = true
		used = strings.Replace(used, m[0], "", 1)
	}
	check("rules", used)

	d := readDashboard(t)
	variables := map[string]bool{"__rate_interval": true}
	for _, v := range d.Templating.List {
		check("variable "+v.Name, fmt.Sprint(v.Query))
		variables[v.Name] = true
	}
	shown := map[string]bool{}
	for _, name := range metricName.FindAllString(used, -1) {
		shown[name] = strings.Contains(name, ":")
	}
	for _, p := range d.Panels {
		for _, q := range p.Targets {
			check("panel "+p.Title, q.Expr)
			for _, name := range metricName.FindAllString(q.Expr, -1) {
				shown[name] = true
			}
			for _, v := range variable.FindAllStringSubmatch(q.Expr, -1) {
				if !variables[v[1]] {
					t.Errorf("panel %q: there is no variable %s", p.Title, v[1])
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(there)) {
		if !shown[name] {
			t.Errorf("no panel shows %s", name)
		}
	}
}

// TestMonitoringPage compares the page with the rules: it has all alerts, and what it says can be
// dropped is what no rule reads.
func TestMonitoringPage(t *testing.T) {
	page, err := os.ReadFile("../../../packaging/doc/monitoring.md")
	if err != nil {
		t.Fatal(err)
	}
	rules, err := os.ReadFile(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)- alert: (\w+)$`).FindAllStringSubmatch(string(rules), -1) {
		if !regexp.MustCompile(`\b` + m[1] + `\b`).Match(page) {
			t.Errorf("monitoring.md does not have the alert %s", m[1])
		}
	}
	var want []string
	// rollout.md reads driver_up.
	for _, name := range metricName.FindAllString(string(exposition(sample())), -1) {
		if !regexp.MustCompile(name+`\b`).Match(rules) && name != "csi_registrar_driver_up" {
			want = append(want, strings.TrimPrefix(name, "csi_registrar_"))
		}
	}
	slices.Sort(want)
	want = slices.Compact(want)
	list := regexp.MustCompile(`regex: csi_registrar_\(([a-z_|]+)\)\n`).FindSubmatch(page)
	if list == nil {
		t.Fatal("monitoring.md does not say what can be dropped")
	}
	got := strings.Split(string(list[1]), "|")
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("monitoring.md drops %q, the rules do not read %q", got, want)
	}
}

// The first row costs the same for any number of nodes: it reads what the rules recorded. The
// second one reads the series of the chosen nodes.
func TestDashboardDoesNotGrowWithTheNodes(t *testing.T) {
	rows, queries := 0, map[bool]int{}
	for _, p := range readDashboard(t).Panels {
		if p.Type == "row" {
			rows++
		}
		for _, q := range p.Targets {
			for _, s := range selector.FindAllString(q.Expr, -1) {
				all := rows == 1
				queries[all]++
				if name, _, _ := strings.Cut(s, "{"); all != strings.Contains(name, ":") || all == strings.Contains(s, `{instance=~"$instance"`) {
					t.Errorf("row %d, panel %q: %s", rows, p.Title, s)
				}
			}
		}
	}
	if rows != 2 || queries[true] < 10 || queries[false] < 20 {
		t.Errorf("%d rows, queries %v", rows, queries)
	}
}

// The panel "State" numbers the states, and each number needs a text.
func TestDashboardShowsEveryState(t *testing.T) {
	text, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	for i, state := range states {
		number := regexp.MustCompile(`(\d+) \* csi_registrar_driver_state\{[^}]*state=\\"` + state + `\\"\}`).FindSubmatch(text)
		if number == nil {
			t.Errorf("state %d, %s, is not in the panel", i, state)
			continue
		}
		if mapped := fmt.Sprintf(`"%s": {
                  "text": "%s",`, number[1], state); !strings.Contains(string(text), mapped) {
			t.Errorf("%s is %s there, and has no text of its own", state, number[1])
		}
	}
}

func TestDashboardQueriesParse(t *testing.T) {
	tool := promtool(t)
	type rule struct {
		Record string `json:"record"`
		Expr   string `json:"expr"`
	}
	var rules []rule
	for _, p := range readDashboard(t).Panels {
		for _, q := range p.Targets {
			expr := strings.NewReplacer("$__rate_interval", "5m", "$instance", ".*", "$driver", ".*").Replace(q.Expr)
			rules = append(rules, rule{fmt.Sprintf("panel:%d:%s", p.ID, q.RefID), expr})
		}
	}
	// JSON is YAML.
	file := filepath.Join(t.TempDir(), "rules.yml")
	text, err := json.Marshal(map[string]any{"groups": []any{map[string]any{"name": "dashboard", "rules": rules}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), tool, "check", "rules", file).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
