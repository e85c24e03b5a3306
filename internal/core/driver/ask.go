package driver

import (
	"context"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/unixsock"
)

const (
	probeMethod     = "Probe"
	maxMessageShown = 300 // characters of a driver's message

	// slowAfter is how long a call may be unanswered before that is reported.
	slowAfter = time.Second
)

// inquiry is one round of calls over the client's connection.
type inquiry struct {
	*Client
	ctx      context.Context
	progress func(status.Report)
	status.Report
}

// run makes the calls in order and stops at the first one that fails: a later one may be expensive
// for a driver that is not ready.
func (q *inquiry) run(endpoint unixsock.File) finding {
	info, f := call(q, q.conn, "GetPluginInfo", q.cfg.Timeout, csi.NewIdentityClient(q.conn.cc).GetPluginInfo)
	if f.ok() {
		f = validateInfo(q.cfg, info, &q.Identity)
	}
	if f.ok() {
		f = q.checkEndpoint(endpoint)
	}
	if !f.ok() {
		return f
	}
	q.Connection = q.dialed
	if f := q.probe(); !f.ok() {
		return f
	}
	node, f := call(q, q.conn, "NodeGetInfo", nodeInfoTimeout, csi.NewNodeClient(q.conn.cc).NodeGetInfo)
	if f.ok() {
		f = validateNode(node, &q.Identity)
	}
	return f
}

// probe calls Probe. According to the CSI specification a driver that does not implement it is
// ready.
func (q *inquiry) probe() finding {
	answer, f := call(q, q.conn, probeMethod, q.cfg.Timeout, csi.NewIdentityClient(q.conn.cc).Probe)
	if f.ok() && notReady(answer) {
		f = finding{status.Starting, "the driver answers Probe with \"not ready\": see its own log"}
	}
	return f
}

// notReady reports whether a driver answers that it is not ready. According to the CSI
// specification one that leaves ready unset is ready.
func notReady(answer *csi.ProbeResponse) bool {
	return answer.GetReady() != nil && !answer.GetReady().GetValue()
}

// call makes one call over t and waits for its end. At each hint it checks whether the same socket
// is still at the path: a driver that hangs must not hide its successor.
func call[Q, A any](q *inquiry, t *conn, method string, limit time.Duration, do func(context.Context, *Q, ...grpc.CallOption) (*A, error)) (answer *A, f finding) {
	begun := time.Now() // before the time limit starts
	ctx, cancel := context.WithTimeout(q.ctx, limit)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		var err error
		answer, err = do(ctx, new(Q))
		done <- err
	}()
	slow := time.After(slowAfter)
	for {
		select {
		case err := <-done:
			code := grpcstatus.Code(err)
			if code != codes.DeadlineExceeded && code != codes.Canceled {
				t.silentSince = time.Time{}
			}
			switch {
			case err == nil, code == codes.Unimplemented && method == probeMethod:
				return answer, finding{}
			case q.ctx.Err() != nil:
				return nil, interrupted
			case q.budget.spend(0):
				return nil, flood
			}
			took := time.Since(begun)
			// A driver can return DeadlineExceeded, too.
			q.Silent = code == codes.DeadlineExceeded && took >= limit*9/10
			if q.Silent && t.silentSince.IsZero() {
				t.silentSince = begun
			}
			return nil, failed(method, limit, q.Silent, t.broken(), grpcstatus.Convert(err))
		case <-slow:
			if q.progress != nil {
				r := q.Report
				r.Driver, r.Reason = status.Starting, fmt.Sprintf("the driver accepts connections but has not answered %s for %s", method, slowAfter)
				q.progress(r)
			}
		case <-q.hints.Hints():
			q.hinted = true
			if q.moved(q.ctx, t) || t != q.conn && q.moved(q.ctx, q.conn) {
				cancel()
				<-done
				return nil, interrupted
			}
		}
	}
}

// checkEndpoint calls GetPluginInfo at the endpoint, which the kubelet will be told, if it is
// visible here and another file than the socket.
//
// An endpoint that does not answer, or is not a socket yet, is Starting, not Mismatch: drivers
// restart, directories are mounted late, and a mismatch withdraws the registration.
func (q *inquiry) checkEndpoint(file unixsock.File) finding {
	path := q.cfg.Endpoint
	switch {
	case file.FileID == unixsock.FileID{} && q.reached:
		return finding{status.Starting, fmt.Sprintf("the endpoint %s, which the kubelet was told, is gone: fix the key endpoint, or remove it", path)}
	case file.FileID == unixsock.FileID{} || file.FileID == q.conn.file.FileID:
		return finding{} // not visible, or the same socket
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
	case f == interrupted:
		return f
	case !f.ok():
		return finding{status.Starting, fmt.Sprintf("at the endpoint %s, which the kubelet would be told: %s", path, f.reason)}
	case info.GetName() != q.Identity.Name:
		return finding{status.Mismatch, fmt.Sprintf("the endpoint %s, which the kubelet would be told, belongs to the driver %s, and the socket %s to %q: fix the key endpoint",
			path, quote(info.GetName(), csiname.MaxName), q.cfg.Socket, q.Identity.Name)}
	}
	q.reached = true
	return finding{}
}

// failed describes for an operator why a call failed. The driver accepts connections, so it is
// Starting: it is asked again.
func failed(method string, limit time.Duration, silent, broken bool, s *grpcstatus.Status) finding {
	message := quote(s.Message(), maxMessageShown)
	why := fmt.Sprintf("the driver answered %s with an error: %s: %s; see its own log", method, s.Code(), message)
	switch {
	case silent:
		why = fmt.Sprintf("the driver accepts connections but did not answer %s within %s", method, limit)
	case s.Code() == codes.Unimplemented && method == "NodeGetInfo":
		why = fmt.Sprintf("the driver does not implement NodeGetInfo: is this the socket of its controller, not of its node service? (%s)", message)
	case s.Code() == codes.Unimplemented:
		why = fmt.Sprintf("the driver does not implement %s: is this the socket of a CSI driver? (%s)", method, message)
	case s.Code() == codes.Unavailable && broken: // a driver can return the code, too
		why = fmt.Sprintf("the connection to the driver broke, or it does not speak gRPC, during %s: %s", method, message)
	case s.Code() == codes.ResourceExhausted:
		why = fmt.Sprintf("the driver's answer to %s is too large, or it is out of resources: %s", method, message)
	}
	return finding{status.Starting, why}
}

// How often a driver that is not ready is asked without a hint. Jitter keeps many drivers out of
// step.
const (
	askFirst   = time.Second      // then doubling up to askMost
	askMost    = 30 * time.Second // NodeGetInfo may be a request to an overloaded cloud
	askEager   = 10 * time.Second // a driver that answers is asked more often for this time
	askHanging = 3 * time.Second  // a driver that hangs, after the end of the last call
	// A driver that recovers within askEager is registered in 1.5 s, including the second in which
	// the kubelet notices the socket. In an hour it is asked at most 150 times.
	askEagerly = 475 * time.Millisecond
)

// backoff computes when to ask a driver again that is not ready. The zero value is ready to use.
type backoff struct {
	since      time.Time // of the first answer that was not ready; zero: the driver is absent
	pause      time.Duration
	connection uint64
	silent     bool
}

// next returns how long to wait after a report. A new connection starts the backoff again, unless
// it was made because the driver was silent.
func (b *backoff) next(rep status.Report, now time.Time) time.Duration {
	answered := rep.Driver == status.Starting
	switch {
	case answered && rep.Connection == 0: // only cheap calls were made
		if b.since.IsZero() {
			b.pause = 0
		}
		return rate.Jitter(askFirst, now)
	case answered && (b.since.IsZero() || rep.Connection != b.connection && !b.silent):
		*b = backoff{since: now}
	case !answered && !b.since.IsZero():
		*b = backoff{}
	}
	b.connection, b.silent = rep.Connection, rep.Silent
	if answered && now.Sub(b.since) < askEager {
		b.pause = 0
		return rate.Jitter(askEagerly, now)
	}
	b.pause = min(max(2*b.pause, askFirst), askMost)
	return rate.Jitter(b.pause, now)
}
