package control

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// in returns an alert with the label cluster.
func in(cluster, alert string) string {
	return strings.TrimSuffix(alert, "}") + fmt.Sprintf(",cluster=%q}", cluster)
}

// oneAndMany returns the alerts of problems[i] for one node and for many.
func oneAndMany(i int) (one, many string) {
	p := problems[i]
	driver, of := "", p.problem
	if i >= 7 {
		driver = p.problem
	}
	severity := p.severity
	if p.many == "CSIRegistrarMissing" || p.many == "CSIDriverMissing" {
		severity, of = "critical", ""
	}
	return alert(p.one, p.severity, driver, p.problem), alert(p.many, severity, driver, of)
}

// TestRulesLimits runs the rules just below and above each of their limits: of time, of numbers,
// and of the cluster, the node and the driver that something counts for.
func TestRulesLimits(t *testing.T) {
	promtool(t) // skips
	var tests []rulesTest
	add := func(name string, all []nodes, exprs ...exprTest) {
		var series []inputSeries
		for _, n := range all {
			series = append(series, n.series()...)
		}
		tests = append(tests, rulesTest{name, "1m", series, exprs})
	}
	from15 := func(_, minute int) bool { return minute >= 15 }
	always := func(int, int) bool { return true }
	registered := union(scraped, driverSeries("d", "registered", nil))

	// The minutes that a problem of one node and of many takes to become an alert. Prometheus 2 and
	// 3 differ by one minute.
	minutes := map[string][2]int{
		"absent": {10, 6}, "missing": {15, 6}, "refused": {10, 6}, "conflict": {15, 15}, "churn": {5, 9}, "restarting": {7, 10},
		"volumes": {15, 10}, "waiting": {15, 10}, "polling": {15, 10}, "damped": {15, 10}, "not-kept": {15, 10},
	}
	for i, p := range problems {
		one, many := oneAndMany(i)
		after, ok := minutes[p.problem]
		if !ok {
			after = [2]int{10, 10}
		}
		n := nodes{count: 3, minutes: 36, healthy: union(scraped, p.healthy), problem: p.problemHas, broken: from15}
		n.broken = func(node, minute int) bool { return node == 1 && minute >= 15 }
		add(p.problem+": time on one node", []nodes{n}, never(15+after[0]-2, ""), exactly(15+after[0]+1, 1, one))
		n.broken = func(node, minute int) bool { return node <= 1 && minute >= 15 }
		add(p.problem+": time on two nodes", []nodes{n}, never(15+after[1]-2, ""), exactly(15+after[1]+1, 1, many))

		// The same on one node of one cluster, and on many of another one with the same names.
		n = nodes{cluster: "a", count: 10, minutes: 36, healthy: n.healthy, problem: n.problem}
		n.broken = func(node, minute int) bool { return node == 7 && minute >= 15 }
		other := n
		other.cluster, other.broken = "b", from15
		add(p.problem+": two clusters", []nodes{n, other}, exactly(35, 1, in("a", one), in("b", many)))
	}

	// Six minutes are too short for an alert for many nodes, whatever the time of the scrapes is.
	short := nodes{count: 5, minutes: 30, healthy: registered, problem: driverSeries("d", "absent", nil)}
	short.broken = func(_, minute int) bool { return minute >= 15 && minute <= 20 }
	add("missing for six minutes", []nodes{short}, never(29, ""))
	short.healthy, short.problem = scraped, union(gone, map[string]string{"up": "0"})
	add("absent for six minutes", []nodes{short}, never(29, ""))

	conflict := problems[9]
	days := nodes{count: 2, minutes: 1480, healthy: union(scraped, conflict.healthy), problem: conflict.problemHas, broken: always}
	info, warning := alert("CSIDriverConflicts", "info", "conflict", "conflict"), alert("CSIDriverConflicts", "warning", "conflict", "conflict")
	add("a conflict of two nodes for a day", []nodes{days}, exactly(1400, 1, info), exactly(1470, 1, info, warning))
	days.count, days.broken = 3, func(node, _ int) bool { return node == 0 }
	info, warning = alert("CSIDriverConflict", "info", "conflict", "conflict"), alert("CSIDriverConflict", "warning", "conflict", "conflict")
	add("a conflict for a day", []nodes{days}, exactly(1400, 1, info), exactly(1470, 1, info, warning))

	// Every state but two is one without the driver.
	for _, state := range states {
		n := nodes{count: 3, minutes: 36, healthy: registered, problem: driverSeries("d", state, nil)}
		n.broken = func(node, minute int) bool { return node == 1 && minute >= 15 }
		want := []string{alert("CSIDriverNotRegistered", "warning", "d", "missing")}
		switch state {
		case "registered", "disabled":
			want = nil
		case "refused":
			want = []string{alert("CSIDriverRefused", "warning", "d", "refused")}
		}
		add("state "+state, []nodes{n}, exactly(35, 1, want...))
	}

	// Two percent of 100 nodes, and of one driver.
	of100 := func(broken int) nodes {
		return nodes{
			count: 100, minutes: 36, healthy: registered, problem: problemSeries("d", "down"),
			broken: func(node, minute int) bool { return node < broken && minute >= 15 },
		}
	}
	down, manyDown := alert("CSIDriverDown", "warning", "d", "down"), alert("CSIManyNodes", "warning", "d", "down")
	add("2 of 100 nodes", []nodes{of100(2)}, exactly(35, 2, down))
	add("3 of 100 nodes", []nodes{of100(3)}, exactly(35, 1, manyDown))
	for _, problem := range []string{"down", "restarting", "damped", "not-kept"} {
		everywhere := nodes{count: 10, minutes: 36, healthy: registered, problem: problemSeries("d", problem), broken: from15}
		once := nodes{others: 10, count: 10, minutes: 36, healthy: union(scraped, driverSeries("e", "registered", nil)), problem: problemSeries("e", problem)}
		once.broken = func(node, minute int) bool { return node == 7 && minute >= 15 }
		one := problems[slices.IndexFunc(problems, func(p problemOfNodes) bool { return p.problem == problem })].one
		add(problem+": one driver on many nodes, another one on one", []nodes{everywhere, once},
			exactly(35, 1, alert("CSIManyNodes", "warning", "d", problem), alert(one, "warning", "e", problem)))
	}
	refused := nodes{count: 10, minutes: 36, healthy: registered, problem: driverSeries("d", "refused", nil), broken: from15}
	refusedOnce := nodes{others: 10, count: 10, minutes: 36, healthy: union(scraped, driverSeries("e", "registered", nil)), problem: driverSeries("e", "refused", nil)}
	refusedOnce.broken = func(node, minute int) bool { return node == 7 && minute >= 15 }
	add("refused: one driver on many nodes, another one on one", []nodes{refused, refusedOnce},
		exactly(35, 1, alert("CSIDriverMissing", "critical", "d", ""), alert("CSIDriverRefused", "warning", "e", "refused")))

	// Two clusters, one of which has a failed rollout, and the other one almost.
	a := nodes{cluster: "a", count: 600, minutes: 30, healthy: registered, problem: driverSeries("d", "starting", nil)}
	a.broken = func(node, minute int) bool { return node < 11 && minute >= 7 }
	b := nodes{cluster: "b", count: 10, minutes: 30, healthy: registered, problem: driverSeries("d", "starting", nil)}
	b.broken = func(node, minute int) bool { return node < 5 && minute >= 7 }
	add("two clusters", []nodes{a, b},
		exactly(29, 1, in("a", alert("CSIManyNodes", "warning", "d", "missing")), in("b", alert("CSIDriverMissing", "critical", "d", ""))),
		recorded(29, `driver:csi_registrar_nodes:count{cluster="a",driver="d"}`, 600),
		recorded(29, `driver:csi_registrar_nodes:count{cluster="b",driver="d"}`, 10),
		recorded(29, `driver_state:csi_registrar_nodes:count{cluster="b",driver="d",state="starting"}`, 5),
		recorded(29, `version:csi_registrar_nodes:count{cluster="b",version="1"}`, 10),
		recorded(29, `driver:csi_registrar_missing:ratio{cluster="b",driver="d"}`, 0.5))

	// What follows from a problem is left out, but only there.
	node := func(other int, healthy, problem map[string]string) nodes {
		return nodes{others: other, count: 1, minutes: 36, healthy: union(scraped, healthy), problem: problem, broken: from15}
	}
	noError, withError := map[string]string{"csi_registrar_config_error": "0"}, map[string]string{"csi_registrar_config_error": "1"}
	add("errors on two of three nodes, one of which has no valid table", []nodes{
		node(0, union(noError, driverSeries("d", "registered", nil)), union(withError, driverSeries("d", "invalid", nil))),
		node(1, union(noError, driverSeries("e", "registered", nil)), withError), node(2, noError, nil),
	}, exactly(35, 1, alert("CSIDriverNotRegistered", "warning", "d", "missing"), alert("CSIRegistrarConfigError", "warning", "", "config-error")))

	// A driver that is down for a minute of three, and a kubelet that was restarted, hide no pods
	// that wait.
	waiting := map[string]string{`csi_registrar_volumes phase="waiting"`: "1"}
	flapping := nodes{count: 3, minutes: 36, healthy: union(registered, waiting), problem: problemSeries("d", "down")}
	flapping.broken = func(node, minute int) bool { return minute%3 == 0 }
	flapping.count = 1
	add("a driver that is down at times", []nodes{flapping}, exactly(35, 1, alert("CSIVolumesWaiting", "warning", "", "waiting")))
	restarts := nodes{count: 1, minutes: 36, healthy: union(registered, waiting, map[string]string{"csi_registrar_kubelet_up": "1"}), problem: map[string]string{"csi_registrar_kubelet_up": "0"}}
	restarts.broken = func(node, minute int) bool { return minute%4 == 0 }
	add("a kubelet that restarts", []nodes{restarts}, exactly(35, 1, alert("CSIVolumesWaiting", "warning", "", "waiting")))
	restarts.healthy = union(scraped, driverSeries("d", "absent", nil), map[string]string{"csi_registrar_kubelet_up": "1"})
	add("a kubelet that restarts, without a driver", []nodes{restarts}, exactly(35, 1, alert("CSIDriverNotRegistered", "warning", "d", "missing")))

	// The daemon looks for the other registrar when something changes.
	seldom := nodes{count: 1, minutes: 36, healthy: union(scraped, driverSeries("d", "conflict", nil)), problem: problemSeries("d", "served-by-other")}
	seldom.broken = func(_, minute int) bool { return minute%3 == 0 }
	add("another registrar that is not always found", []nodes{seldom}, exactly(35, 1, alert("CSIDriverConflict", "info", "d", "conflict")))

	// With 55 seconds between samples an hour begins between two of them.
	publications := func(name, interval, values string, exprs ...exprTest) {
		up := `csi_registrar_start_time_seconds{job="csi-registrar",instance="n0"}`
		series := `csi_registrar_republications_total{job="csi-registrar",instance="n0",driver="d"}`
		tests = append(tests, rulesTest{name, interval, []inputSeries{{up, "1x200"}, {series, values}}, exprs})
	}
	publications("again three times in an hour", "55s", "1x20 2x10 3x10 4x150", never(170, ""))
	publications("again four times in an hour", "55s", "1x20 2x10 3x10 4x10 5x140", exactly(60, 1, alert("CSIDriverChurn", "warning", "d", "churn")), exactly(120, 0))
	publications("again four times in an hour of samples", "1m", "1x20 2x10 3x10 4x10 5x140", exactly(60, 1, alert("CSIDriverChurn", "warning", "d", "churn")))
	publications("again four times in two hours", "55s", "1x20 2x10 3x70 4x10 5x90", never(170, ""))

	checkRules(t, tests)
}
