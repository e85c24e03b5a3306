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

	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/grpcconn"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/worker"
)

// liveTimeout is how long a driver has to answer Probe, the connection included: the default
// of --probe-timeout of kubernetes-csi/livenessprobe (v2.19).
const liveTimeout = 3 * time.Second

// ErrAbsent is the error of Live and LiveName if nobody listens at the driver's socket.
var ErrAbsent = errors.New("nobody listens at the driver's socket")

// Live returns nil if the driver at the socket answers Probe as kubernetes-csi/livenessprobe
// (v2.19) wants it: over a new connection, without an error of any code (Unimplemented
// included) and not with "not ready"; an answer that leaves ready out counts as ready. The text of
// an error contains nothing that the driver reported, so everybody may read it. Only a socket that
// owner may serve is asked (trust.SocketOwner).
func Live(ctx context.Context, pool *worker.Pool, owner trust.SocketOwner, socket string) error {
	answer, err := callOnce(ctx, pool, owner, socket, "Probe", csi.IdentityClient.Probe)
	if err == nil && notReady(answer) {
		err = errors.New("the driver answers Probe with \"not ready\"")
	}
	return err
}

// LiveName returns the name that the driver at the socket reports, asked as Live does. A name
// that the kubelet would not accept is an error.
func LiveName(ctx context.Context, pool *worker.Pool, owner trust.SocketOwner, socket string) (string, error) {
	info, err := callOnce(ctx, pool, owner, socket, "GetPluginInfo", csi.IdentityClient.GetPluginInfo)
	if err == nil && csiname.CheckName(info.GetName()) != nil {
		err = errors.New("the driver reports a name that the kubelet does not accept")
	}
	return info.GetName(), err
}

// callOnce makes one call over a new connection.
func callOnce[Q, A any](ctx context.Context, pool *worker.Pool, owner trust.SocketOwner, socket, method string,
	do func(csi.IdentityClient, context.Context, *Q, ...grpc.CallOption) (*A, error)) (*A, error) {
	ctx, cancel := context.WithTimeout(ctx, liveTimeout)
	defer cancel()
	l, err := worker.Do(ctx, pool.Slot(socket, nil), liveTimeout, func() lookResult { return lookOnce(owner, socket, true) }, lookResult.discard)
	switch {
	case err != nil:
		return nil, errors.New("the file system of the driver's socket does not answer")
	case l.state == status.Absent:
		return nil, ErrAbsent
	case l.state == status.Mismatch:
		return nil, errors.New("the owner of the driver's socket is not trusted")
	case !l.ok():
		return nil, errors.New("the driver does not accept connections")
	}
	defer l.discard() // gRPC may not have used it yet
	cc, err := grpcconn.New(l.raw, maxMessage)
	if err != nil {
		return nil, errors.New("cannot speak gRPC with the driver")
	}
	defer cc.Close()
	answer, err := do(csi.NewIdentityClient(cc), ctx, new(Q))
	deadline, _ := ctx.Deadline()
	switch code := grpcstatus.Code(err); {
	case err == nil:
		return answer, nil
	// gRPC passes the deadline on to the driver, whose answer can come just before it.
	case ctx.Err() != nil, code == codes.DeadlineExceeded && time.Until(deadline) < liveTimeout/10:
		return nil, fmt.Errorf("the driver does not answer %s within %s", method, liveTimeout)
	default:
		return nil, fmt.Errorf("the driver answers %s with the error %s", method, code)
	}
}
