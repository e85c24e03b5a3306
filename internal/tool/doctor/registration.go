package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/sys/unixsock"
)

// kubeletRound is the time in which a kubelet that watches the directory calls a new socket.
const kubeletRound = 5 * time.Second

// kubeletStart is the time in which a kubelet that has started, and watches the directory, calls
// the sockets that were there before.
const kubeletStart = 15 * time.Second

// registration checks the registration socket, and looks for other registrars of the driver.
func (x *diagnosis) registration(ctx context.Context, d config.Driver, who process) {
	own := filepath.Join(x.registry(), rootdir.SocketName(d.Name))
	st, _ := x.daemon.Driver(d.Name)
	ours := slices.Contains([]status.RegistrationState{status.Published, status.Registered, status.Refused}, st.Registration)
	x.conflicts(ctx, d, own, ours)
	// The reason is compared with the modes, which decide: it may quote a driver, or be invented.
	forbidden := strings.Contains(st.Reason, "CAP_DAC_OVERRIDE") && x.keptOut(ctx, d.Socket, 0o002)
	closed, open := x.locked(ctx, path.Dir(d.Socket), enter, serviceUnit)
	switch {
	case !x.daemon.runs():
		x.checked(d.Name, "registration", Skipped, "the daemon does not run, or does not answer")
	case forbidden && closed != "":
		x.finding(d.Name, "registration", "driver-socket-forbidden", closed+", and the daemon reports "+x.stateText(st), "mode 0750: the daemon is root without capabilities", open...)
	case forbidden: // by the lack of a capability, which doctor has, so it could connect
		x.finding(d.Name, "registration", "driver-socket-forbidden", "the daemon reports "+x.stateText(st),
			"the daemon, which is root without capabilities, may connect to the socket",
			append([]Fix{note("or have the driver create the socket, and its directory, so that root can use them by their modes")},
				writeDropIn(path.Join(path.Dir(rootdir.DropInFile), "zz-doctor-dac-override.conf"), "[Service]", "CapabilityBoundingSet=CAP_DAC_OVERRIDE")...)...)
	case st.Registration == status.Conflict:
		fix := []Fix{stopListener, run("ss", "-xlp", "src", own)}
		at, err := look(ctx, x, own, func() (unixsock.File, error) { return unixsock.Lstat(own) })
		found := "the daemon reports a conflict: " + safetext.Quote(st.Reason)
		if err == nil && !at.IsSocket() {
			found, fix = safetext.Word(own)+" is "+at.Kind()+", so the daemon leaves it alone", x.remove(ctx, own, at)
		}
		x.finding(d.Name, "registration", "registration-conflict", found,
			safetext.Word(own)+" is ours", fix...)
	case !ours && who.pid > 0 && x.runsFor(who.pid) > 0 && x.runsFor(who.pid) < kubeletRound:
		x.checked(d.Name, "registration", Skipped, "%s has just started, and the daemon has not asked it yet", who)
	case !ours:
		// A drop-in can give the daemon another view of the node than doctor has.
		set, fix := x.dropIns(ctx, serviceUnit)
		if fix != nil {
			fix = append(fix, systemctl("restart", serviceUnit))
		}
		x.finding(d.Name, "registration", "registration-not-published", "the driver answers correctly, but the daemon reports "+x.stateText(st)+set,
			"the daemon publishes it", slices.Concat([]Fix{reregister(d)}, fix, []Fix{logOf(serviceUnit)})...)
	default:
		x.published(ctx, d, own, st)
		x.reasons(ctx, d, st)
	}
}

// keptOut reports whether the mode of a file, or of a directory on its path, keeps out a root
// without capabilities, who needs a bit of others there, or the same of the owner or group.
func (x *diagnosis) keptOut(ctx context.Context, file string, bit uint16) bool {
	at, err := x.stat(ctx, file)
	switch {
	case at.UID == 0:
		at.Mode >>= 6
	case at.GID == 0:
		at.Mode >>= 3
	}
	return err == nil && (at.Mode&bit == 0 || len(file) > 1 && x.keptOut(ctx, path.Dir(file), 0o001))
}

// reasons reports the warnings that status shows for a driver with a correct registration.
func (x *diagnosis) reasons(ctx context.Context, d config.Driver, st status.Driver) {
	warning := func(id ID, found, expected string, fix ...Fix) {
		x.finding(d.Name, "registration", id, found, expected, fix...)
	}
	if st.NotKept != "" {
		fix := []Fix{systemctl("restart", serviceUnit)}
		if strings.Contains(st.NotKept, systemd.ErrStoreFull.Error()) {
			fix = override(serviceUnit, "Service", "FileDescriptorStoreMax")
		}
		warning("registration-not-kept", "the registration would not survive a restart of the daemon: "+safetext.Quote(st.NotKept),
			"systemd keeps the registration socket", append([]Fix{logOf(serviceUnit)}, fix...)...)
	}
	switch {
	case st.RefusedChange != "":
		expected, fix := x.topologyRefusal(ctx, d, st)
		warning("topology-changed", safetext.Quote(st.RefusedChange), expected, fix...)
	case !st.DampedUntil.IsZero():
		warning("registration-damped", "changes of the registration are delayed until "+clock(st.DampedUntil)+", because there were too many: "+safetext.Quote(st.Reason),
			"the driver always reports the same", append(x.serverOf(ctx, d.Name, process{}).log(), reregister(d))...)
	case st.DriverRestarts >= status.ManyRestarts:
		last, set := x.configuredServer(ctx, d.Name, process{})
		if last.unit != "" && last.ended == "" {
			if why := x.lastLine(ctx, last.unit, true, exitLines); why != "" {
				set = ": " + safetext.Quote(why) + set
			}
		}
		warning("driver-restarting", "the daemon reports "+x.stateText(st)+set, "the driver ends only when it is stopped; this warning ends 10 minutes after its last restarts",
			append(last.log(), last.revive...)...)
	case st.Registration == status.Registered && st.Driver != status.Ready:
		last, set := x.configuredServer(ctx, d.Name, process{})
		warning("driver-not-ready-for-daemon", "the driver answers doctor, but the daemon reports "+x.stateText(st)+set, "the daemon asks again within 30 seconds, and the driver answers",
			slices.Concat(last.log(), last.revive, []Fix{logOf(serviceUnit)})...)
	case st.Registration == status.Registered && !x.daemon.Kubelet.EndedAt.IsZero():
	case st.Reason != "":
		warning("registration-change-failing", "the registration is as the kubelet knows it, but the daemon reports "+safetext.Quote(st.Reason), "the daemon does what the files say; it tries again by itself",
			logOf(serviceUnit))
	}
}

// withdrawals reports registrations that the daemon cannot withdraw, also of drivers that are no
// longer configured, and below an earlier root_dir.
func (x *diagnosis) withdrawals(ctx context.Context) {
	for _, w := range x.daemon.Withdrawals {
		own, err := rootdir.SocketPath(x.registry(), w.Driver)
		if err != nil || !x.selected(w.Driver) {
			continue
		}
		fix := []Fix{logOf(serviceUnit)}
		if path := w.RegistrationSocket.Checked(func(path string) bool { return path == own }); path != "" {
			if at, err := x.stat(ctx, path); err == nil {
				fix = append(fix, x.remove(ctx, path, at)...)
			}
		}
		x.finding(w.Driver, "registration", "withdrawal-failing",
			fmt.Sprintf("the daemon cannot withdraw the registration socket %s: %s", w.RegistrationSocket, safetext.Quote(w.Error)),
			"it is removed: the driver is disabled, or root_dir was changed", fix...)
	}
}

func reregister(d config.Driver) Fix { return run("csi-registrar", "reregister", d.Name) }

func (x *diagnosis) stateText(st status.Driver) string {
	switch {
	case st.State == "":
		return "the daemon does not know the driver"
	case st.Reason == "":
		return safetext.Word(st.State)
	}
	return safetext.Word(st.State) + ": " + safetext.Quote(st.Reason)
}

// published checks a registration socket that the daemon reports as published.
func (x *diagnosis) published(ctx context.Context, d config.Driver, own string, st status.Driver) {
	shown, again, faulty := safetext.Word(own), reregister(d), ""
	problem := func(id ID, found, expected string, fix ...Fix) {
		x.finding(d.Name, "registration", id, found, expected, fix...)
	}
	p, err := x.getInfo(ctx, own)
	waited := time.Since(st.Since).Abs() // the clock can have been set back since
	since, waiting := "it was created", st.Registration == status.Published && waited > kubeletRound
	ended := x.daemon.Kubelet.EndedAt
	if st.Registration == status.Registered && !ended.IsZero() && x.kubelet != nil {
		waited = min(time.Since(ended).Abs(), x.runsFor(x.kubelet.pid))
		since, waiting = "the start of "+x.kubelet.String(), waited > kubeletStart
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		faulty = "there is no " + shown + ": does the daemon see another file system?"
	case errors.Is(err, syscall.ECONNREFUSED):
		faulty = "nobody listens on " + shown
	case err != nil:
		faulty = fmt.Sprintf("%s does not answer GetInfo within %v, the kubelet's own limit: %s", shown, socketTimeout, safetext.Quote(err.Error()))
	case p.Name != d.Name || p.Endpoint != d.Endpoint:
		faulty = fmt.Sprintf("%s reports %s at %s to the kubelet", shown, safetext.Word(p.Name), safetext.Word(p.Endpoint))
	}
	notAsked, before := waiting && !st.LastGetInfoAt.After(ended), ""
	if notAsked {
		before = x.askedBefore(ctx, own)
	}
	switch {
	case faulty != "":
		problem("registration-socket-faulty", "the daemon reports "+safetext.Word(st.State)+", but "+faulty,
			fmt.Sprintf("it answers at once with %s at %s", d.Name, safetext.Word(d.Endpoint)), again, systemctl("restart", serviceUnit))
	case st.Registration == status.Refused:
		expected, fix := x.refusal(ctx, d, st)
		problem("kubelet-refused", "the kubelet refused the driver: "+safetext.Quote(st.KubeletError), expected, fix...)
	case before != "":
		problem("kubelet-refused", "the kubelet could not register the driver before the registration socket was made anew: "+safetext.Quote(before),
			"the kubelet accepts it", logOf(x.kubelet.service()), note("%s", retries), x.kubelet.restart())
	case notAsked:
		problem("kubelet-not-asking", fmt.Sprintf("the kubelet has not asked %s since %s, %v ago", shown, since, waited.Round(time.Second)),
			"it asks within about a second; only its restart helps if it does not watch the directory", again, x.kubelet.restart(), logOf(x.kubelet.service()))
	case waiting:
		problem("kubelet-not-confirming", "the kubelet has asked, but neither confirmed nor refused the driver",
			"it does so within the time of the driver's NodeGetInfo",
			run("journalctl", "--no-pager", "-b", "-u", x.kubelet.service(), "-n", "20", "--grep", "csi"), again, x.kubelet.restart())
	case st.RegisteredAt.IsZero():
		x.checked(d.Name, "registration", OK, "%s", safetext.Word(st.State))
	default:
		x.checked(d.Name, "registration", OK, "%s, confirmed by the kubelet %s", safetext.Word(st.State), clock(st.RegisteredAt))
	}
}

// refusals are the most frequent errors of the kubelet.
var refusals = []struct {
	words         []string // the error has one of them
	expected, fix string
}{
	{[]string{"already registered", "same version"}, "only one registration of the driver, another registrar was first", "stop the other registrar first"},
	{[]string{"nodeid", "node id"}, "the driver reports the node id that it always reported, 1 to 256 characters", "correct the node id of the driver first"},
	{[]string{"getting credentials"}, "the kubelet can run the program of its kubeconfig for credentials", "install the program that the error names, or correct exec: in the kubeconfig of the kubelet first"},
	{[]string{"unauthorized"}, "the API server accepts the credentials of the kubelet", "correct the credentials in the kubeconfig of the kubelet first: its certificate or token is wrong or has expired"},
	{[]string{"forbidden"}, "the kubelet may write its CSINode object", "let the kubelet write its CSINode object first"},
	{[]string{"connection refused", "timeout", "deadline"}, "the kubelet reaches the API server and the driver", "bring back the API server, or what is on the way to it, first"},
	{[]string{""}, "the kubelet accepts it", "fix the cause that the kubelet names first"},
}

// retries says when a kubelet that refused a driver asks again: after 0.5 seconds, doubled up to
// 122 seconds, also if the socket is made anew (kubelet v1.36).
const retries = "the kubelet retries by itself at most 2 minutes later, and at once after its restart"

// askedBefore returns the kubelet's last line about a registration socket whose driver it could not
// register, so that it does not ask before some time has passed; empty if there is none.
func (x *diagnosis) askedBefore(ctx context.Context, socket string) string {
	lines := x.o.Units.Journal(ctx, x.kubelet.service(), "--since=-125s", "--lines=50", "--reverse", "--grep=No retries permitted until")
	if i := slices.IndexFunc(lines, func(line string) bool { return strings.Contains(line, socket) }); i >= 0 {
		return lines[i]
	}
	return ""
}

// refusal explains the kubelet's error. The error only selects one of our texts.
func (x *diagnosis) refusal(ctx context.Context, d config.Driver, st status.Driver) (expected string, fix []Fix) {
	text := strings.ToLower(st.KubeletError)
	if strings.Contains(text, "topolog") {
		return x.topologyRefusal(ctx, d, st)
	}
	i := 0
	for !slices.ContainsFunc(refusals[i].words, func(w string) bool { return strings.Contains(text, w) }) {
		i++ // the last row has the empty word, which every error has
	}
	fix = []Fix{logOf(x.kubelet.service()), note("%s", refusals[i].fix)}
	server, file := x.apiServer(ctx)
	switch {
	case strings.Contains(text, "kube client") && x.kubeletFlag("kubeconfig") == "":
		place, _ := x.placeInUnit(ctx, x.kubelet.service(), "ExecStart=")
		_, undo := x.dropIns(ctx, x.kubelet.service())
		return "the kubelet has --kubeconfig: without it, it runs alone and registers nothing",
			append(append([]Fix{note("add --kubeconfig=FILE in %s, and run systemctl daemon-reload", cmp.Or(place, "its unit"))}, undo...), x.kubelet.restart())
	case server != nil && slices.Contains([]string{"getting credentials", "unauthorized"}, refusals[i].words[0]):
		fix = append(fix, note("that is %s", file[:strings.LastIndexByte(file, ':')]))
	case server != nil && strings.Contains(text, strings.ToLower(server.Host)):
		return "the kubelet reaches the API server, by its kubeconfig " + safetext.Quote(server.String()),
			[]Fix{note("if that address is wrong: correct server: in %s, then run the next line", file),
				note("if the API server is away, nothing has to be done here: %s", retries), x.kubelet.restart()}
	}
	return refusals[i].expected, append(fix, note("%s", retries), x.kubelet.restart())
}

// nodeRound is the time in which a kubelet that cannot update its Node has failed twice (kubelet
// v1.37: five tries of at most 10 s, every 10 s). A single failure is followed by a success.
const nodeRound = 35 * time.Second

// nodeObject checks that the API server has the Node of the kubelet, which creates it only when it
// starts (kubelet v1.37). Errors of its requests name their URL, with ?timeout=10s.
func (x *diagnosis) nodeObject(ctx context.Context) {
	if x.kubelet == nil {
		return
	}
	unit, wrong := x.kubelet.service(), ""
	failures := append(x.kubeletErrors(ctx, nodeRound, "not allowed to modify node |only its own Node object|Unable to register node with API server|"+
		"Error updating node status.*(nodes .* not found|credentials|Unauthorized|dial|[^?]timeout|deadline|x509|EOF)"), "")
	last := failures[0]
	tries := strings.Join(x.o.Units.Journal(ctx, unit, "--since=-1h", "--reverse", "--grep=Unable to register node|"+registeredNode.String()), "\n")
	if latest, _, _ := strings.Cut(tries, "\n"); registeredNode.MatchString(latest) && strings.Contains(last, "Unable to register node") ||
		len(failures) == 2 && strings.Contains(last, "Error updating node status") {
		last = ""
	}
	names := registeredNode.FindAllStringSubmatch(tries, -1)
	if strings.Contains(last, "not allowed to modify node ") || strings.Contains(last, "only its own Node object") {
		wrong = ", which it may not write: " + safetext.Quote(last)
	}
	if n := len(names) - 1; n > 0 && names[0][1] != names[n][1] {
		wrong = ", and in the last hour it called it " + safetext.Word(names[n][1]) + ", whose pods have ended"
	}
	if wrong != "" {
		_, fix := x.dropIns(ctx, unit)
		x.finding("", "kubelet", "node-missing", "the kubelet calls its Node "+x.nodeName()+x.setBy(ctx, unit, "hostname-override")+wrong,
			"always the same name: that of its credentials, as a rule the host name", append(fix, x.kubelet.restart())...)
		return
	}
	expected, fix := x.refusal(ctx, config.Driver{}, status.Driver{KubeletError: last})
	switch gone, ran := regexp.MustCompile("nodes .* not found").MatchString(last), x.runsFor(x.kubelet.pid); {
	case last != "" && !gone:
		x.finding("", "kubelet", "node-not-updated", "the kubelet cannot update its Node, nor learn of new pods: "+safetext.Quote(last), expected, fix...)
	// Within a minute of its start it may be about to create it.
	case gone && (ran == 0 || ran >= time.Minute):
		x.finding("", "kubelet", "node-missing", "the API server has no Node of this kubelet: "+safetext.Quote(last), "it has one: the kubelet creates its Node when it starts", x.kubelet.restart())
	}
}

// registeredNode matches what a kubelet logs at its start (kubelet v1.37).
var registeredNode = regexp.MustCompile(`Successfully registered node" node="([^"]+)"`)
