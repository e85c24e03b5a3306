package doctor

import (
	"slices"
	"time"

	"csi-registrar/internal/safetext"
)

// Severity says how much a finding matters.
type Severity string

// The severities. A healthy node has no finding of either.
const (
	Problem Severity = "problem" // something is wrong: exit code 1
	Warning Severity = "warning" // it works, but somebody should know
)

// Result says how a check went.
type Result string

// The results of a check.
const (
	OK      Result = "ok"
	Failed  Result = "problem"
	Warned  Result = "warning"
	Skipped Result = "skipped" // it could not be looked at, or there was no sense in it
)

// Finding is one thing that is wrong. It is an element of "findings" in `doctor --json`:
// fields are added, never renamed.
type Finding struct {
	Driver   string   `json:"driver,omitempty"` // empty: the node
	Step     Step     `json:"step"`
	Severity Severity `json:"severity"`
	Is       string   `json:"is"`               // what is
	Should   string   `json:"should,omitempty"` // what should be
	Fix      []string `json:"fix,omitempty"`    // what mends it: commands, or words where no command can

	explains bool // it is reason enough that drivers are not registered
}

// Check is one step that was taken, an element of "checks" in `doctor --json`.
type Check struct {
	Driver string  `json:"driver,omitempty"` // empty: the node
	Step   Step    `json:"step"`
	Result Result  `json:"result"`
	Says   string  `json:"says,omitempty"`    // what was seen
	TookMS float64 `json:"took_ms,omitempty"` // of calls to the driver
}

// Report is the document of `doctor --json`.
type Report struct {
	Healthy  bool      `json:"healthy"`  // no problem was found; there may be warnings
	Findings []Finding `json:"findings"` // the root cause first
	Checks   []Check   `json:"checks"`   // in the order in which they were made
}

// Step names a check.
type Step string

// The steps, in the order of cause and effect: a problem in an earlier one explains
// those in later ones.
const (
	StepConfiguration Step = "configuration"
	StepKubelet       Step = "kubelet"
	StepFolder        Step = "plugins_registry"
	StepUnit          Step = "unit"
	StepSandbox       Step = "sandbox"
	StepDaemon        Step = "daemon"
	StepWatching      Step = "watching"
	StepStore         Step = "descriptor store"
	StepWatchdog      Step = "watchdog"
	StepSocket        Step = "socket"
	StepTrust         Step = "trust"
	StepDriver        Step = "driver" // what else the daemon has against it
	StepEndpoint      Step = "endpoint"
	StepPluginInfo    Step = "GetPluginInfo"
	StepProbe         Step = "Probe"
	StepPluginCaps    Step = "GetPluginCapabilities"
	StepNodeInfo      Step = "NodeGetInfo"
	StepNodeCaps      Step = "NodeGetCapabilities"
	StepRegistrars    Step = "registrars"
	StepRegistration  Step = "registration"
	StepHTTP          Step = "http"
)

var order = []Step{
	StepConfiguration, StepKubelet, StepFolder, StepUnit, StepSandbox, StepDaemon, StepWatching,
	StepSocket, StepTrust, StepEndpoint, StepPluginInfo, StepProbe, StepNodeInfo, StepDriver,
	StepRegistrars, StepRegistration,
	StepStore, StepWatchdog, StepPluginCaps, StepNodeCaps, StepHTTP,
}

const (
	maxText = 1000 // of what is, and should be
	maxFix  = 4000 // of a line that mends it; a command must be whole
)

// checked notes a step that went well, or could not be taken.
func (x *exam) checked(driver string, step Step, result Result, says string) {
	x.report.Checks = append(x.report.Checks, Check{Driver: driver, Step: step, Result: result, Says: safetext.Clean(says, maxText)})
}

// timed is checked for a call that took a while.
func (x *exam) timed(driver string, step Step, result Result, took time.Duration, says string) {
	x.checked(driver, step, result, says)
	x.report.Checks[len(x.report.Checks)-1].TookMS = float64(took.Round(10*time.Microsecond)) / float64(time.Millisecond)
}

// found notes a finding, where it belongs: the root cause comes first, warnings last. It
// notes its check too.
func (x *exam) found(f *Finding) {
	f.Is, f.Should = safetext.Clean(f.Is, maxText), safetext.Clean(f.Should, maxText)
	fix := make([]string, len(f.Fix))
	for i, line := range f.Fix {
		fix[i] = safetext.Clean(line, maxFix)
	}
	f.Fix = fix
	before := 0
	for before < len(x.report.Findings) && x.report.Findings[before].rank() <= f.rank() {
		before++
	}
	x.report.Findings = slices.Insert(x.report.Findings, before, *f)
	result := Failed
	if f.Severity == Warning {
		result = Warned
	}
	x.checked(f.Driver, f.Step, result, f.Is)
}

// rank orders findings: problems before warnings, causes before effects.
func (f *Finding) rank() int {
	n := slices.Index(order, f.Step)
	if f.Severity == Warning {
		n += len(order)
	}
	return n
}

// problemIn tells whether a problem of the node was found in one of the steps.
func (x *exam) problemIn(steps ...Step) bool {
	return slices.ContainsFunc(x.report.Findings, func(f Finding) bool {
		return f.Driver == "" && f.Severity == Problem && slices.Contains(steps, f.Step)
	})
}

// explained tells whether a problem was found that keeps the driver from being registered.
func (x *exam) explained(driver string) bool {
	return slices.ContainsFunc(x.report.Findings, func(f Finding) bool {
		return f.explains && f.Severity == Problem && (f.Driver == "" || f.Driver == driver)
	})
}
