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
)

const (
	dashboardFile = "../../packaging/grafana/csi-registrar.json"
	rulesFile     = "../../packaging/prometheus/csi-registrar.rules.yml"
)

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
		if p.Type == "" || p.Title == "" || p.Description == "" || len(p.Targets) == 0 {
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
	metricName = regexp.MustCompile(`\bcsi_registrar_[a-z_]+`)
	variable   = regexp.MustCompile(`\$\{?([a-zA-Z_]+)`)
	matcher    = regexp.MustCompile(`\b(state|result)\s*(?:=~?|!~|!=)\s*"([^"]*)"`)
)

// After a metric is renamed, an alert with the old name would never fire.
func TestDashboardAndRulesNameExistingMetrics(t *testing.T) {
	there := map[string]bool{}
	for _, name := range metricName.FindAllString(string(exposition(sample(), 0)), -1) {
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
	check("rules", string(rules))

	d := readDashboard(t)
	variables := map[string]bool{"__rate_interval": true}
	for _, v := range d.Templating.List {
		check("variable "+v.Name, fmt.Sprint(v.Query))
		variables[v.Name] = true
	}
	shown := map[string]bool{}
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
	tool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is not here (Debian: prometheus)")
	}
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
