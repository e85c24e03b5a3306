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
	Plugins  []Plugin  `json:"plugins"`
}

// Plugin is a socket in plugins_registry, of any program: an element of "plugins" in `doctor
// --json`.
type Plugin struct {
	Path string `json:"path"`
	// as GetInfo reports it: CSIPlugin, DRAPlugin, DevicePlugin
	Type      string    `json:"type,omitempty"`
	Name      string    `json:"name,omitempty"`
	PID       int       `json:"pid,omitempty"`
	UID       *uint32   `json:"uid,omitempty"` // nil: not known, like PID
	ServedBy  string    `json:"served_by,omitempty"`
	Error     string    `json:"error,omitempty"` // why it does not answer
	CreatedAt time.Time `json:"created_at,omitzero"`
}

// Step is a check. Steps are in the order of cause and effect: a problem in an earlier one explains
// those in later ones.
type Step int

// The steps.
const (
	StepConfiguration Step = iota
	StepFileSystem
	StepKubelet
	StepDirectory
	StepUnit
	StepSandbox
	StepDaemon
	StepWatching
	StepSocket
	StepTrust
	StepEndpoint
	StepPluginInfo
	StepProbe
	StepNodeInfo
	StepRegistrars
	StepRegistration
	StepStore
	StepWatchdog
	StepHTTP
	StepVolumes
	steps // the number of steps
)

// stepNames are the steps' names in documents; a test expects one for each.
var stepNames = [steps]string{
	StepConfiguration: "configuration",
	StepFileSystem:    "file system",
	StepKubelet:       "kubelet",
	StepDirectory:     "plugins_registry",
	StepUnit:          "unit",
	StepSandbox:       "sandbox",
	StepDaemon:        "daemon",
	StepWatching:      "watching",
	StepSocket:        "socket",
	StepTrust:         "trust",
	StepEndpoint:      "endpoint",
	StepPluginInfo:    "GetPluginInfo",
	StepProbe:         "Probe",
	StepNodeInfo:      "NodeGetInfo",
	StepRegistrars:    "registrars",
	StepRegistration:  "registration",
	StepStore:         "descriptor store",
	StepWatchdog:      "watchdog",
	StepHTTP:          "http",
	StepVolumes:       "volumes",
}

// String returns the name.
func (s Step) String() string { return stepNames[s] }

// MarshalText returns the name.
func (s Step) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// ID identifies a kind of finding. It is a heading of troubleshooting.md, where the states of
// drivers are headings, too; no ID is the name of a state.
type ID string

// The ids. csi-registrar-json(5) lists them.
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
	RegistryCovered       ID = "plugins-registry-covered"
	FileSystemFull        ID = "file-system-full"
	FileSystemReadOnly    ID = "file-system-read-only"
	KubeletNotWatching    ID = "kubelet-not-watching"
	KubeletWatchesDeleted ID = "kubelet-watches-deleted"

	SystemdNotAnswering    ID = "systemd-not-answering"
	UnitMasked             ID = "unit-masked"
	UnitMissing            ID = "unit-missing"
	UnitNotLoaded          ID = "unit-not-loaded"
	UnitFailed             ID = "unit-failed"
	UnitStopped            ID = "unit-stopped"
	UnitRestarting         ID = "unit-restarting"
	UnitNotEnabled         ID = "unit-not-enabled"
	UnitChanged            ID = "unit-changed"
	DaemonNotRunning       ID = "daemon-not-running"
	DaemonNotAnswering     ID = "daemon-not-answering"
	ChangesPolled          ID = "changes-polled"
	FileSystemNotAnswering ID = "file-system-not-answering"
	StoreTooSmall          ID = "store-too-small"
	SocketsNotKept         ID = "sockets-not-kept"
	WatchdogOff            ID = "watchdog-off"
	HTTPOpen               ID = "http-open"

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
	PluginSocketStale         ID = "plugin-socket-stale"
	RegistrationConflict      ID = "registration-conflict"
	RegistrationNotPublished  ID = "registration-not-published"
	RegistrationSocketMissing ID = "registration-socket-missing"
	RegistrationSocketStale   ID = "registration-socket-stale"
	RegistrationNotAnswering  ID = "registration-not-answering"
	RegistrationWrong         ID = "registration-wrong"
	WithdrawalFailing         ID = "withdrawal-failing"
	RegistrationDamped        ID = "registration-damped"
	RegistrationNotKept       ID = "registration-not-kept"
	TopologyChanged           ID = "topology-changed"
	DriverSocketForbidden     ID = "driver-socket-forbidden"
	DriverRestarting          ID = "driver-restarting"
	StatusReason              ID = "status-reason"
	KubeletRefused            ID = "kubelet-refused"
	KubeletNotAsking          ID = "kubelet-not-asking"
	KubeletNotConfirming      ID = "kubelet-not-confirming"

	VolumeDataBroken  ID = "volume-data-broken"
	VolumeDataMissing ID = "volume-data-missing"
	VolumeNotMounted  ID = "volume-not-mounted"
	VolumeStillStaged ID = "volume-still-staged"
)

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

// found adds a finding and its check.
func (x *diagnosis) found(f Finding) {
	f.Found, f.Expected = safetext.Clean(f.Found, maxText), safetext.Clean(f.Expected, maxText)
	x.report.Findings = append(x.report.Findings, f)
	x.checked(f.Driver, f.Step, f.Severity, "%s", f.Found)
}

// problem adds a finding of severity Problem.
func (x *diagnosis) problem(driver string, step Step, id ID, found, expected string, fix ...Fix) {
	x.found(Finding{ID: id, Driver: driver, Step: step, Severity: Problem, Found: found, Expected: expected, Fix: fix})
}

// warning adds a finding of severity Warning.
func (x *diagnosis) warning(driver string, step Step, id ID, found, expected string, fix ...Fix) {
	x.found(Finding{ID: id, Driver: driver, Step: step, Severity: Warning, Found: found, Expected: expected, Fix: fix})
}

// rank returns the position of a finding: problems before warnings, causes before effects.
func (f *Finding) rank() int {
	if f.Severity == Warning {
		return int(steps + f.Step)
	}
	return int(f.Step)
}

// blocks reports whether a finding keeps drivers from being registered.
func (f *Finding) blocks() bool { return f.Severity == Problem && f.ID != RegistryWritable }

// problemIn reports whether a problem of the node was found in one of the steps.
func (x *diagnosis) problemIn(steps ...Step) bool {
	return slices.ContainsFunc(x.report.Findings, func(f Finding) bool {
		return f.Driver == "" && f.blocks() && slices.Contains(steps, f.Step)
	})
}

// explained reports whether a problem in an earlier step keeps the driver from being registered.
func (x *diagnosis) explained(driver string) bool {
	return slices.ContainsFunc(x.report.Findings, func(f Finding) bool {
		return f.blocks() && f.Step < StepRegistration && (f.Driver == "" || f.Driver == driver)
	})
}
