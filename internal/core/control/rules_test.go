package control

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// promtool returns the program that checks rules and metrics.
func promtool(t *testing.T) string {
	t.Helper()
	tool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool is missing (Debian: prometheus)")
	}
	return tool
}

// The types of promtool's test files.
type (
	rulesTest struct {
		Name     string        `json:"name"`
		Interval string        `json:"interval"`
		Series   []inputSeries `json:"input_series"`
		Exprs    []exprTest    `json:"promql_expr_test"`
	}
	inputSeries struct {
		Series string `json:"series"`
		Values string `json:"values"`
	}
	exprTest struct {
		Expr    string      `json:"expr"`
		Time    string      `json:"eval_time"`
		Samples []expSample `json:"exp_samples,omitempty"`
	}
	expSample struct {
		Labels string  `json:"labels"`
		Value  float64 `json:"value"`
	}
)

// nodes are a cluster for some minutes. A node has the values of healthy, and in the minutes for
// which broken is true those of problem.
type nodes struct {
	count, minutes   int
	others           int // nodes before these, in names
	job, cluster     string
	healthy, problem map[string]string
	broken           func(node, minute int) bool
	joins            func(node int) int // the first minute; nil: all are there from the start
}

// The keys of these maps are the name of a metric, and after it labels. A value can be stale, and +
// increases a counter by one, which has no series before.
var (
	scraped = map[string]string{"up": "1", "csi_registrar_start_time_seconds": "1", `csi_registrar_build_info version="1"`: "1"}
	gone    = map[string]string{"csi_registrar_start_time_seconds": "stale", `csi_registrar_build_info version="1"`: "stale"}
)

// driverSeries returns the values of a driver that is in the state, with more of them.
func driverSeries(driver, state string, more map[string]string) map[string]string {
	values := map[string]string{}
	for _, s := range states {
		values[fmt.Sprintf("csi_registrar_driver_state driver=%q,state=%q", driver, s)] = "stale"
	}
	values[fmt.Sprintf("csi_registrar_driver_state driver=%q,state=%q", driver, state)] = "1"
	for metric, value := range more {
		values[fmt.Sprintf("csi_registrar_%s driver=%q", metric, driver)] = value
	}
	return values
}

func problemSeries(driver, problem string) map[string]string {
	return map[string]string{fmt.Sprintf("csi_registrar_driver_problem driver=%q,problem=%q", driver, problem): "1"}
}

func union(all ...map[string]string) map[string]string {
	out := map[string]string{}
	for _, m := range all {
		maps.Copy(out, m)
	}
	return out
}

// series returns the input of promtool.
func (n nodes) series() (out []inputSeries) {
	for node := range n.count {
		for _, key := range slices.Sorted(maps.Keys(union(n.healthy, n.problem))) {
			before, counted := "stale", 0
			var values []string
			for minute := range n.minutes {
				value := n.healthy[key]
				if changed, found := n.problem[key]; found && n.broken(node, minute) {
					value = changed
				}
				if n.joins != nil && minute < n.joins(node) {
					value = "stale"
				}
				if value == "+" {
					counted++
				}
				switch {
				case n.problem[key] == "+" && counted > 0:
					value = strconv.Itoa(counted)
				case value == "":
					value = "stale"
				}
				if value == "stale" && before == "stale" {
					values = append(values, "_")
				} else {
					values = append(values, value)
				}
				before = value
			}
			if slices.ContainsFunc(values, func(v string) bool { return v != "_" }) {
				metric, labels, _ := strings.Cut(key, " ")
				if n.cluster != "" {
					labels = fmt.Sprintf("cluster=%q,%s", n.cluster, labels)
				}
				series := strings.TrimSuffix(fmt.Sprintf("%s{job=%q,instance=\"n%d\",%s", metric, cmp.Or(n.job, "csi-registrar"), n.others+node, labels), ",") + "}"
				out = append(out, inputSeries{series, strings.Join(values, " ")})
			}
		}
	}
	return out
}

// never expects that no alert that matches fires in the hours before.
func never(minute int, matchers string) exprTest {
	return exprTest{Expr: `count(count_over_time(ALERTS{alertstate="firing"` + matchers + `}[12h]))`, Time: fmt.Sprint(minute, "m")}
}

// alert is how an alert looks without the node.
func alert(name, severity, driver, problem string) string {
	labels := fmt.Sprintf("alertname=%q,severity=%q", name, severity)
	if driver != "" {
		labels += fmt.Sprintf(",driver=%q", driver)
	}
	if problem != "" {
		labels += fmt.Sprintf(",problem=%q", problem)
	}
	return "{" + labels + "}"
}

// exactly expects that these alerts fire, each for n nodes, and no others.
func exactly(minute, n int, alerts ...string) exprTest {
	test := exprTest{
		Expr: `count by (alertname, severity, cluster, driver, problem) (ALERTS{alertstate="firing"})`, Time: fmt.Sprint(minute, "m"),
	}
	for _, labels := range alerts {
		test.Samples = append(test.Samples, expSample{labels, float64(n)})
	}
	return test
}

// recorded expects the value of a recorded series.
func recorded(minute int, series string, value float64) exprTest {
	return exprTest{Expr: series, Time: fmt.Sprint(minute, "m"), Samples: []expSample{{strings.ReplaceAll(series, `driver=""`, ""), value}}}
}

// A problem, its alert for one node, and the one for many nodes.
type problemOfNodes struct {
	problem, severity   string
	one, many           string
	healthy, problemHas map[string]string
}

var problems = []problemOfNodes{
	{"absent", "warning", "CSIRegistrarAbsent", "CSIRegistrarMissing", scraped, union(gone, map[string]string{"up": "0"})},
	{"kubelet-ended", "warning", "CSIKubeletEnded", "CSIManyNodes", map[string]string{"csi_registrar_kubelet_up": "1"}, map[string]string{"csi_registrar_kubelet_up": "0"}},
	{"config-error", "warning", "CSIRegistrarConfigError", "CSIManyNodes", map[string]string{"csi_registrar_config_error": "0"}, map[string]string{"csi_registrar_config_error": "1"}},
	{"volumes", "warning", "CSIVolumesUnregistered", "CSIManyNodes", map[string]string{"csi_registrar_unregistered_volumes": "0"}, map[string]string{"csi_registrar_unregistered_volumes": "1"}},
	{"stuck", "warning", "CSIRegistrarStuck", "CSIManyNodes", map[string]string{"csi_registrar_stuck_calls": "0"}, map[string]string{"csi_registrar_stuck_calls": "1"}},
	{"polling", "warning", "CSIRegistrarPolling", "CSIManyNodes", map[string]string{"csi_registrar_polling": "0"}, map[string]string{"csi_registrar_polling": "1"}},

	{
		"waiting", "warning", "CSIVolumesWaiting", "CSIManyNodes",
		map[string]string{`csi_registrar_volumes phase="waiting"`: "0"}, map[string]string{`csi_registrar_volumes phase="waiting"`: "1"},
	},

	// The driver has the name of the problem.
	{"missing", "warning", "CSIDriverNotRegistered", "CSIDriverMissing", driverSeries("missing", "registered", nil), driverSeries("missing", "absent", nil)},
	{"refused", "warning", "CSIDriverRefused", "CSIDriverMissing", driverSeries("refused", "registered", nil), driverSeries("refused", "refused", nil)},
	{
		"conflict", "info", "CSIDriverConflict", "CSIDriverConflicts",
		driverSeries("conflict", "registered", nil), union(driverSeries("conflict", "conflict", nil), problemSeries("conflict", "served-by-other")),
	},
	{"down", "warning", "CSIDriverDown", "CSIManyNodes", driverSeries("down", "registered", nil), problemSeries("down", "down")},
	{"restarting", "warning", "CSIDriverRestarting", "CSIManyNodes", driverSeries("restarting", "registered", nil), problemSeries("restarting", "restarting")},
	{
		"churn", "warning", "CSIDriverChurn", "CSIManyNodes",
		driverSeries("churn", "registered", nil),
		driverSeries("churn", "registered", map[string]string{"republications_total": "+"}),
	},
	{"damped", "warning", "CSIDriverDamped", "CSIManyNodes", driverSeries("damped", "registered", nil), problemSeries("damped", "damped")},
	{"not-kept", "warning", "CSIDriverNotKept", "CSIManyNodes", driverSeries("not-kept", "registered", nil), problemSeries("not-kept", "not-kept")},
}

// TestRulesForManyNodes runs the rules for each problem: on one node; in a rollout that goes well,
// where each node has it for some minutes; and in one that fails, where one node after another gets
// it. Whatever the number of nodes is, there are few alerts.
func TestRulesForManyNodes(t *testing.T) {
	promtool(t) // skips
	var tests []rulesTest
	add := func(name string, n nodes, exprs ...exprTest) {
		tests = append(tests, rulesTest{name, "1m", n.series(), exprs})
	}

	// Problems that hide others are alone; all others are there at once.
	for _, together := range [][]int{{0}, {1}, {3}, {6}, {2, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14}} {
		n := nodes{healthy: scraped, problem: map[string]string{}}
		var one, many []string
		name, singles := "many problems", ""
		for _, i := range together {
			p := problems[i]
			n.healthy, n.problem = union(n.healthy, p.healthy), union(n.problem, p.problemHas)
			driver := ""
			if i >= 7 {
				driver = p.problem
			}
			one = append(one, alert(p.one, p.severity, driver, p.problem))
			switch p.many {
			case "CSIRegistrarMissing", "CSIDriverMissing":
				many = append(many, alert(p.many, "critical", driver, ""))
			default:
				many = append(many, alert(p.many, p.severity, driver, p.problem))
			}
			singles += "|" + p.one
		}
		if len(together) == 1 {
			name = problems[together[0]].problem
		}
		singles = `,alertname=~"` + singles[1:] + `"`

		n.count, n.minutes = 10, 36
		n.broken = func(node, minute int) bool { return node == 7 && minute >= 15 }
		add(name+": one node", n, never(16, ""), exactly(35, 1, one...), never(35, `,severity="critical"`))

		// Five nodes have it for some minutes, then the next five. Two publications are no churn.
		n.count, n.minutes = 20, 40
		n.broken = func(node, minute int) bool {
			from := 15 + node/5*4
			return minute >= from && minute < from+4 && (len(together) == 1 || minute < from+2)
		}
		add(name+": a rollout in progress", n, never(39, ""))

		n.minutes = 70
		n.broken = func(node, minute int) bool { return minute >= 15+node && minute < 50 }
		// Churn is about an hour.
		after := slices.DeleteFunc(slices.Clone(many), func(a string) bool { return !strings.Contains(a, "churn") })
		add(name+": a failed rollout", n, never(16, ""), exactly(36, 1, many...), exactly(49, 1, many...), never(69, singles), exactly(69, 1, after...))
	}

	// An alert for many nodes replaces only those of the same problem.
	registered := union(scraped, driverSeries("d", "registered", nil))
	from15 := func(_, minute int) bool { return minute >= 15 }
	missingOnMany := nodes{count: 10, minutes: 36, healthy: registered, problem: driverSeries("d", "absent", nil), broken: from15}
	downOnOne := nodes{others: 10, count: 1, minutes: 36, healthy: registered, problem: problemSeries("d", "down"), broken: from15}
	tests = append(tests, rulesTest{
		"missing on many nodes, down on one", "1m", slices.Concat(missingOnMany.series(), downOnOne.series()),
		[]exprTest{exactly(35, 1, alert("CSIDriverMissing", "critical", "d", ""), alert("CSIDriverDown", "warning", "d", "down"))},
	})

	downOnMany := downOnOne
	downOnMany.count = 5
	tests = append(tests, rulesTest{
		"missing on many nodes, down on many others", "1m", slices.Concat(missingOnMany.series(), downOnMany.series()),
		[]exprTest{exactly(35, 1, alert("CSIDriverMissing", "critical", "d", ""), alert("CSIManyNodes", "warning", "d", "down"))},
	})

	// Without a kubelet no driver can be registered: there is one alert, not one for each driver.
	add("a kubelet has ended", nodes{
		count: 10, minutes: 36, healthy: union(registered, map[string]string{"csi_registrar_kubelet_up": "1"}),
		problem: union(driverSeries("d", "absent", nil), map[string]string{"csi_registrar_kubelet_up": "0"}),
		broken:  func(node, minute int) bool { return node == 7 && minute >= 15 },
	}, exactly(35, 1, alert("CSIKubeletEnded", "warning", "", "kubelet-ended")))

	// One failed rollout is one alert, with all its consequences on the same nodes.
	waiting := map[string]string{`csi_registrar_volumes phase="waiting"`: "2"}
	noWaiting := map[string]string{`csi_registrar_volumes phase="waiting"`: "0", "csi_registrar_unregistered_volumes": "0", "csi_registrar_kubelet_up": "1"}
	consequences := union(
		waiting, map[string]string{"csi_registrar_unregistered_volumes": "3"}, problemSeries("d", "restarting"), problemSeries("d", "damped"),
		problemSeries("d", "not-kept"), map[string]string{`csi_registrar_republications_total driver="d"`: "+"},
	)
	for _, c := range []struct {
		name             string
		healthy, problem map[string]string
		one, many        string
	}{
		{
			"a driver that crashes before it is registered", noWaiting, union(driverSeries("d", "absent", nil), consequences),
			alert("CSIDriverNotRegistered", "warning", "d", "missing"), alert("CSIDriverMissing", "critical", "d", ""),
		},
		{
			"a driver that the kubelet refuses", noWaiting, union(driverSeries("d", "refused", nil), consequences),
			alert("CSIDriverRefused", "warning", "d", "refused"), alert("CSIDriverMissing", "critical", "d", ""),
		},
		{
			"a table with an error", map[string]string{"csi_registrar_config_error": "0"},
			union(driverSeries("d", "invalid", nil), map[string]string{"csi_registrar_config_error": "1"}),
			alert("CSIDriverNotRegistered", "warning", "d", "missing"), alert("CSIDriverMissing", "critical", "d", ""),
		},
		{
			"a registered driver that does not answer", noWaiting, union(problemSeries("d", "down"), waiting),
			alert("CSIDriverDown", "warning", "d", "down"), alert("CSIManyNodes", "warning", "d", "down"),
		},
		{
			"a kubelet that has ended", noWaiting, union(waiting, map[string]string{"csi_registrar_kubelet_up": "0"}),
			alert("CSIKubeletEnded", "warning", "", "kubelet-ended"), alert("CSIManyNodes", "warning", "", "kubelet-ended"),
		},
	} {
		n := nodes{count: 10, minutes: 40, healthy: union(registered, c.healthy), problem: c.problem}
		n.broken = func(node, minute int) bool { return node == 7 && minute >= 15 }
		add(c.name+": one node", n, exactly(39, 1, c.one))
		n.count, n.broken = 20, func(node, minute int) bool { return minute >= 15+node/4 }
		add(c.name+": a failed rollout", n, exactly(39, 1, c.many))
	}

	// Of 200 nodes, four are 2 percent. Together they are more than that.
	missingAndRefused := nodes{count: 196, minutes: 36, healthy: registered, problem: driverSeries("d", "absent", nil)}
	missingAndRefused.broken = func(node, minute int) bool { return node < 4 && minute >= 15 }
	refusedOnFour := nodes{others: 196, count: 4, minutes: 36, healthy: registered, problem: driverSeries("d", "refused", nil), broken: from15}
	tests = append(tests, rulesTest{
		"missing on four nodes, refused on four others", "1m", slices.Concat(missingAndRefused.series(), refusedOnFour.series()),
		[]exprTest{exactly(35, 1, alert("CSIDriverMissing", "critical", "d", ""))},
	})

	// Somebody else registers the driver, so its other problems have another cause.
	add("a conflict hides nothing", nodes{
		count: 10, minutes: 36, healthy: union(registered, noWaiting),
		problem: union(driverSeries("d", "conflict", nil), problemSeries("d", "served-by-other"), problemSeries("d", "restarting"), waiting),
		broken:  func(node, minute int) bool { return node == 7 && minute >= 15 },
	}, exactly(35, 1, alert("CSIDriverConflict", "info", "d", "conflict"), alert("CSIDriverRestarting", "warning", "d", "restarting"),
		alert("CSIVolumesWaiting", "warning", "", "waiting")))

	// A share is one of the nodes on which the driver is enabled.
	disabled := nodes{count: 180, minutes: 36, healthy: union(scraped, driverSeries("d", "disabled", nil))}
	enabled := nodes{others: 180, count: 20, minutes: 36, healthy: registered, problem: driverSeries("d", "absent", nil)}
	enabled.broken = func(node, minute int) bool { return node < 3 && minute >= 15 }
	tests = append(tests, rulesTest{
		"disabled on most nodes", "1m", slices.Concat(disabled.series(), enabled.series()),
		[]exprTest{
			exactly(35, 1, alert("CSIDriverMissing", "critical", "d", "")),
			recorded(35, `driver:csi_registrar_nodes:count{driver="d"}`, 20),
			recorded(35, `driver:csi_registrar_missing:ratio{driver="d"}`, 3./20),
		},
	})

	// New nodes need some minutes until they are ready.
	for _, problem := range []map[string]string{
		union(gone, map[string]string{"up": "0"}), driverSeries("missing", "absent", nil), {"csi_registrar_config_error": "1"},
	} {
		n := nodes{count: 20, minutes: 30, healthy: union(scraped, driverSeries("missing", "registered", nil), map[string]string{"csi_registrar_config_error": "0"})}
		n.problem, n.joins = problem, func(node int) int { return node / 5 * 4 }
		n.broken = func(node, minute int) bool { return node >= 5 && minute < n.joins(node)+4 }
		add("new nodes", n, never(29, ""))
	}

	// Of 600 nodes, 12 are 2 percent. promtool's queries read at most 10,000 samples.
	some := func(broken int) nodes {
		return nodes{
			count: 600, minutes: 27, healthy: union(scraped, driverSeries("missing", "registered", nil)), problem: driverSeries("missing", "starting", nil),
			broken: func(node, minute int) bool { return node%10 == 7 && node/10 < broken && minute >= 7 },
		}
	}
	many, critical := alert("CSIManyNodes", "warning", "missing", "missing"), alert("CSIDriverMissing", "critical", "missing", "")
	add("10 of 600 nodes", some(10), exactly(26, 10, alert("CSIDriverNotRegistered", "warning", "missing", "missing")))
	add("12 of 600 nodes", some(12), exactly(26, 1, many), never(26, `,alertname!="CSIManyNodes"`))
	add("13 of 600 nodes", some(13), never(11, ""), exactly(14, 1, critical), exactly(26, 1, critical),
		recorded(26, `driver:csi_registrar_missing:ratio{driver="missing"}`, 13./600),
		recorded(26, `driver:csi_registrar_missing:ratio{driver=""}`, 0),
		recorded(26, `driver_state:csi_registrar_nodes:count{driver="missing",state="registered"}`, 587),
		recorded(26, `driver_state:csi_registrar_nodes:count{driver="missing",state="starting"}`, 13),
		recorded(26, `version:csi_registrar_nodes:count{version="1"}`, 600))

	// 100 nodes vanish: from the list of targets, as when a cluster gets smaller, or they do not
	// answer any more. Later they are there again.
	vanish := func(count int, job, up string) nodes {
		return nodes{
			count: count, minutes: 45, job: job, healthy: scraped, problem: union(gone, map[string]string{"up": up}),
			broken: func(node, minute int) bool { return node < 100 && minute >= 10 && minute < 30 },
		}
	}
	missing := alert("CSIRegistrarMissing", "critical", "", "")
	add("100 of 200 nodes vanish from the targets", vanish(200, "", "stale"), never(44, ""))
	add("100 of 200 nodes vanish", vanish(200, "", "0"), exactly(29, 1, missing), never(44, `,severity!="critical"`), exactly(44, 0),
		recorded(29, `driver:csi_registrar_missing:ratio{driver=""}`, 0.5))
	add("100 of 200 nodes vanish, with node_exporter", vanish(200, "node", "0"), never(44, ""))
	add("100 of 200 text files vanish", vanish(200, "node", "1"), exactly(29, 1, missing), never(44, `,severity!="critical"`), exactly(44, 0))
	add("100 of 1,000 nodes vanish", vanish(1000, "", "0"), exactly(29, 1, missing), never(44, `,severity!="critical"`), exactly(44, 0))

	checkRules(t, tests)
}

// checkRules runs tests with promtool.
func checkRules(t *testing.T, tests []rulesTest) {
	t.Helper()
	tool := promtool(t)
	rules, err := filepath.Abs(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(map[string]any{"rule_files": []string{rules}, "evaluation_interval": "1m", "tests": tests})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "test.yml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), tool, "test", "rules", file).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
