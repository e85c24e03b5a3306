package driver

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
)

// inquire asks what is to be asked, and keeps the connection if that is good for anything.
//
// Over a new connection all is asked at once: most drivers are ready when they serve, and
// each question that waits for the answer to another costs another turn of both processes. A
// driver that was not ready is asked one thing after the other, so that what is a lot of work
// for it is not asked each second.
func (c *Client) inquire(ctx context.Context, t *talk) status.Report {
	var (
		r        status.Report
		node     status.Identity // of it only what NodeGetInfo answers
		endpoint place
		ahead    sync.WaitGroup
	)
	asked, giveUp := context.WithCancel(ctx)
	askProbe := func() verdict { return c.probe(asked, t) }
	askNode := func() verdict { return c.node(asked, t, &node) }
	if !t.known {
		t.known = true
		askProbe, askNode = begin(&ahead, askProbe), begin(&ahead, askNode)
	}
	v := c.who(ctx, t, &r.Identity)
	if v.driver == "" {
		endpoint, v = c.checkEndpoint(ctx, t.link, r.Identity.Name)
	}
	up := false
	if v.driver == "" {
		v = askProbe()
		up = v.driver == ""
	}
	if v.driver == "" {
		v = askNode()
	}
	giveUp()
	ahead.Wait()
	if v.driver == "" {
		v.driver = status.Ready
		r.Identity.NodeID, r.Identity.MaxVolumes, r.Identity.Topology = node.NodeID, node.MaxVolumes, node.Topology
	}
	r.Driver, r.Reason = v.driver, v.reason
	c.keep(t, endpoint, v.driver, up)
	return r
}

// begin runs f now, and returns what gives its result.
func begin[T any](wg *sync.WaitGroup, f func() T) func() T {
	var result T
	done := make(chan struct{})
	wg.Go(func() {
		defer close(done)
		result = f()
	})
	return func() T {
		<-done
		return result
	}
}

const maxMessageShown = 300 // characters of a driver's own words

// who asks GetPluginInfo.
func (c *Client) who(ctx context.Context, t *talk, id *status.Identity) verdict {
	begun := time.Now()
	info, err := getPluginInfo(ctx, t, c.cfg.Timeout)
	if err != nil {
		return failed(ctx, "GetPluginInfo", c.cfg.Timeout, begun, err)
	}
	t.hear()
	return judgeInfo(c.cfg, info, id)
}

func getPluginInfo(ctx context.Context, t *talk, limit time.Duration) (*csi.GetPluginInfoResponse, error) {
	identity := csi.NewIdentityClient(t.cc)
	return persist(ctx, limit, func(ctx context.Context) (*csi.GetPluginInfoResponse, error) {
		return identity.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	})
}

// probe asks Probe. The CSI specification lets a driver not implement it, or leave ready
// unset, and means ready by both.
func (c *Client) probe(ctx context.Context, t *talk) verdict {
	begun := time.Now()
	identity := csi.NewIdentityClient(t.cc)
	answer, err := persist(ctx, c.cfg.Timeout, func(ctx context.Context) (*csi.ProbeResponse, error) {
		return identity.Probe(ctx, &csi.ProbeRequest{})
	})
	if err != nil && grpcstatus.Code(err) != codes.Unimplemented {
		return failed(ctx, "Probe", c.cfg.Timeout, begun, err)
	}
	t.hear()
	if answer.GetReady() != nil && !answer.GetReady().GetValue() {
		return verdict{status.Starting, "the driver answers Probe with \"not ready\": see its own log"}
	}
	return verdict{}
}

// node asks NodeGetInfo, once: for some drivers it is a lot of work.
func (c *Client) node(ctx context.Context, t *talk, id *status.Identity) verdict {
	begun := time.Now()
	limited, cancel := context.WithTimeout(ctx, nodeInfoTimeout)
	defer cancel()
	info, err := csi.NewNodeClient(t.cc).NodeGetInfo(limited, &csi.NodeGetInfoRequest{})
	if err != nil {
		return failed(ctx, "NodeGetInfo", nodeInfoTimeout, begun, err)
	}
	t.hear()
	return judgeNode(info, id)
}

// checkEndpoint asks at the endpoint, which the kubelet will be told, if it is another
// path than the socket and can be seen from here. It need not be: a driver may see
// another file system than we do. It returns what was found there.
//
// An endpoint that does not answer, or is no socket yet, is Starting, not Mismatch: drivers
// restart, folders are mounted late, and a mismatch takes the registration away.
func (c *Client) checkEndpoint(ctx context.Context, socket *link, name string) (place, verdict) {
	path := c.cfg.Endpoint
	if path == c.cfg.Socket {
		return place{}, verdict{}
	}
	at, mode, err := look(path)
	if err != nil || at.same(socket.at) {
		return at, verdict{} // not seen; or one socket under two names
	}
	if mode != os.ModeSocket {
		return at, verdict{status.Starting, fmt.Sprintf("the endpoint %s, which the kubelet would be told, is not a socket: mend the key endpoint, or remove what is there", path)}
	}
	l, v := dial(ctx, path)
	if l == nil {
		return at, verdict{status.Starting, "the endpoint, which the kubelet would be told, does not answer: " + v.reason}
	}
	if v := c.trust.listener(path, l.peer); v.driver != "" {
		l.end()
		return at, v
	}
	t, err := newTalk(l)
	if err != nil {
		return at, verdict{status.Starting, err.Error()}
	}
	defer t.close()
	begun := time.Now()
	info, err := getPluginInfo(ctx, t, c.cfg.Timeout)
	if err != nil {
		v := failed(ctx, "GetPluginInfo", c.cfg.Timeout, begun, err)
		return at, verdict{status.Starting, fmt.Sprintf("at the endpoint %s, which the kubelet would be told: %s", path, v.reason)}
	}
	if info.GetName() != name {
		return at, verdict{status.Mismatch, fmt.Sprintf("the endpoint %s, which the kubelet would be told, is of the driver %q, the socket %s of %q: mend the key endpoint",
			path, safetext.Clean(info.GetName(), status.MaxName), c.cfg.Socket, name)}
	}
	return l.at, verdict{}
}

// failed says in an operator's words what went wrong with a call. The driver is there, so
// it is Starting: it is asked again.
func failed(ctx context.Context, method string, limit time.Duration, begun time.Time, err error) verdict {
	if ctx.Err() != nil {
		return verdict{status.Starting, "asking was interrupted"}
	}
	s := grpcstatus.Convert(err)
	message := safetext.Clean(s.Message(), maxMessageShown)
	switch code := s.Code(); {
	case code == codes.DeadlineExceeded && time.Since(begun) >= limit*9/10: // ours; a driver can say it too
		return verdict{status.Starting, fmt.Sprintf("the driver accepts connections but did not answer %s within %s", method, limit)}
	case code == codes.Unimplemented:
		why := "is this the socket of a CSI driver?"
		if method == "NodeGetInfo" {
			why = "is this the socket of its controller, not of its node service?"
		}
		return verdict{status.Starting, fmt.Sprintf("the driver does not implement %s: %s (%s)", method, why, message)}
	case code == codes.Unavailable:
		return verdict{status.Starting, fmt.Sprintf("the connection to the driver broke, or it does not speak gRPC, while %s was asked: %s", method, message)}
	case code == codes.ResourceExhausted:
		return verdict{status.Starting, fmt.Sprintf("the driver's answer to %s is too large, or it is out of resources: %s", method, message)}
	}
	return verdict{status.Starting, fmt.Sprintf("the driver answered %s with an error: %s: %s; see its own log", method, s.Code(), message)}
}
