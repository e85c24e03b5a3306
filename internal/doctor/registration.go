package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/config"
	"csi-registrar/internal/pluginreg"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
)

// kubeletRound is how long a kubelet that watches the directory may take to ask a new socket.
const kubeletRound = 5 * time.Second

// plugin is a socket in plugins_registry, and what it answers.
type plugin struct {
	pluginreg.Info
	path string
	cred unixsock.Cred // who called listen: not who answers now, where systemd kept the socket
	made time.Time     // zero: not known
	err  error         // why it did not answer
}

// getInfo asks a registration socket as the kubelet does.
func (x *diagnosis) getInfo(ctx context.Context, path string) (plugin, error) {
	return look(ctx, x, path, func() (p plugin, err error) {
		if at, statErr := os.Stat(path); statErr == nil {
			p.made = at.ModTime()
		}
		ctx, cancel := context.WithTimeout(ctx, socketTimeout)
		defer cancel()
		p.Info, p.cred, err = pluginreg.GetInfo(ctx, path)
		return p, err
	})
}

// plugins asks all sockets that the kubelet sees, and returns those of CSI drivers, by driver.
func (x *diagnosis) plugins(ctx context.Context) map[string][]plugin {
	out := map[string][]plugin{}
	// What cannot be seen cannot be asked: why is found when the directory is looked at.
	paths, _ := look(ctx, x, x.registry(), func() ([]string, error) { return pluginreg.Sockets(x.registry()), nil })
	for _, p := range each(paths, func(path string) plugin {
		p, err := x.getInfo(ctx, path)
		p.path, p.err = path, err
		return p
	}) {
		if p.Type == registerapi.CSIPlugin {
			out[p.Name] = append(out[p.Name], p)
		}
		x.report.Plugins = append(x.report.Plugins, x.shown(ctx, p))
	}
	return out
}

// shown is what the report has of a socket. Whether a driver's own is right is looked at later.
func (x *diagnosis) shown(ctx context.Context, p plugin) Plugin {
	s := Plugin{Path: safetext.Word(p.path), CreatedAt: p.made}
	if who, known := x.process(ctx, p.cred.PID); known {
		s.PID, s.UID, s.ServedBy = p.cred.PID, &p.cred.UID, who.String()
	}
	switch {
	case p.err == nil:
		s.Type, s.Name = safetext.Word(p.Type), safetext.Word(p.Name)
	case errors.Is(p.err, syscall.ECONNREFUSED):
		s.Error = "nobody listens"
	default:
		s.Error = safetext.Quote(p.err.Error())
	}
	return s
}

// registration looks at the registration socket, and at others that serve the driver.
func (x *diagnosis) registration(ctx context.Context, d config.Driver) {
	own, err := pluginreg.SocketPath(x.registry(), d.Name)
	st, _ := x.daemon.Driver(d.Name)
	ours := slices.Contains([]status.RegistrationState{status.Published, status.Registered, status.Refused}, st.Registration)
	switch {
	case err != nil:
		x.problem(d.Name, StepRegistration, RegistrationPathInvalid, safetext.Quote(err.Error()), "the path fits into the address of a Unix socket")
	case x.conflicts(ctx, d, own, ours):
	case x.explained(d.Name): // a second finding would only be in the way
		result := Failed
		if st.State == string(status.Registered) {
			result = Warned
		}
		x.checked(d.Name, StepRegistration, result, "%s", x.stateText(st))
	case !x.daemon.runs():
		x.checked(d.Name, StepRegistration, Skipped, "the daemon cannot be asked")
	case st.Registration == status.Conflict:
		fix := []Fix{text("stop the program that serves %s", safetext.Word(own)), run("ss", "-xlp", "src", own)}
		at, err := look(ctx, x, own, func() (unixsock.File, error) { return unixsock.Lstat(own) })
		if err == nil && !at.IsSocket() {
			fix = []Fix{remove(own, at)}
		}
		x.problem(d.Name, StepRegistration, RegistrationConflict, "the daemon reports a conflict: "+safetext.Quote(st.Reason),
			safetext.Word(own)+" is ours", fix...)
	case !ours:
		x.problem(d.Name, StepRegistration, RegistrationNotPublished, "the driver answers as it should, but the daemon reports "+x.stateText(st),
			"the daemon publishes it", reregister(d), logOf(serviceUnit))
	default:
		x.published(ctx, d, own, st)
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

// conflicts reports sockets that serve the driver and are not ours.
func (x *diagnosis) conflicts(ctx context.Context, d config.Driver, own string, ours bool) bool {
	var whose []string
	for _, p := range x.served[d.Name] {
		who, known := x.process(ctx, p.cred.PID)
		// Where the daemon does not run, systemd may keep our socket for it.
		foreign := x.daemon.runs() || known && p.cred.PID > 1 && !strings.HasPrefix(who.comm, "csi-registrar")
		switch {
		case p.path == own && (ours || !foreign):
		case known:
			whose = append(whose, safetext.Word(p.path)+", served by "+who.String())
		default:
			whose = append(whose, safetext.Word(p.path))
		}
	}
	if len(whose) == 0 {
		return false
	}
	x.problem(d.Name, StepRegistrars, AnotherRegistrar, "another registrar serves this driver: "+strings.Join(whose[:min(len(whose), 5)], "; "),
		"csi-registrar alone does: the kubelet refuses a second one, or takes the removal of one for that of both",
		text("stop that registrar; if it is a container node-driver-registrar, take it out of the driver's DaemonSet (csi-registrar import says what goes with it)"),
		text("or leave the driver to it: set enabled = false in %s", x.origin(d, "enabled")), reload)
	return true
}

// published looks at a socket that the daemon says is in place.
func (x *diagnosis) published(ctx context.Context, d config.Driver, own string, st status.Driver) {
	shown, again, restart := safetext.Word(own), reregister(d), systemctl("restart", serviceUnit)
	problem := func(id ID, found, expected string, fix ...Fix) {
		x.problem(d.Name, StepRegistration, id, found, expected, fix...)
	}
	p, err := x.getInfo(ctx, own)
	told, _ := x.config.Config.Kubelet.Announced(d)
	waiting := st.Registration == status.Published && time.Since(st.Since) > kubeletRound
	switch {
	case errors.Is(err, fs.ErrNotExist):
		problem(RegistrationSocketMissing,
			fmt.Sprintf("the daemon reports %s, but there is no %s here: does it see another file system?", st.State, shown), "it is there", restart)
	case errors.Is(err, syscall.ECONNREFUSED):
		problem(RegistrationSocketStale, "nobody listens on "+shown, "the daemon does", again)
	case err != nil:
		problem(RegistrationNotAnswering,
			fmt.Sprintf("%s does not answer GetInfo within %v, the kubelet's own limit: %s", shown, socketTimeout, safetext.Quote(err.Error())),
			"it answers at once", again, restart)
	case p.Name != d.Name || p.Endpoint != told:
		problem(RegistrationWrong, fmt.Sprintf("%s reports %s at %s to the kubelet", shown, safetext.Word(p.Name), safetext.Word(p.Endpoint)),
			fmt.Sprintf("it reports %s at %s", d.Name, safetext.Word(told)), again)
	case st.Registration == status.Refused:
		expected, fix := refusal(st.KubeletError, d)
		problem(KubeletRefused, "the kubelet refused the driver: "+safetext.Quote(st.KubeletError), expected, fix...)
	case waiting && st.LastGetInfoAt.IsZero():
		problem(KubeletNotAsking, fmt.Sprintf("the kubelet has not asked %s since it was created, %v ago", shown, time.Since(st.Since).Round(time.Second)),
			"it asks within about a second; only its restart helps if it does not watch the directory", again, x.kubelet.restart())
	case waiting:
		problem(KubeletNotConfirming, "the kubelet has asked, but neither confirmed nor refused the driver",
			"it does so within the time of the driver's NodeGetInfo",
			run("journalctl", "-u", x.kubelet.service(), "-n", "50", "--grep", "csi"), again)
	case st.RegisteredAt.IsZero():
		x.checked(d.Name, StepRegistration, OK, "%s", st.State)
	default:
		x.checked(d.Name, StepRegistration, OK, "%s, confirmed by the kubelet %s", st.State, st.RegisteredAt.Local().Format(time.DateTime))
	}
}

// refusals are what the kubelet says most often.
var refusals = []struct {
	words         []string // one of them is in what it says
	expected, fix string
}{
	{[]string{"topolog"}, "the node's labels agree with what the driver says of its topology; a changed value is refused while the old label is there",
		"kubectl label node NODE KEY- for each topology key that the message names"},
	{[]string{"already registered", "same version"}, "only one registration of the driver; another registrar was first", "stop the other registrar"},
	{[]string{"nodeid", "node id"}, "the driver gives the node id that it always gave, 1 to 256 characters", "fix the driver's node id"},
	{[]string{"forbidden", "unauthorized"}, "the kubelet may write its CSINode object", "kubectl get csinode NODE -o yaml"},
	{[]string{"connection refused", "timeout", "deadline"}, "the kubelet reaches the API server and the driver", "it tries again by itself, at most 2 minutes later"},
	{[]string{""}, "the kubelet accepts it; it tries again by itself, at most 2 minutes later", "fix what the message names"},
}

// refusal explains what the kubelet says. Its words only choose among our texts.
func refusal(said string, d config.Driver) (expected string, fix []Fix) {
	i := 0
	for !slices.ContainsFunc(refusals[i].words, func(w string) bool { return strings.Contains(strings.ToLower(said), w) }) {
		i++ // the last one fits always
	}
	return refusals[i].expected, []Fix{text("%s", refusals[i].fix), reregister(d)}
}
