package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"csi-registrar/internal/config"
)

// ask makes the calls that the daemon, and then the kubelet, make to the driver.
func (x *exam) ask(ctx context.Context, d config.Driver, c net.Conn, who process) {
	conn, err := over(c)
	if err != nil {
		x.found(&Finding{Driver: d.Name, Step: StepPluginInfo, Severity: Problem, explains: true, Is: err.Error()})
		return
	}
	defer conn.Close()
	q := &questions{exam: x, d: d, who: who, identity: csi.NewIdentityClient(conn), node: csi.NewNodeClient(conn)}
	if q.pluginInfo(ctx) && q.probe(ctx) {
		q.pluginCapabilities(ctx)
		if q.nodeInfo(ctx) {
			q.nodeCapabilities(ctx)
		}
	}
}

// questions are the calls to one driver.
type questions struct {
	*exam
	d        config.Driver
	who      process
	identity csi.IdentityClient
	node     csi.NodeClient
}

// call makes one call and reports its failure; seen is what there is to say of success.
func (q *questions) call(ctx context.Context, step Step, limit time.Duration, f Finding, do func(context.Context) (seen string, err error)) bool {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := time.Now()
	seen, err := do(ctx)
	took := time.Since(began)
	if err == nil {
		q.timed(q.d.Name, step, OK, took, seen)
		return true
	}
	f.Driver, f.Step = q.d.Name, step
	f.Is = q.failure(step, limit, err)
	if f.Fix == nil {
		f.Fix = q.look()
	}
	q.found(&f)
	q.report.Checks[len(q.report.Checks)-1].TookMS = float64(took) / float64(time.Millisecond)
	return false
}

// failure says in words how a call ended.
func (q *questions) failure(step Step, limit time.Duration, err error) string {
	if w, ok := errors.AsType[*wrongAnswer](err); ok {
		return w.is
	}
	switch s := grpcstatus.Convert(err); s.Code() {
	case codes.DeadlineExceeded:
		return fmt.Sprintf("the driver does not answer %s within %v", step, limit)
	case codes.Unimplemented:
		return fmt.Sprintf("the driver does not implement %s: %s", step, s.Message())
	case codes.Unavailable:
		return fmt.Sprintf("the connection broke while %s was asked: %s", step, s.Message())
	default:
		return fmt.Sprintf("%s fails: %s: %s", step, s.Code(), s.Message())
	}
}

// wrongAnswer is an answer that is no failure of the call.
type wrongAnswer struct{ is string }

func (w *wrongAnswer) Error() string { return w.is }

// look tells where the driver's own log is.
func (q *questions) look() []string {
	if strings.HasSuffix(q.who.unit, ".service") && q.who.unit != "init.scope" {
		return []string{"journalctl -u " + q.who.unit + " -n 50", "systemctl restart " + q.who.unit}
	}
	return []string{fmt.Sprintf("look into the log of the driver, %s; restart it", q.who)}
}

func (q *questions) pluginInfo(ctx context.Context) bool {
	f := Finding{Severity: Problem, explains: true, Should: "it answers at once with the driver's name"}
	var name, version string
	ok := q.call(ctx, StepPluginInfo, q.d.Timeout, f, func(ctx context.Context) (string, error) {
		r, err := q.identity.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
		name, version = r.GetName(), r.GetVendorVersion()
		if err == nil && name == "" {
			err = &wrongAnswer{"the driver answers with an empty name"}
		}
		return strings.TrimSpace(name + " " + version), err
	})
	if !ok {
		return false
	}
	if name != q.d.Name {
		q.found(&Finding{Driver: q.d.Name, Step: StepPluginInfo, Severity: Problem, explains: true,
			Is:     fmt.Sprintf("the driver at %s calls itself %q", q.d.Socket, name),
			Should: fmt.Sprintf("it is %q, as in %s", q.d.Name, q.origin(q.d, "socket")),
			Fix: []string{fmt.Sprintf("name the table [driver.%q] in %s, or give it the socket of %s; then: csi-registrar reload",
				name, q.origin(q.d, "socket"), q.d.Name)}})
		return false
	}
	return true
}

func (q *questions) probe(ctx context.Context) bool {
	f := Finding{Severity: Problem, explains: true, Should: "it says that it is ready, or does not implement Probe"}
	return q.call(ctx, StepProbe, q.d.Timeout, f, func(ctx context.Context) (string, error) {
		r, err := q.identity.Probe(ctx, &csi.ProbeRequest{})
		switch {
		case grpcstatus.Code(err) == codes.Unimplemented:
			return "not implemented, which counts as ready", nil
		case err == nil && r.GetReady() != nil && !r.GetReady().GetValue():
			err = &wrongAnswer{"the driver says in Probe that it is not ready"}
		}
		return "ready", err
	})
}

// pluginCapabilities are not asked for by the kubelet, but by other parts of Kubernetes.
func (q *questions) pluginCapabilities(ctx context.Context) {
	f := Finding{Severity: Warning, Should: "it answers; CSI requires it"}
	q.call(ctx, StepPluginCaps, q.d.Timeout, f, func(ctx context.Context) (string, error) {
		r, err := q.identity.GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{})
		var names []string
		for _, c := range r.GetCapabilities() {
			if s := c.GetService(); s != nil {
				names = append(names, s.GetType().String())
			}
			if e := c.GetVolumeExpansion(); e != nil {
				names = append(names, "expansion "+e.GetType().String())
			}
		}
		return list(names), err
	})
}

// nodeCapabilities are asked for by the kubelet when a volume is mounted.
func (q *questions) nodeCapabilities(ctx context.Context) {
	f := Finding{Severity: Warning, Should: "it answers: the kubelet asks before each mount"}
	q.call(ctx, StepNodeCaps, q.d.Timeout, f, func(ctx context.Context) (string, error) {
		r, err := q.node.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
		var names []string
		for _, c := range r.GetCapabilities() {
			names = append(names, c.GetRpc().GetType().String())
		}
		return list(names), err
	})
}

func list(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

func (q *questions) nodeInfo(ctx context.Context) bool {
	f := Finding{Severity: Problem, explains: true, Should: "it answers; the kubelet waits 2 minutes and then refuses the driver"}
	var r *csi.NodeGetInfoResponse
	ok := q.call(ctx, StepNodeInfo, q.o.Patience, f, func(ctx context.Context) (seen string, err error) {
		r, err = q.node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
		return fmt.Sprintf("node id %s, %s, %s", r.GetNodeId(), limit(r.GetMaxVolumesPerNode()), count(len(r.GetAccessibleTopology().GetSegments()), "topology key")), err
	})
	if !ok {
		return false
	}
	for _, f := range nodeRules(r) {
		f.Driver, f.Step = q.d.Name, StepNodeInfo
		f.explains = f.Severity == Problem
		if f.Fix == nil {
			f.Fix = []string{"mend this in the driver's own configuration, and restart it"}
		}
		q.found(&f)
	}
	return true
}

func limit(n int64) string {
	if n <= 0 {
		return "no volume limit"
	}
	return "at most " + count(int(n), "volume")
}

// pluginInfo asks for a driver's name alone.
func pluginInfo(ctx context.Context, c net.Conn) (name, version string, err error) {
	conn, err := over(c)
	if err != nil {
		return "", "", err
	}
	defer conn.Close()
	r, err := csi.NewIdentityClient(conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(false))
	return r.GetName(), r.GetVendorVersion(), err
}
