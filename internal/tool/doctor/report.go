package doctor

import (
	"fmt"
	"slices"
	"time"

	"csi-registrar/internal/sys/safetext"
)

// Result is the outcome of a check.
type Result string

// The results of a check. Problems and warnings are findings: a healthy node has none.
const (
	OK      Result = "ok"
	Problem Result = "problem" // something is wrong: exit code 1
	Warning Result = "warning" // it works, but needs attention
	Skipped Result = "skipped" // it could not be checked, or is not applicable
)

// Finding is a problem or a warning. It is an element of "findings" in `doctor --json`:
// fields are added, never renamed.
type Finding struct {
	ID       ID     `json:"id"`
	Driver   string `json:"driver,omitempty"` // empty: the node
	Step     Step   `json:"step"`
	Severity Result `json:"severity"` // Problem or Warning
	Found    string `json:"found"`
	Expected string `json:"expected,omitempty"`
	Fix      []Fix  `json:"fix,omitempty"` // lines of a shell script
}

// Check is the result of one step, an element of "checks" in `doctor --json`.
type Check struct {
	Driver string  `json:"driver,omitempty"` // empty: the node
	Step   Step    `json:"step"`
	Result Result  `json:"result"`
	Says   string  `json:"says,omitempty"`    // details
	TookMS float64 `json:"took_ms,omitempty"` // of calls to the driver
}

// Report is the document of `doctor --json`.
type Report struct {
	Healthy  bool      `json:"healthy"`  // no problem was found; there may be warnings
	Findings []Finding `json:"findings"` // the root cause first
	Checks   []Check   `json:"checks"`   // in the order in which they were made
}

// Step is a check; csi-registrar-json(5) has the list.
type Step string

// ID identifies a kind of finding. It is a heading of findings.md, where the states of
// drivers are headings, too; no ID is the name of a state.
type ID string

// Findings of the same effect.
var (
	wrongFiles = []ID{"configuration-unreadable", "configuration-error", "configuration-hidden",
		"driver-not-configured", "driver-disabled"}
	noSpace      = []ID{"file-system-full", "file-system-read-only"}
	wrongKubelet = []ID{"root-dir-mismatch", "no-kubelet"}
	noDirectory  = []ID{"plugins-registry-missing", "plugins-registry-unreadable", "plugins-registry-not-directory"}
	noUnit       = []ID{"unit-masked", "unit-missing", "unit-not-loaded", "unit-failed", "unit-stopped", "unit-restarting"}
	noDaemon     = []ID{"daemon-not-running", "daemon-not-answering", "configuration-not-loaded"}
	noWatch      = []ID{"kubelet-not-watching", "plugins-registry-covered", "kubelet-watches-deleted"}
	noDriver     = []ID{"driver-socket-hidden", "driver-socket-missing", "driver-socket-unreadable",
		"driver-socket-not-socket", "driver-socket-stale", "driver-not-accepting", "driver-connection-failed",
		"driver-not-trusted", "endpoint-unusable", "driver-not-answering", "driver-method-missing",
		"driver-call-failed", "driver-name-empty", "driver-name-mismatch", "driver-not-ready", "driver-unit-restarting",
		"node-id-invalid", "topology-invalid", "volume-limit-invalid", "another-registrar"}
	noRegistration = []ID{"driver-socket-forbidden", "registration-conflict", "registration-not-published",
		"registration-socket-faulty", "kubelet-refused", "kubelet-not-asking", "kubelet-not-confirming"}
	unregistered = slices.Concat(wrongFiles, noSpace, wrongKubelet, noDirectory, []ID{"kubelet-frozen",
		"node-not-updated", "plugins-registry-link"}, noUnit, []ID{"root-dir-not-writable"}, noDaemon, noWatch, noDriver)
)

// kind is what some findings have in common.
type kind struct {
	severity    Result
	ids         []ID
	explainedBy []ID // findings of the node or of the same driver that hide these
}

// kinds are all findings in the order in which they are reported: problems before warnings, causes
// before effects. csi-registrar-json(5) and findings.md have this order, too.
var kinds = []kind{
	{Problem, wrongFiles, nil},
	{Problem, []ID{"root-dir-mismatch"}, nil},
	{Problem, noSpace, []ID{"root-dir-mismatch"}},
	{Problem, []ID{"kubelet-rootless", "no-kubelet", "no-runtime", "kubelet-frozen", "node-missing",
		"node-not-updated"}, nil},
	{Problem, []ID{"plugins-registry-link"}, []ID{"root-dir-mismatch"}},
	{Problem, noDirectory, []ID{"root-dir-mismatch"}},
	{Problem, []ID{"plugins-registry-writable"}, []ID{"root-dir-mismatch"}},
	{Problem, noUnit, nil},
	{Problem, []ID{"root-dir-not-writable"}, wrongKubelet},
	{Problem, noDaemon, slices.Concat([]ID{"configuration-unreadable"}, noUnit)},
	{Problem, noWatch, slices.Concat(wrongKubelet, noDirectory, []ID{"kubelet-frozen", "no-runtime"})},
	{Problem, noDriver, nil},
	{Problem, noRegistration, unregistered},
	{Problem, []ID{"volumes-unreadable"}, slices.Concat([]ID{"configuration-unreadable"}, noDirectory)},
	{Problem, []ID{"withdrawal-failing", "store-too-small", "sockets-not-kept", "volumes-unregistered",
		"driver-without-table", "volume-misplaced"}, nil},
	{Problem, []ID{"volume-not-mounted"}, []ID{"volume-misplaced"}},
	{Problem, []ID{"pods-waiting"}, slices.Concat(unregistered, noRegistration, []ID{"volume-misplaced"})},
	{Problem, []ID{"topology-changed", "driver-not-ready-for-daemon", "registration-change-failing"},
		slices.Concat(unregistered, noRegistration)},
	{Warning, []ID{"no-driver-configured", "second-kubelet", "not-root", "systemd-not-answering", "unit-not-enabled", "unit-changed",
		"daemon-outdated", "changes-polled", "file-system-not-answering", "plugin-socket-stale"}, nil},
	{Warning, []ID{"registration-damped", "driver-restarting", "registration-not-kept"},
		slices.Concat(unregistered, noRegistration)},
	{Warning, []ID{"pods-not-started"}, slices.Concat(unregistered, noRegistration, []ID{"pods-waiting", "volume-misplaced"})},
	{Warning, []ID{"watchdog-off", "http-failed"}, nil},
	{Warning, []ID{"mounts-not-propagated"}, []ID{"volume-misplaced", "root-dir-mismatch"}},
}

const maxText = 4000 // characters; untrusted text in it is much shorter

// checked adds a check that succeeded, or was skipped.
func (x *diagnosis) checked(driver string, step Step, result Result, format string, args ...any) {
	says := safetext.Clean(fmt.Sprintf(format, args...), maxText)
	x.report.Checks = append(x.report.Checks, Check{Driver: driver, Step: step, Result: result, Says: says})
}

// took sets the duration of the last check.
func (x *diagnosis) took(d time.Duration) {
	x.report.Checks[len(x.report.Checks)-1].TookMS = float64(d.Round(10*time.Microsecond)) / float64(time.Millisecond)
}

// finding adds a finding and its check.
func (x *diagnosis) finding(driver string, step Step, id ID, found, expected string, fix ...Fix) {
	f := Finding{ID: id, Driver: driver, Step: step, Severity: kinds[id.kind()].severity,
		Found: safetext.Clean(found, maxText), Expected: safetext.Clean(expected, maxText), Fix: fix}
	x.report.Findings = append(x.report.Findings, f)
	x.checked(driver, step, f.Severity, "%s", f.Found)
}

// kind returns the index in kinds, which has all ids.
func (id ID) kind() int {
	return slices.IndexFunc(kinds, func(k kind) bool { return slices.Contains(k.ids, id) })
}

// arrange sorts the findings, and hides those that others explain: a second finding would distract
// from the cause.
func (r *Report) arrange() {
	slices.SortStableFunc(r.Findings, func(a, b Finding) int { return a.ID.kind() - b.ID.kind() })
	all := slices.Clone(r.Findings)
	r.Findings = slices.DeleteFunc(r.Findings, func(f Finding) bool {
		i := slices.IndexFunc(all, func(cause Finding) bool {
			return (cause.Driver == "" || cause.Driver == f.Driver) && slices.Contains(kinds[f.ID.kind()].explainedBy, cause.ID)
		})
		if i >= 0 {
			own := func(c Check) bool { return c.Driver == f.Driver && c.Step == f.Step && c.Says == f.Found }
			c := &r.Checks[slices.IndexFunc(r.Checks, own)]
			c.Result, c.Says = Skipped, "because of "+string(all[i].ID)
		}
		return i >= 0
	})
	r.Checks = slices.Compact(r.Checks) // a step with two findings is skipped once
	r.Healthy = len(r.Findings) == 0 || r.Findings[0].Severity == Warning
}
