package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"
	"unicode"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"csi-registrar/internal/config"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
	"csi-registrar/internal/trust"
	"csi-registrar/internal/unixsock"
)

// trusted checks who can be behind the driver's socket, by the daemon's rules, and reports
// what is wrong. peer is who listens there; nil: nobody has connected yet.
func (x *diagnosis) trusted(ctx context.Context, d config.Driver, peer *unixsock.Cred) bool {
	rule := trust.SocketOwner(d.SocketOwner)
	_, err := look(ctx, x, d.Socket, func() (struct{}, error) {
		if peer != nil {
			return struct{}{}, rule.Listener(d.Socket, *peer)
		}
		return struct{}{}, rule.Path(d.Socket)
	})
	switch {
	case err == nil && peer != nil && d.SocketOwner == config.OwnerAny:
		x.checked(d.Name, StepTrust, Skipped, `socket_owner = "any"`)
	case err == nil && peer != nil:
		x.checked(d.Name, StepTrust, OK, "only %s can be behind the socket", safetext.Word(d.SocketOwner))
	}
	if err == nil {
		return true
	}
	at := x.origin(d, "socket_owner")
	found, fix := sentence(err.Error()), []Fix(nil)
	if e, ok := errors.AsType[*trust.Error](err); ok {
		if e.Command.Name != "" {
			fix = []Fix{{Command: e.Command}}
		}
		if e.Owner != "" {
			fix = append(fix, text("or set socket_owner = %s in %s, if that user runs the driver", safetext.Quote(e.Owner), at))
		}
	}
	fix = append(fix, text(`or set socket_owner = "any" in %s, to turn these checks off`, at), reload)
	x.problem(d.Name, StepTrust, DriverNotTrusted, found,
		fmt.Sprintf("nobody but %s can put a socket there, or listen on it", safetext.Word(d.SocketOwner)), fix...)
	return false
}

// sentence is a text that another package put together: quoted as a whole, if what it cites is
// not as plain as a usual path or name.
func sentence(s string) string {
	if strings.ContainsFunc(s, func(r rune) bool {
		return r > unicode.MaxASCII || unicode.IsControl(r) || strings.ContainsRune("$`;|&<>*?\\!#{}[]~^", r)
	}) {
		return safetext.Quote(s)
	}
	return s
}

// maxAnswer is the largest answer of a driver in bytes.
const maxAnswer = 1 << 20

// ask makes the calls that the daemon, and then the kubelet, make to the driver.
func (x *diagnosis) ask(ctx context.Context, d config.Driver, c net.Conn, who process) {
	conn, err := unixsock.NewClient(c, maxAnswer)
	if err != nil {
		x.problem(d.Name, StepPluginInfo, DriverConnectionFailed, safetext.Quote(err.Error()), "")
		return
	}
	defer conn.Close()
	q := &questions{diagnosis: x, d: d, who: who, identity: csi.NewIdentityClient(conn), node: csi.NewNodeClient(conn)}
	if q.call(ctx, StepPluginInfo, "it answers at once with the driver's name", q.pluginInfo) && q.sameName() &&
		q.call(ctx, StepProbe, "it says that it is ready, or does not implement Probe", q.probe) &&
		q.call(ctx, StepNodeInfo, "it answers; the kubelet waits 2 minutes and then refuses the driver", q.nodeInfo) {
		q.checkNodeInfo()
	}
}

// questions are the calls to one driver, and its answers.
type questions struct {
	*diagnosis
	d        config.Driver
	who      process
	identity csi.IdentityClient
	node     csi.NodeClient
	name     string
	info     *csi.NodeGetInfoResponse
}

// call makes one call and reports its failure; seen is what there is to say of success.
func (q *questions) call(ctx context.Context, step Step, expected string, do func(context.Context) (seen string, err error)) bool {
	limit := q.d.Timeout
	if step == StepNodeInfo {
		limit = q.o.NodeInfoTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	start := time.Now()
	seen, err := do(ctx)
	took := time.Since(start)
	if err == nil {
		q.checked(q.d.Name, step, OK, "%s", seen)
	} else {
		id, found := failure(step, limit, err)
		q.problem(q.d.Name, step, id, found, expected, q.who.repair()...)
	}
	q.took(took)
	return err == nil
}

// wrongAnswer is the error of a call that was answered, but not as it must be.
type wrongAnswer struct {
	id   ID
	text string
}

func (e wrongAnswer) Error() string { return e.text }

// failure says how a call ended.
func failure(step Step, limit time.Duration, err error) (ID, string) {
	if wrong, ok := errors.AsType[wrongAnswer](err); ok {
		return wrong.id, wrong.text
	}
	s := grpcstatus.Convert(err)
	said := safetext.Quote(s.Message())
	switch s.Code() {
	case codes.DeadlineExceeded:
		return DriverNotAnswering, fmt.Sprintf("the driver does not answer %s within %v", step, limit)
	case codes.Unimplemented:
		return DriverMethodMissing, fmt.Sprintf("the driver does not implement %s: %s", step, said)
	default:
		return DriverCallFailed, fmt.Sprintf("%s fails: %s: %s", step, s.Code(), said)
	}
}

// repair is what to do about a driver that fails.
func (p process) repair() []Fix {
	if strings.HasSuffix(p.unit, ".service") {
		return []Fix{logOf(p.unit), run("systemctl", "restart", p.unit)}
	}
	return []Fix{text("look into the log of the driver, which is process %d; restart it", p.pid)}
}

func (q *questions) pluginInfo(ctx context.Context) (string, error) {
	r, err := q.identity.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	q.name = r.GetName()
	if err == nil && q.name == "" {
		err = wrongAnswer{DriverNameEmpty, "the driver answers with an empty name"}
	}
	return safetext.Word(q.name) + " " + safetext.Word(r.GetVendorVersion()), err
}

// sameName reports whether the driver is the one that is configured, and what to do if not.
func (q *questions) sameName() bool {
	if q.name == q.d.Name {
		return true
	}
	at := q.origin(q.d, "socket")
	fix := text("fix the name or the socket of the table [driver.%q] in %s", q.d.Name, at)
	if status.CheckName(q.name) == nil {
		fix = text("name the table [driver.%q] in %s, or give it the socket of %s", q.name, at, q.d.Name)
	}
	q.problem(q.d.Name, StepPluginInfo, DriverNameMismatch,
		fmt.Sprintf("the driver at %s reports name %s", safetext.Word(q.d.Socket), safetext.Quote(q.name)),
		fmt.Sprintf("name %q, as in %s", q.d.Name, at), fix, reload)
	return false
}

func (q *questions) probe(ctx context.Context) (string, error) {
	r, err := q.identity.Probe(ctx, &csi.ProbeRequest{})
	switch {
	case grpcstatus.Code(err) == codes.Unimplemented:
		return "not implemented, which counts as ready", nil
	case err == nil && r.GetReady() != nil && !r.GetReady().GetValue():
		err = wrongAnswer{DriverNotReady, "the driver says in Probe that it is not ready"}
	}
	return "ready", err
}

func (q *questions) nodeInfo(ctx context.Context) (seen string, err error) {
	q.info, err = q.node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	limit := "no volume limit"
	if n := q.info.GetMaxVolumesPerNode(); n > 0 {
		limit = "at most " + count(int(n), "volume")
	}
	return fmt.Sprintf("node id %s, %s, %s", safetext.Word(q.info.GetNodeId()), limit, count(len(q.info.GetAccessibleTopology().GetSegments()), "topology key")), err
}

func (q *questions) checkNodeInfo() {
	for _, f := range nodeRules(q.info) {
		f.Driver, f.Step = q.d.Name, StepNodeInfo
		f.Fix = []Fix{text("fix this in the driver's own configuration, and restart it")}
		q.found(f)
	}
}
