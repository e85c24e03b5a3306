package doctor

import (
	"fmt"
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
	Failed  Result = "problem" // as Problem
	Warned  Result = "warning" // as Warning
	Skipped Result = "skipped" // it could not be looked at, or there was no sense in it
)

// Finding is one thing that is wrong. It is an element of "findings" in `doctor --json`:
// fields are added, never renamed.
type Finding struct {
	ID       ID       `json:"id"`
	Driver   string   `json:"driver,omitempty"` // empty: the node
	Step     Step     `json:"step"`
	Severity Severity `json:"severity"`
	Found    string   `json:"found"`
	Expected string   `json:"expected,omitempty"`
	Fix      []Fix    `json:"fix,omitempty"` // in this order
}

// Fix is one step of what fixes a finding: a command, or words where no command can.
type Fix struct {
	Command safetext.Command `json:"command,omitzero"`
	Text    string           `json:"text,omitempty"`
}

// String is the command as a line for a POSIX shell, or the words.
func (f Fix) String() string {
	if f.Command.Name != "" {
		return f.Command.String()
	}
	return f.Text
}

// run is the Fix of a command.
func run(name string, args ...string) Fix { return Fix{Command: safetext.Run(name, args...)} }

// text is the Fix of words.
func text(format string, args ...any) Fix { return Fix{Text: fmt.Sprintf(format, args...)} }

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
	Plugins  []Plugin  `json:"plugins"`
}

// Plugin is a socket in plugins_registry, whoever's: an element of "plugins" in `doctor --json`.
type Plugin struct {
	Path      string    `json:"path"`
	Type      string    `json:"type,omitempty"` // as GetInfo says: CSIPlugin, DRAPlugin, DevicePlugin
	Name      string    `json:"name,omitempty"`
	PID       int       `json:"pid,omitempty"`
	UID       *uint32   `json:"uid,omitempty"` // nil: as little known as PID
	ServedBy  string    `json:"served_by,omitempty"`
	Error     string    `json:"error,omitempty"` // why it does not answer
	CreatedAt time.Time `json:"created_at,omitzero"`
}

// Step names a check.
type Step string

// The steps, in the order of cause and effect: a problem in an earlier one explains
// those in later ones.
const (
	StepConfiguration Step = "configuration"
	StepKubelet       Step = "kubelet"
	StepDirectory     Step = "plugins_registry"
	StepUnit          Step = "unit"
	StepSandbox       Step = "sandbox"
	StepDaemon        Step = "daemon"
	StepWatching      Step = "watching"
	StepStore         Step = "descriptor store"
	StepWatchdog      Step = "watchdog"
	StepSocket        Step = "socket"
	StepTrust         Step = "trust"
	StepEndpoint      Step = "endpoint"
	StepPluginInfo    Step = "GetPluginInfo"
	StepProbe         Step = "Probe"
	StepNodeInfo      Step = "NodeGetInfo"
	StepRegistrars    Step = "registrars"
	StepRegistration  Step = "registration"
	StepHTTP          Step = "http"
	StepVolumes       Step = "volumes"
)

var order = []Step{
	StepConfiguration, StepKubelet, StepDirectory, StepUnit, StepSandbox, StepDaemon, StepWatching,
	StepSocket, StepTrust, StepEndpoint, StepPluginInfo, StepProbe, StepNodeInfo,
	StepRegistrars, StepRegistration,
	StepStore, StepWatchdog, StepHTTP, StepVolumes,
}

// ID names what a finding is about, whatever its text: a heading of troubleshooting.md. None is
// a driver's state, which is its own heading there.
type ID string

// The ids; csi-registrar-json(5) has them, too.
const (
	ConfigurationUnreadable ID = "configuration-unreadable"
	ConfigurationError      ID = "configuration-error"
	ConfigurationHidden     ID = "configuration-hidden"
	ConfigurationNotLoaded  ID = "configuration-not-loaded"
	NoDriverConfigured      ID = "no-driver-configured"
	DriverNotConfigured     ID = "driver-not-configured"
	DriverDisabled          ID = "driver-disabled"
	NotRoot                 ID = "not-root"

	NoKubelet             ID = "no-kubelet"
	RootDirMismatch       ID = "root-dir-mismatch"
	RootDirNotWritable    ID = "root-dir-not-writable"
	RegistryMissing       ID = "plugins-registry-missing"
	RegistryUnreadable    ID = "plugins-registry-unreadable"
	RegistryNotDirectory  ID = "plugins-registry-not-directory"
	RegistryWritable      ID = "plugins-registry-writable"
	KubeletNotWatching    ID = "kubelet-not-watching"
	KubeletWatchesDeleted ID = "kubelet-watches-deleted"

	SystemdNotAnswering ID = "systemd-not-answering"
	UnitMasked          ID = "unit-masked"
	UnitMissing         ID = "unit-missing"
	UnitNotLoaded       ID = "unit-not-loaded"
	UnitFailed          ID = "unit-failed"
	UnitStopped         ID = "unit-stopped"
	UnitRestarting      ID = "unit-restarting"
	UnitNotEnabled      ID = "unit-not-enabled"
	UnitChanged         ID = "unit-changed"
	DaemonNotRunning    ID = "daemon-not-running"
	DaemonNotAnswering  ID = "daemon-not-answering"
	StoreTooSmall       ID = "store-too-small"
	SocketsNotKept      ID = "sockets-not-kept"
	WatchdogOff         ID = "watchdog-off"
	HTTPOpen            ID = "http-open"

	DriverSocketMissing    ID = "driver-socket-missing"
	DriverSocketUnreadable ID = "driver-socket-unreadable"
	DriverSocketNotSocket  ID = "driver-socket-not-socket"
	DriverSocketStale      ID = "driver-socket-stale"
	DriverSocketHidden     ID = "driver-socket-hidden"
	DriverNotAccepting     ID = "driver-not-accepting"
	DriverConnectionFailed ID = "driver-connection-failed"
	DriverNotTrusted       ID = "driver-not-trusted"
	DriverNotAnswering     ID = "driver-not-answering"
	DriverMethodMissing    ID = "driver-method-missing"
	DriverCallFailed       ID = "driver-call-failed"
	DriverNameEmpty        ID = "driver-name-empty"
	DriverNameMismatch     ID = "driver-name-mismatch"
	DriverNotReady         ID = "driver-not-ready"
	NodeIDInvalid          ID = "node-id-invalid"
	TopologyInvalid        ID = "topology-invalid"
	VolumeLimitInvalid     ID = "volume-limit-invalid"
	EndpointUnusable       ID = "endpoint-unusable"

	AnotherRegistrar          ID = "another-registrar"
	RegistrationPathInvalid   ID = "registration-path-invalid"
	RegistrationConflict      ID = "registration-conflict"
	RegistrationNotPublished  ID = "registration-not-published"
	RegistrationSocketMissing ID = "registration-socket-missing"
	RegistrationSocketStale   ID = "registration-socket-stale"
	RegistrationNotAnswering  ID = "registration-not-answering"
	RegistrationWrong         ID = "registration-wrong"
	KubeletRefused            ID = "kubelet-refused"
	KubeletNotAsking          ID = "kubelet-not-asking"
	KubeletNotConfirming      ID = "kubelet-not-confirming"

	VolumeDataBroken  ID = "volume-data-broken"
	VolumeDataMissing ID = "volume-data-missing"
	VolumeNotMounted  ID = "volume-not-mounted"
	VolumeStillStaged ID = "volume-still-staged"
)

const maxText = 4000 // characters; what others wrote in it is much shorter

// checked notes a step that went well, or could not be taken.
func (x *diagnosis) checked(driver string, step Step, result Result, format string, args ...any) {
	says := safetext.Clean(fmt.Sprintf(format, args...), maxText)
	x.report.Checks = append(x.report.Checks, Check{Driver: driver, Step: step, Result: result, Says: says})
}

// took adds to the last check how long its call took.
func (x *diagnosis) took(d time.Duration) {
	x.report.Checks[len(x.report.Checks)-1].TookMS = float64(d.Round(10*time.Microsecond)) / float64(time.Millisecond)
}

// found notes a finding and its check.
func (x *diagnosis) found(f Finding) {
	f.Found, f.Expected = safetext.Clean(f.Found, maxText), safetext.Clean(f.Expected, maxText)
	x.report.Findings = append(x.report.Findings, f)
	x.checked(f.Driver, f.Step, Result(f.Severity), "%s", f.Found)
}

// problem notes what is wrong.
func (x *diagnosis) problem(driver string, step Step, id ID, found, expected string, fix ...Fix) {
	x.found(Finding{ID: id, Driver: driver, Step: step, Severity: Problem, Found: found, Expected: expected, Fix: fix})
}

// warning notes what somebody should know.
func (x *diagnosis) warning(driver string, step Step, id ID, found, expected string, fix ...Fix) {
	x.found(Finding{ID: id, Driver: driver, Step: step, Severity: Warning, Found: found, Expected: expected, Fix: fix})
}

// rank orders findings: problems before warnings, causes before effects.
func (f *Finding) rank() int {
	n := slices.Index(order, f.Step)
	if f.Severity == Warning {
		n += len(order)
	}
	return n
}

// problemIn reports whether a problem of the node was found in one of the steps.
func (x *diagnosis) problemIn(steps ...Step) bool {
	return slices.ContainsFunc(x.report.Findings, func(f Finding) bool {
		return f.Driver == "" && f.Severity == Problem && slices.Contains(steps, f.Step)
	})
}

// explained reports whether a problem in an earlier step keeps the driver from being registered.
func (x *diagnosis) explained(driver string) bool {
	return slices.ContainsFunc(x.report.Findings, func(f Finding) bool {
		return f.rank() < slices.Index(order, StepRegistration) && (f.Driver == "" || f.Driver == driver)
	})
}
