package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/sys/unixsock"
)

// kubeletRound is the time in which a kubelet that watches the directory calls a new socket.
const kubeletRound = 5 * time.Second

// registration checks the registration socket, and looks for other registrars of the driver.
func (x *diagnosis) registration(ctx context.Context, d config.Driver) {
	own := filepath.Join(x.registry(), rootdir.SocketName(d.Name))
	st, _ := x.daemon.Driver(d.Name)
	ours := slices.Contains([]status.RegistrationState{status.Published, status.Registered, status.Refused}, st.Registration)
	switch {
	case x.conflicts(ctx, d, own, ours):
	case x.explained(d.Name): // a second finding would distract from the cause
		result := Problem
		if st.State == string(status.Registered) {
			result = Warning
		}
		x.checked(d.Name, StepRegistration, result, "%s", x.stateText(st))
	case !x.daemon.runs():
		x.checked(d.Name, StepRegistration, Skipped, "the daemon does not run, or does not answer")
	case strings.Contains(st.Reason, "CAP_DAC_OVERRIDE"): // which doctor has, so it could connect
		x.problem(d.Name, StepRegistration, DriverSocketForbidden, "the daemon reports "+x.stateText(st),
			"the daemon, which is root without capabilities, may connect to the socket",
			append([]Fix{note("or have the driver create the socket, and its directory, so that root can use them by their modes")},
				writeDropIn(path.Join(path.Dir(systemd.DropInFile), "zz-doctor-dac-override.conf"), "[Service]", "CapabilityBoundingSet=CAP_DAC_OVERRIDE")...)...)
	case st.Registration == status.Conflict:
		fix := stopListener(own)
		at, err := look(ctx, x, own, func() (unixsock.File, error) { return unixsock.Lstat(own) })
		if err == nil && !at.IsSocket() {
			fix = []Fix{x.remove(ctx, own, at)}
		}
		x.problem(d.Name, StepRegistration, RegistrationConflict, "the daemon reports a conflict: "+safetext.Quote(st.Reason),
			safetext.Word(own)+" is ours", fix...)
	case !ours:
		x.problem(d.Name, StepRegistration, RegistrationNotPublished, "the driver answers correctly, but the daemon reports "+x.stateText(st),
			"the daemon publishes it", reregister(d), logOf(serviceUnit))
	default:
		before := len(x.report.Findings)
		x.published(ctx, d, own, st)
		if len(x.report.Findings) == before {
			x.reasons(ctx, d, st)
		}
	}
}

// reasons reports the warnings that status shows for a driver with a correct registration.
func (x *diagnosis) reasons(ctx context.Context, d config.Driver, st status.Driver) {
	warning := func(id ID, found, expected string, fix ...Fix) {
		x.warning(d.Name, StepRegistration, id, found, expected, fix...)
	}
	if st.NotKept != "" {
		fix := []Fix{systemctl("restart", serviceUnit)}
		if strings.Contains(st.NotKept, systemd.ErrStoreFull.Error()) {
			fix = override(serviceUnit, "Service", "FileDescriptorStoreMax")
		}
		warning(RegistrationNotKept, "the registration would not survive a restart of the daemon: "+safetext.Quote(st.NotKept),
			"systemd keeps the registration socket", append([]Fix{logOf(serviceUnit)}, fix...)...)
	}
	switch {
	case st.RefusedChange != "":
		expected, fix := x.topologyRefusal(d, st)
		warning(TopologyChanged, safetext.Quote(st.RefusedChange), expected, fix...)
	case !st.DampedUntil.IsZero():
		warning(RegistrationDamped, "changes of the registration are delayed until "+st.DampedUntil.Local().Format(time.DateTime)+", because there were too many: "+safetext.Quote(st.Reason),
			"the driver always reports the same", append(x.serverOf(ctx, d.Name, process{}).log(), reregister(d))...)
	case st.DriverRestarts >= status.ManyRestarts:
		warning(DriverRestarting, "the daemon reports "+x.stateText(st), "the driver ends only when it is stopped; this warning ends 10 minutes after its last restarts",
			x.serverOf(ctx, d.Name, process{}).log()...)
	case st.Reason != "":
		warning(StatusReason, "the daemon reports "+x.stateText(st), "it reports nothing",
			append(x.serverOf(ctx, d.Name, process{}).log(), logOf(serviceUnit))...)
	}
}

// withdrawals reports registrations that the daemon cannot withdraw, also of drivers that are no
// longer configured, and below an earlier root_dir.
func (x *diagnosis) withdrawals(ctx context.Context) {
	for _, w := range x.daemon.Withdrawals {
		fix := []Fix{logOf(serviceUnit)}
		if at, err := x.stat(ctx, w.RegistrationSocket); err == nil {
			fix = append(fix, x.remove(ctx, w.RegistrationSocket, at))
		}
		x.problem(w.Driver, StepRegistration, WithdrawalFailing,
			fmt.Sprintf("the daemon cannot withdraw the registration socket %s: %s", safetext.Word(w.RegistrationSocket), safetext.Quote(w.Error)),
			"it is removed: the driver is disabled, or root_dir was changed", fix...)
	}
}

func reregister(d config.Driver) Fix { return run("csi-registrar", "reregister", d.Name) }

func (x *diagnosis) stateText(st status.Driver) string {
	switch {
	case !x.daemon.runs():
		return "the daemon does not run"
	case st.State == "":
		return "the daemon does not know the driver"
	case st.Reason == "":
		return st.State
	}
	return st.State + ": " + safetext.Quote(st.Reason)
}

// published checks a registration socket that the daemon reports as published.
func (x *diagnosis) published(ctx context.Context, d config.Driver, own string, st status.Driver) {
	shown, again, restart := safetext.Word(own), reregister(d), systemctl("restart", serviceUnit)
	problem := func(id ID, found, expected string, fix ...Fix) {
		x.problem(d.Name, StepRegistration, id, found, expected, fix...)
	}
	p, err := x.getInfo(ctx, own)
	announced, _ := x.config.Config.Kubelet.Announced(d)
	waiting := st.Registration == status.Published && time.Since(st.Since) > kubeletRound
	switch {
	case errors.Is(err, fs.ErrNotExist):
		problem(RegistrationSocketMissing,
			fmt.Sprintf("the daemon reports %s, but there is no %s here: does it see another file system?", st.State, shown), "the socket exists", restart)
	case errors.Is(err, syscall.ECONNREFUSED):
		problem(RegistrationSocketStale, "nobody listens on "+shown, "the daemon listens there", again)
	case err != nil:
		problem(RegistrationNotAnswering,
			fmt.Sprintf("%s does not answer GetInfo within %v, the kubelet's own limit: %s", shown, socketTimeout, safetext.Quote(err.Error())),
			"it answers at once", again, restart)
	case p.Name != d.Name || p.Endpoint != announced:
		problem(RegistrationWrong, fmt.Sprintf("%s reports %s at %s to the kubelet", shown, safetext.Word(p.Name), safetext.Word(p.Endpoint)),
			fmt.Sprintf("it reports %s at %s", d.Name, safetext.Word(announced)), again)
	case st.Registration == status.Refused:
		expected, fix := x.refusal(d, st)
		problem(KubeletRefused, "the kubelet refused the driver: "+safetext.Quote(st.KubeletError), expected, fix...)
	case waiting && st.LastGetInfoAt.IsZero():
		problem(KubeletNotAsking, fmt.Sprintf("the kubelet has not asked %s since it was created, %v ago", shown, time.Since(st.Since).Round(time.Second)),
			"it asks within about a second; only its restart helps if it does not watch the directory", again, x.kubelet.restart(), logOf(x.kubelet.service()))
	case waiting:
		problem(KubeletNotConfirming, "the kubelet has asked, but neither confirmed nor refused the driver",
			"it does so within the time of the driver's NodeGetInfo",
			run("journalctl", "--no-pager", "-u", x.kubelet.service(), "-n", "50", "--grep", "csi"), again)
	case st.RegisteredAt.IsZero():
		x.checked(d.Name, StepRegistration, OK, "%s", st.State)
	default:
		x.checked(d.Name, StepRegistration, OK, "%s, confirmed by the kubelet %s", st.State, st.RegisteredAt.Local().Format(time.DateTime))
	}
}

// refusals are the most frequent errors of the kubelet.
var refusals = []struct {
	words         []string // the error has one of them
	expected, fix string
}{
	{[]string{"already registered", "same version"}, "only one registration of the driver, another registrar was first", "stop the other registrar first"},
	{[]string{"nodeid", "node id"}, "the driver reports the node id that it always reported, 1 to 256 characters", "correct the node id of the driver first"},
	{[]string{"unauthorized"}, "the API server accepts the credentials of the kubelet", "correct the credentials in the kubeconfig of the kubelet first: its certificate or token is wrong or has expired"},
	{[]string{"forbidden"}, "the kubelet may write its CSINode object", "let the kubelet write its CSINode object first"},
	{[]string{"connection refused", "timeout", "deadline"}, "the kubelet reaches the API server and the driver", "it also retries by itself, at most 2 minutes later"},
	{[]string{""}, "the kubelet accepts it; it retries by itself, at most 2 minutes later", "fix the cause that the kubelet names first"},
}

// refusal explains the kubelet's error. The error only selects one of our texts.
func (x *diagnosis) refusal(d config.Driver, st status.Driver) (expected string, fix []Fix) {
	text := strings.ToLower(st.KubeletError)
	if strings.Contains(text, "topolog") {
		return x.topologyRefusal(d, st)
	}
	i := 0
	for !slices.ContainsFunc(refusals[i].words, func(w string) bool { return strings.Contains(text, w) }) {
		i++ // the last row has the empty word, which every error has
	}
	return refusals[i].expected, []Fix{logOf(x.kubelet.service()), note("%s", refusals[i].fix), reregister(d)}
}
