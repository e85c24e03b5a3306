package driver

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"csi-registrar/internal/status"
	"csi-registrar/internal/trust"
	"csi-registrar/internal/unixsock"
	"csi-registrar/internal/worker"
)

// liveTimeout is how long a driver has to answer Probe, the connection included: the default
// of --probe-timeout of kubernetes-csi/livenessprobe (v2.19).
const liveTimeout = 3 * time.Second

// DeadError is why a driver is not live. Its text contains nothing that the driver reported, so
// everybody may read it.
type DeadError struct {
	// Absent reports that nobody listens at the driver's socket.
	Absent bool
	text   string
}

// Error implements error.
func (e *DeadError) Error() string { return e.text }

// Live returns nil if the driver at the socket answers Probe as kubernetes-csi/livenessprobe
// (v2.19) wants it: over a new connection, without an error of any code (Unimplemented
// included) and not with "not ready"; an answer that leaves ready out counts as ready. An
// error is a *DeadError. Only a socket that owner may serve is asked (trust.SocketOwner).
func Live(ctx context.Context, pool *worker.Pool, owner trust.SocketOwner, socket string) error {
	return callOnce(ctx, pool, owner, socket, "Probe", func(ctx context.Context, cc *grpc.ClientConn) error {
		answer, err := csi.NewIdentityClient(cc).Probe(ctx, &csi.ProbeRequest{})
		if err == nil && answer.GetReady() != nil && !answer.GetReady().GetValue() {
			return &DeadError{text: "the driver answers Probe with \"not ready\""}
		}
		return err
	})
}

// LiveName returns the name that the driver at the socket reports, asked as Live does. A name
// that the kubelet would not accept is an error.
func LiveName(ctx context.Context, pool *worker.Pool, owner trust.SocketOwner, socket string) (name string, err error) {
	err = callOnce(ctx, pool, owner, socket, "GetPluginInfo", func(ctx context.Context, cc *grpc.ClientConn) error {
		info, err := csi.NewIdentityClient(cc).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
		if err == nil && status.CheckName(info.GetName()) != nil {
			return &DeadError{text: "the driver reports a name that the kubelet does not accept"}
		}
		name = info.GetName()
		return err
	})
	return name, err
}

// callOnce makes one call over a new connection.
func callOnce(ctx context.Context, pool *worker.Pool, owner trust.SocketOwner, socket, method string,
	call func(context.Context, *grpc.ClientConn) error) error {
	ctx, cancel := context.WithTimeout(ctx, liveTimeout)
	defer cancel()
	l, err := worker.Do(ctx, pool.Slot(socket, nil), liveTimeout, func() lookResult { return lookOnce(owner, socket, true) }, lookResult.discard)
	switch {
	case err != nil:
		return &DeadError{text: "the file system of the driver's socket does not answer"}
	case l.state == status.Absent:
		return &DeadError{Absent: true, text: "nobody listens at the driver's socket"}
	case l.state == status.Mismatch:
		return &DeadError{text: "the owner of the driver's socket is not trusted"}
	case !l.ok():
		return &DeadError{text: "the driver does not accept connections"}
	}
	defer l.discard() // gRPC may not have used it yet
	cc, err := unixsock.NewClient(l.raw, maxMessage)
	if err != nil {
		return &DeadError{text: "cannot speak gRPC with the driver"}
	}
	defer cc.Close()
	err = call(ctx, cc)
	deadline, _ := ctx.Deadline()
	switch code := grpcstatus.Code(err); {
	case err == nil, errors.As(err, new(*DeadError)):
		return err
	// gRPC passes the deadline on to the driver, whose answer can come just before it.
	case ctx.Err() != nil, code == codes.DeadlineExceeded && time.Until(deadline) < liveTimeout/10:
		return &DeadError{text: fmt.Sprintf("the driver does not answer %s within %s", method, liveTimeout)}
	}
	return &DeadError{text: fmt.Sprintf("the driver answers %s with the error %s", method, grpcstatus.Code(err))}
}
