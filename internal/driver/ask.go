package driver

import (
	"context"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
)

const (
	probeMethod     = "Probe"
	maxMessageShown = 300 // characters of a driver's own words

	// slowAfter is when a call that is not answered is reported.
	slowAfter = time.Second

	// lookPause is between two looks that hints ask for during a call.
	lookPause = 5 * time.Millisecond
)

// replaced ends an inquiry: the driver that is asked is no longer the one at the path.
var replaced = finding{status.Starting, "the driver's socket was replaced while the driver was asked"}

// inquiry is one round of calls over the client's connection.
type inquiry struct {
	*Client
	ctx      context.Context
	progress func(status.Report)
	status.Report
}

// run asks one thing after the other: what comes later may be a lot of work for a driver
// that is not ready.
func (q *inquiry) run(endpoint unixsock.File) finding {
	t := q.conn
	identity := csi.NewIdentityClient(t.cc)
	info, f := call(q, t, "GetPluginInfo", q.cfg.Timeout, identity.GetPluginInfo)
	if f.ok() {
		f = validateInfo(q.cfg, info, &q.Identity)
	}
	if f.ok() {
		f = q.checkEndpoint(endpoint)
	}
	if !f.ok() {
		return f
	}
	// The CSI specification lets a driver not implement Probe, or leave ready unset, and means
	// ready by both.
	probe, f := call(q, t, probeMethod, q.cfg.Timeout, identity.Probe)
	if f.ok() && probe.GetReady() != nil && !probe.GetReady().GetValue() {
		f = finding{status.Starting, "the driver answers Probe with \"not ready\": see its own log"}
	}
	if !f.ok() {
		return f
	}
	node, f := call(q, t, "NodeGetInfo", nodeInfoTimeout, csi.NewNodeClient(t.cc).NodeGetInfo)
	if f.ok() {
		f = validateNode(node, &q.Identity)
	}
	return f
}

// call makes one call over t and waits for its end. Meanwhile it looks, at each hint, if the
// driver is still the one at the path: one that hangs must not hide its successor.
func call[Q, A any](q *inquiry, t *conn, method string, limit time.Duration, do func(context.Context, *Q, ...grpc.CallOption) (*A, error)) (answer *A, f finding) {
	begun := time.Now() // before the limit runs
	ctx, cancel := context.WithTimeout(q.ctx, limit)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		var err error
		answer, err = do(ctx, new(Q))
		done <- err
	}()
	slow := time.NewTimer(slowAfter)
	defer slow.Stop()
	hints, resume := q.hints.Hints(), (<-chan time.Time)(nil)
	for {
		select {
		case err := <-done:
			code := grpcstatus.Code(err)
			if code != codes.DeadlineExceeded && code != codes.Canceled {
				t.answered = time.Now()
			}
			switch {
			case err == nil, code == codes.Unimplemented && method == probeMethod:
				return answer, finding{}
			case q.ctx.Err() != nil:
				return nil, interrupted
			case q.budget.spend(0):
				return nil, flood
			}
			return nil, failed(method, limit, time.Since(begun), t.broken(), grpcstatus.Convert(err))
		case <-slow.C:
			if q.progress != nil {
				r := q.Report
				r.Driver, r.Reason = status.Starting, fmt.Sprintf("the driver accepts connections but has not answered %s for %s", method, slowAfter)
				q.progress(r)
			}
		case <-hints:
			q.hinted = true
			if q.moved(q.ctx, t) || t != q.conn && q.moved(q.ctx, q.conn) {
				cancel()
				<-done
				return nil, replaced
			}
			hints, resume = nil, time.After(lookPause)
		case <-resume:
			hints, resume = q.hints.Hints(), nil
		}
	}
}

// checkEndpoint asks at the endpoint, which the kubelet will be told, if it is another file
// than the socket and can be seen from here.
//
// An endpoint that does not answer, or is no socket yet, is Starting, not Mismatch: drivers
// restart, directories are mounted late, and a mismatch takes the registration away.
func (q *inquiry) checkEndpoint(file unixsock.File) finding {
	path := q.cfg.Endpoint
	if file.FileID == (unixsock.FileID{}) || file.FileID == q.conn.file.FileID || unixsock.CheckPath(path) != nil {
		return finding{} // not seen; one socket under two names; or for an endpoint_link only
	}
	if !file.IsSocket() {
		return finding{status.Starting, fmt.Sprintf("the endpoint %s, which the kubelet would be told, is %s, not a socket: fix the key endpoint, or remove it", path, file.Kind())}
	}
	t, f := q.dial(q.ctx, q.endpoint)
	if f.state == status.Mismatch {
		return f
	}
	if !f.ok() {
		return finding{status.Starting, "the endpoint, which the kubelet would be told, does not answer: " + f.reason}
	}
	defer t.close()
	info, f := call(q, t, "GetPluginInfo", q.cfg.Timeout, csi.NewIdentityClient(t.cc).GetPluginInfo)
	switch {
	case f == replaced || f == interrupted:
		return f
	case !f.ok():
		return finding{status.Starting, fmt.Sprintf("at the endpoint %s, which the kubelet would be told: %s", path, f.reason)}
	case info.GetName() != q.Identity.Name:
		return finding{status.Mismatch, fmt.Sprintf("the endpoint %s, which the kubelet would be told, is of the driver %s, the socket %s of %q: fix the key endpoint",
			path, quote(info.GetName(), status.MaxName), q.cfg.Socket, q.Identity.Name)}
	}
	return finding{}
}

// failed says in an operator's words what went wrong with a call. The driver is there, so it
// is Starting: it is asked again.
func failed(method string, limit, took time.Duration, broken bool, s *grpcstatus.Status) finding {
	message := quote(s.Message(), maxMessageShown)
	why := fmt.Sprintf("the driver answered %s with an error: %s: %s; see its own log", method, s.Code(), message)
	switch {
	case s.Code() == codes.DeadlineExceeded && took >= limit*9/10: // ours; a driver can say it too
		why = fmt.Sprintf("the driver accepts connections but did not answer %s within %s", method, limit)
	case s.Code() == codes.Unimplemented && method == "NodeGetInfo":
		why = fmt.Sprintf("the driver does not implement NodeGetInfo: is this the socket of its controller, not of its node service? (%s)", message)
	case s.Code() == codes.Unimplemented:
		why = fmt.Sprintf("the driver does not implement %s: is this the socket of a CSI driver? (%s)", method, message)
	case s.Code() == codes.Unavailable && broken: // a driver can say it too
		why = fmt.Sprintf("the connection to the driver broke, or it does not speak gRPC, while %s was asked: %s", method, message)
	case s.Code() == codes.ResourceExhausted:
		why = fmt.Sprintf("the driver's answer to %s is too large, or it is out of resources: %s", method, message)
	}
	return finding{status.Starting, why}
}
