package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"csi-registrar/internal/config"
	"csi-registrar/internal/status"
)

// kubeletRound is how long a kubelet that follows the folder may take to ask a new socket.
const kubeletRound = 5 * time.Second

// registration looks at the registration socket, and at others that serve the driver.
func (x *exam) registration(ctx context.Context, d config.Driver) {
	own := path.Join(x.registry(), d.Name+"-reg.sock")
	st, known := x.daemon.drivers[d.Name]
	ours := known && slices.Contains([]status.RegistrationState{status.Published, status.Registered, status.Refused}, st.registration)
	if x.rivals(d, own, ours) {
		return
	}
	f := Finding{Driver: d.Name, Step: StepRegistration, Severity: Problem, explains: true}
	if x.explained(d.Name) {
		// What was found explains it; a second finding would only be in the way.
		result := Failed
		if st.state == string(status.Registered) {
			result = Warned
		}
		x.checked(d.Name, StepRegistration, result, stateText(x.daemon.runs, st))
		return
	}
	switch {
	case !x.daemon.runs:
		x.checked(d.Name, StepRegistration, Skipped, "the daemon cannot be asked")
		return
	case st.registration == status.Conflict:
		f.Is = st.reason
		f.Should = own + " is ours"
		f.Fix = x.clear(own)
	case !ours:
		f.Is = fmt.Sprintf("the driver answers as it should, but the daemon says: %s: %s", st.state, st.reason)
		f.Should = "the daemon publishes it"
		f.Fix = []string{"csi-registrar reregister " + d.Name, "journalctl -u " + serviceUnit + " -n 50"}
	default:
		x.published(ctx, d, own, st)
		return
	}
	x.found(&f)
}

func stateText(runs bool, st driverStatus) string {
	switch {
	case !runs:
		return "the daemon does not run"
	case st.state == "":
		return "the daemon does not know the driver"
	case st.reason == "":
		return st.state
	}
	return st.state + ": " + st.reason
}

// rivals reports sockets that serve the driver and are not ours.
func (x *exam) rivals(d config.Driver, own string, ours bool) bool {
	var others []plugin
	for _, p := range x.served[d.Name] {
		if p.path != own || !ours && x.foreign(p) {
			others = append(others, p)
		}
	}
	if len(others) == 0 {
		return false
	}
	var whose []string
	pod := false
	for _, p := range others {
		text := p.path
		if who, ok := readProcess(x.proc(), p.pid); ok && p.pid > 0 {
			text += ", served by " + who.String()
			pod = pod || strings.Contains(who.comm, "driver-regis") || strings.HasPrefix(who.unit, "cri-")
		}
		whose = append(whose, text)
	}
	f := Finding{Driver: d.Name, Step: StepRegistrars, Severity: Problem, explains: true,
		Is:     "another registrar serves this driver: " + strings.Join(whose, "; "),
		Should: "csi-registrar alone does: the kubelet refuses a second one, or takes the removal of one for that of both",
		Fix:    []string{"stop that registrar"}}
	if pod {
		f.Fix = []string{"take the container node-driver-registrar out of the driver's DaemonSet (csi-registrar import says what goes with it)"}
	}
	f.Fix = append(f.Fix, fmt.Sprintf("or leave the driver to it: set enabled = false in %s, then: csi-registrar reload", x.origin(d, "enabled")))
	x.found(&f)
	return true
}

// foreign tells whether a live socket under our name is another program's. Where the
// daemon does not run, it may be one that systemd keeps for it.
func (x *exam) foreign(p plugin) bool {
	if x.daemon.runs {
		return true
	}
	who, ok := readProcess(x.proc(), p.pid)
	return ok && p.pid > 1 && !strings.HasPrefix(who.comm, "csi-registrar")
}

// clear says how to get rid of what is at the path of a registration socket.
func (x *exam) clear(own string) []string {
	if info, err := os.Lstat(own); err == nil && info.Mode()&fs.ModeSocket == 0 {
		return []string{"rm -r " + shellQuote(own)}
	}
	return []string{"stop the program that serves " + own + " (ss -xlp shows it)"}
}

// published looks at a socket that the daemon says is in place.
func (x *exam) published(ctx context.Context, d config.Driver, own string, st driverStatus) {
	f := Finding{Driver: d.Name, Step: StepRegistration, Severity: Problem, explains: true,
		Fix: []string{"csi-registrar reregister " + d.Name}}
	name, p, err := getInfo(ctx, own)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		f.Is = fmt.Sprintf("the daemon says %s, but there is no %s here: does it see another file system?", st.state, own)
		f.Should = "it is there"
		f.Fix = []string{"systemctl restart " + serviceUnit}
	case errors.Is(err, syscall.ECONNREFUSED):
		f.Is = fmt.Sprintf("nobody listens on %s", own)
		f.Should = "the daemon does"
	case err != nil:
		f.Is = fmt.Sprintf("%s does not answer GetInfo within %v, the kubelet's own limit: %v", own, askTime, err)
		f.Should = "it answers at once"
		f.Fix = append(f.Fix, "systemctl restart "+serviceUnit)
	case name != d.Name || p.endpoint != d.Endpoint:
		f.Is = fmt.Sprintf("%s tells the kubelet %s at %s", own, name, p.endpoint)
		f.Should = fmt.Sprintf("it tells %s at %s", d.Name, d.Endpoint)
	case st.registration == status.Refused:
		f.Is = "the kubelet refused the driver: " + st.kubeletError
		f.Should, f.Fix = refusal(st.kubeletError, d)
	case st.registration == status.Published && st.askedAt.IsZero() && time.Since(st.since) > kubeletRound:
		f.Is = fmt.Sprintf("the kubelet has not asked %s since it was made, %v ago", own, time.Since(st.since).Round(time.Second))
		f.Should = "it asks within about a second; only its restart helps if it does not follow the folder"
		f.Fix = append(f.Fix, x.restartKubelet())
	case st.registration == status.Published && time.Since(st.since) > kubeletRound:
		f.Is = "the kubelet has asked, but neither confirmed nor refused the driver"
		f.Should = "it does so within the time of the driver's NodeGetInfo"
		f.Fix = []string{"journalctl -u " + x.kubeletUnit() + " -n 50 --grep csi", "csi-registrar reregister " + d.Name}
	default:
		says := st.state
		if !st.registeredAt.IsZero() {
			says += ", confirmed by the kubelet " + st.registeredAt.Local().Format(time.DateTime)
		}
		x.checked(d.Name, StepRegistration, OK, says)
		return
	}
	x.found(&f)
}

func (x *exam) kubeletUnit() string {
	if x.kubelet != nil && strings.HasSuffix(x.kubelet.unit, ".service") {
		return x.kubelet.unit
	}
	return "kubelet.service"
}

// refusal explains what the kubelet says most often.
func refusal(text string, d config.Driver) (should string, fix []string) {
	again := "csi-registrar reregister " + d.Name
	switch lower := strings.ToLower(text); {
	case strings.Contains(lower, "topolog") || strings.Contains(lower, "detected") && strings.Contains(lower, "different"):
		return "the node's labels agree with what the driver says of its topology; a changed value is refused while the old label is there",
			[]string{"kubectl label node NODE KEY-   (for each topology key that the message names)", again}
	case strings.Contains(lower, "already registered"), strings.Contains(lower, "same version"):
		return "only one registration of the driver; another registrar was first", []string{"stop the other registrar", again}
	case strings.Contains(lower, "nodeid"), strings.Contains(lower, "node id"):
		return "the driver gives the node id that it always gave, 1 to 256 characters", []string{"mend the driver's node id", again}
	case strings.Contains(lower, "forbidden"), strings.Contains(lower, "unauthorized"):
		return "the kubelet may write its CSINode object", []string{"kubectl get csinode NODE -o yaml", again}
	case strings.Contains(lower, "connection refused"), strings.Contains(lower, "timeout"), strings.Contains(lower, "deadline"):
		return "the kubelet reaches the API server and the driver; it tries again by itself, at most 2 minutes later", []string{again}
	}
	return "the kubelet accepts it; it tries again by itself, at most 2 minutes later", []string{"mend what it names", again}
}
