package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"time"

	"csi-registrar/internal/config"
	"csi-registrar/internal/control"
	"csi-registrar/internal/status"
)

// daemon is what the running daemon says of itself; runs is false if it does not answer.
type daemon struct {
	runs        bool
	err         error // why it could not be asked; nil if it answered
	started     time.Time
	configError string
	registry    string
	drivers     map[string]driverStatus
}

// driverStatus is what it says of a driver.
type driverStatus struct {
	state, reason, socket, endpoint string
	registration                    status.RegistrationState
	registrationSocket              string
	kubeletError                    string
	registeredAt, askedAt, since    time.Time
}

const daemonAnswersIn = 5 * time.Second

func askDaemon(ctx context.Context, socket string) daemon {
	ctx, cancel := context.WithTimeout(ctx, daemonAnswersIn)
	defer cancel()
	doc, err := control.NewClient(socket).Status(ctx)
	if err != nil {
		return daemon{err: err}
	}
	s, err := doc.Status()
	if err != nil {
		return daemon{err: err}
	}
	d := daemon{runs: true, started: s.StartedAt, configError: s.ConfigError, registry: s.PluginsRegistry,
		drivers: make(map[string]driverStatus, len(s.Drivers))}
	for _, st := range s.Drivers {
		d.drivers[st.Name] = driverStatus{
			state: st.State, reason: st.Reason, socket: st.Socket, endpoint: st.Endpoint,
			registration: st.Registration, registrationSocket: st.RegistrationSocket,
			kubeletError: st.KubeletError, registeredAt: st.RegisteredAt, askedAt: st.LastGetInfoAt, since: st.Since,
		}
	}
	return d
}

// running looks whether the daemon runs, and works with the files as they are.
func (x *exam) running() {
	switch {
	case x.daemon.runs:
	case errors.Is(x.daemon.err, control.ErrNotRunning):
		if x.problemIn(StepUnit) {
			x.checked("", StepDaemon, Failed, x.daemon.err.Error())
			return
		}
		x.found(&Finding{Step: StepDaemon, Severity: Problem, explains: true,
			Is: x.daemon.err.Error(), Should: "it runs",
			Fix: []string{"systemctl enable --now " + serviceUnit}})
		return
	case errors.Is(x.daemon.err, fs.ErrPermission):
		x.found(&Finding{Step: StepDaemon, Severity: Warning,
			Is: x.daemon.err.Error(), Should: "doctor runs as root: much can only be seen then",
			Fix: []string{"sudo csi-registrar doctor"}})
		return
	default:
		x.found(&Finding{Step: StepDaemon, Severity: Problem, explains: true,
			Is: "the daemon does not answer: " + x.daemon.err.Error(), Should: "it answers at once",
			Fix: []string{"journalctl -u " + serviceUnit + " -n 50", "systemctl restart " + serviceUnit}})
		return
	}
	if why := x.outdated(); why != "" {
		x.found(&Finding{Step: StepDaemon, Severity: Problem, explains: true,
			Is: "the daemon works with another configuration than the files have: " + why, Should: "it has read them",
			Fix: []string{"csi-registrar reload"}})
		return
	}
	x.checked("", StepDaemon, OK, "runs since "+x.daemon.started.Format(time.DateTime))
}

// outdated tells how the daemon's configuration differs from that of the files. Where
// the files have mistakes it must, and they are reported already.
func (x *exam) outdated() string {
	if len(x.config.Errors) > 0 {
		return ""
	}
	if x.daemon.configError != "" {
		return x.daemon.configError
	}
	if want := x.registry(); x.daemon.registry != "" && path.Clean(x.daemon.registry) != want {
		return fmt.Sprintf("it publishes in %s, the files say %s", x.daemon.registry, want)
	}
	for _, d := range x.config.Config.Drivers {
		if !x.wanted(d.Name) {
			continue
		}
		if why := x.differs(d); why != "" {
			return why
		}
	}
	return ""
}

func (x *exam) differs(d config.Driver) string {
	st, known := x.daemon.drivers[d.Name]
	switch {
	case !known && d.Enabled:
		return "it does not know " + d.Name
	case !known:
		return ""
	case d.Enabled && st.state == "disabled":
		return d.Name + " is disabled there"
	case st.socket != d.Socket:
		return fmt.Sprintf("%s has the socket %s there", d.Name, st.socket)
	case st.endpoint != d.Endpoint:
		return fmt.Sprintf("%s has the endpoint %s there", d.Name, st.endpoint)
	}
	return ""
}
