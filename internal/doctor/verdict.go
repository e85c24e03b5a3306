package doctor

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"csi-registrar/internal/config"
	"csi-registrar/internal/driver"
	"csi-registrar/internal/status"
	"csi-registrar/internal/worker"
)

// verdict asks the driver just as the daemon does, beside our own calls, and returns what
// the daemon thinks of it: with its rules of trust, which are told nowhere else.
func (x *exam) verdict(ctx context.Context, d config.Driver) func() status.Report {
	ctx, cancel := context.WithTimeout(ctx, x.o.Patience)
	result := make(chan status.Report, 1)
	go func() {
		defer cancel()
		c := driver.New(driver.Config{Name: d.Name, Socket: d.Socket, Endpoint: d.Endpoint, Timeout: d.Timeout, Owner: d.SocketOwner},
			driver.Options{Log: slog.New(slog.DiscardHandler), Hints: make(once, 1), Pool: worker.NewPool()})
		r := c.Ask(ctx, nil)
		if err := c.Close(); err != nil && r.Driver == status.Ready {
			r = status.Report{Driver: status.Absent, Reason: err.Error()}
		}
		result <- r
	}()
	return func() status.Report { return <-result }
}

// once are the hints of a client that is asked once: nobody listens to them.
type once chan struct{}

func (o once) Hints() <-chan struct{} { return o }
func (o once) Hint()                  {}
func (o once) Close()                 {}

// judge reports what the daemon has against a driver that our own calls did not show.
func (x *exam) judge(d config.Driver, r status.Report) {
	if r.Driver == status.Ready {
		says := "only root can be behind the socket"
		switch d.SocketOwner {
		case "root":
		case config.OwnerAny:
			x.checked(d.Name, StepTrust, Skipped, `socket_owner = "any"`)
			return
		default:
			says = "only root and " + d.SocketOwner + " can be behind the socket"
		}
		x.checked(d.Name, StepTrust, OK, says)
		return
	}
	known := slices.ContainsFunc(x.report.Findings, func(f Finding) bool {
		return f.Driver == d.Name && f.explains && f.Severity == Problem && f.Step != StepConfiguration
	})
	if known {
		return
	}
	f := Finding{Driver: d.Name, Step: StepTrust, Severity: Problem, explains: true,
		Should: fmt.Sprintf("nobody but %s can put a socket there, or listen on it", d.SocketOwner)}
	if r.Driver != status.Mismatch {
		f.Step, f.Should = StepDriver, "the driver is ready"
	}
	f.Is, f.Fix = mend(r.Reason)
	for i := range f.Fix {
		f.Fix[i] = strings.ReplaceAll(f.Fix[i], "set socket_owner", "in "+x.origin(d, "socket_owner")+" set socket_owner")
	}
	x.found(&f)
}

// mend takes a reason of package driver apart: what is, and what to do about it.
func mend(reason string) (is string, fix []string) {
	if is, rest, ok := strings.Cut(reason, `: run "`); ok {
		command, other, _ := strings.Cut(rest, `"`)
		fix = []string{command}
		if other = strings.TrimPrefix(other, ", "); other != "" {
			fix = append(fix, other)
		}
		return is, fix
	}
	if is, rest, ok := strings.Cut(reason, ": set "); ok {
		return is, []string{"set " + rest}
	}
	return reason, nil
}
