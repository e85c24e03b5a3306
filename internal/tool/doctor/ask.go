package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/sys/grpcconn"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/trust"
)

// untrusted reports that the driver's socket, or its server, violates the daemon's rules.
func (x *diagnosis) untrusted(ctx context.Context, d config.Driver, err error) {
	found, fix := err.Error(), []Fix(nil)
	if e, ok := errors.AsType[*trust.Error](err); ok {
		unit := x.serverOf(ctx, d.Name, process{}).unit
		if e.Owner != "" && unit != "" && x.show(ctx, unit)["User"] == e.Owner {
			x.finding(d.Name, "trust", "driver-not-trusted", found+x.setBy(ctx, unit, "User"), "socket_owner is the user of the driver",
				append([]Fix{note("%s runs the driver as %s", unit, safetext.ShellWord(e.Owner)),
					note("if the driver mounts by itself, it needs root: take User= out of its unit instead, then systemctl daemon-reload and restart it")}, x.setDriverKey(d.Name, "socket_owner", safetext.Quote(e.Owner))...)...)
			return
		}
		if e.Command.Name != "" {
			fix = append(fix, Fix{Command: e.Command}, reload)
		}
		if e.Owner != "" {
			fix = append(fix, note("or set socket_owner = %s in the table of the driver, if that user runs the driver", safetext.ShellWord(e.Owner)))
		}
	}
	if len(fix) == 0 {
		fix = append(fix, note("let only root change %s and the directories on its path", safetext.ShellWord(d.Socket)))
	}
	fix = append(fix, note("or set socket_owner to any in the table of the driver, which turns these checks off"))
	x.finding(d.Name, "trust", "driver-not-trusted", found,
		fmt.Sprintf("only %s can create a socket there, or listen on it", safetext.Word(string(d.SocketOwner))), fix...)
}

// maxAnswer is the largest answer of a driver in bytes.
const maxAnswer = 1 << 20

// ask makes the calls that the daemon, and then the kubelet, make to the driver.
func (x *diagnosis) ask(ctx context.Context, d config.Driver, c net.Conn, who process) {
	conn, err := grpcconn.New(c, maxAnswer)
	if err != nil {
		x.finding(d.Name, "GetPluginInfo", "driver-connection-failed", safetext.Quote(err.Error()), "")
		return
	}
	defer conn.Close()
	q := &questions{diagnosis: x, d: d, who: who, identity: csi.NewIdentityClient(conn), node: csi.NewNodeClient(conn)}
	if q.call(ctx, "GetPluginInfo", "it answers at once with the driver's name", q.pluginInfo) && q.sameName(ctx) &&
		q.call(ctx, "Probe", "it reports that it is ready, or does not implement Probe", q.probe) &&
		q.call(ctx, "NodeGetInfo", "it answers; the kubelet waits 2 minutes and then refuses the driver", q.nodeInfo) {
		q.checkNodeInfo(ctx)
	}
}

// questions makes the calls to one driver and keeps its answers.
type questions struct {
	*diagnosis
	d        config.Driver
	who      process
	identity csi.IdentityClient
	node     csi.NodeClient
	name     string
	info     *csi.NodeGetInfoResponse
}

// call makes one call and reports its failure. do returns the text for the report of a success.
func (q *questions) call(ctx context.Context, step Step, expected string, do func(context.Context) (seen string, err error)) bool {
	limit := q.d.Timeout
	if step == "NodeGetInfo" {
		limit = q.o.NodeInfoTimeout
	}
	longest := max(limit, q.o.NodeInfoTimeout) // to tell a slow driver from one that hangs
	limited, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	start := time.Now()
	seen, err := do(limited)
	took := time.Since(start)
	switch {
	case err == nil && took <= limit:
		q.checked(q.d.Name, step, OK, "%s", seen)
	case err == nil:
		server, set := q.configuredServer(ctx, q.d.Name, q.who)
		q.finding(q.d.Name, step, "driver-not-answering", fmt.Sprintf("the driver answers %s after %v, which is later than its timeout of %v%s", step, took.Round(time.Millisecond), limit, set), expected,
			slices.Concat(server.log(), server.revive, []Fix{note("if it cannot be faster")}, q.setDriverKey(q.d.Name, "timeout", safetext.Quote(max(time.Second, (3*took).Round(time.Second)).String())))...)
	default:
		id, found := failure(step, longest, err)
		server := q.serverOf(ctx, q.d.Name, q.who)
		found += server.ended
		if server.unit != "" && server.ended == "" {
			why, undo := q.blame(ctx, server.unit, "")
			found, server.revive = found+strings.Replace(why, ": ", "; it logged ", 1), append(undo, server.revive...)
		}
		q.finding(q.d.Name, step, id, found, expected, server.restart()...)
	}
	q.took(took)
	return err == nil
}

// wrongAnswer is the error of a call whose answer is invalid.
type wrongAnswer struct {
	id   ID
	text string
}

func (e wrongAnswer) Error() string { return e.text }

// failure returns the ID and the text for the error of a call.
func failure(step Step, limit time.Duration, err error) (ID, string) {
	if wrong, ok := errors.AsType[wrongAnswer](err); ok {
		return wrong.id, wrong.text
	}
	s := grpcstatus.Convert(err)
	said := safetext.Quote(s.Message())
	switch s.Code() {
	case codes.DeadlineExceeded:
		return "driver-not-answering", fmt.Sprintf("the driver does not answer %s within %v", step, limit)
	case codes.Unimplemented:
		return "driver-method-missing", fmt.Sprintf("the driver does not implement %s: %s", step, said)
	default:
		return "driver-call-failed", fmt.Sprintf("%s fails: %s: %s", step, s.Code(), said)
	}
}

func (q *questions) pluginInfo(ctx context.Context) (string, error) {
	r, err := q.identity.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	q.name = r.GetName()
	if err == nil && q.name == "" {
		err = wrongAnswer{"driver-name-empty", "the driver answers with an empty name"}
	}
	return safetext.Word(q.name) + " " + safetext.Word(r.GetVendorVersion()), err
}

// sameName reports whether the driver has the configured name, and adds a finding if not.
func (q *questions) sameName(ctx context.Context) bool {
	if q.name == q.d.Name {
		return true
	}
	found := fmt.Sprintf("the driver at %s reports name %s", safetext.Word(q.d.Socket), safetext.Quote(q.name))
	if n := q.volumesOf(q.d.Name); n > 0 {
		found += fmt.Sprintf("; %s of %s in use on this node", safetext.Count(n, "volume"), q.d.Name)
	}
	server, set := q.configuredServer(ctx, q.d.Name, q.who)
	q.finding(q.d.Name, "GetPluginInfo", "driver-name-mismatch", found+set,
		fmt.Sprintf("name %q, as in %s", q.d.Name, q.origin(q.d.Name, "socket")), q.rename(ctx, server)...)
	return false
}

// rename configures the driver under the name that it reports, or stops a program that took the
// socket of a unit.
func (q *questions) rename(ctx context.Context, reports server) []Fix {
	if units := sortedKeys(q.unitsNaming(ctx, q.d.Name)); len(units) == 1 && q.who.pid > 1 && q.who.unit != units[0] && !q.who.confined {
		stop := append([]Fix{note("%s has this socket in its files, and another program took it", units[0])}, q.stopRegistrar(ctx, q.who)...)
		return append(stop, server{unit: units[0]}.start()...)
	}
	if csiname.CheckName(q.name) != nil {
		return append([]Fix{note("no driver can have that name: correct it, or the path of the socket if another program serves it")}, reports.log()...)
	}
	if n := q.volumesOf(q.d.Name); n > 0 {
		return append([]Fix{note("do not rename the table: the kubelet could not unmount the %s of %s any more", safetext.Count(n, "volume"), q.d.Name),
			note("have the driver report the name %s again, or give the table the socket of %s", q.d.Name, q.d.Name)},
			reports.restart()...)
	}
	if q.o.Source.File != "" {
		return []Fix{note("rename the table of %s to the name that the driver reports, %s", q.d.Name, q.name)}
	}
	renamed := q.d
	renamed.Name = q.name
	table := append(renamed.Table(), fmt.Sprintf("[driver.%q]", q.d.Name), "enabled = false")
	return []Fix{note("if %s is the intended driver", q.name), run("mkdir", "-p", q.confDir()),
		write(filepath.Join(q.confDir(), dropInPrefix+q.name+".toml"), table...), reload}
}

func (q *questions) probe(ctx context.Context) (string, error) {
	r, err := q.identity.Probe(ctx, &csi.ProbeRequest{})
	switch {
	case grpcstatus.Code(err) == codes.Unimplemented:
		return "not implemented, which counts as ready", nil
	case err == nil && r.GetReady() != nil && !r.GetReady().GetValue():
		err = wrongAnswer{"driver-not-ready", "the driver reports in Probe that it is not ready"}
	}
	return "ready", err
}

func (q *questions) nodeInfo(ctx context.Context) (seen string, err error) {
	q.info, err = q.node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	limit := "no volume limit"
	if n := q.info.GetMaxVolumesPerNode(); n > 0 {
		limit = "at most " + safetext.Count(int(n), "volume")
	}
	return fmt.Sprintf("node id %s, %s, %s", safetext.Word(q.info.GetNodeId()), limit, safetext.Count(len(q.info.GetAccessibleTopology().GetSegments()), "topology key")), err
}

// checkNodeInfo reports each rule that the answer to NodeGetInfo breaks.
func (q *questions) checkNodeInfo(ctx context.Context) {
	ids := []ID{"node-id-invalid", "topology-invalid", "volume-limit-invalid"} // by NodeField
	for _, p := range driver.CheckNode(q.info) {
		if p.Accepted { // the line of the check has it
			continue
		}
		fix := note("change the flags or the configuration of the driver that this value comes from")
		server, set := q.configuredServer(ctx, q.d.Name, q.who)
		q.finding(q.d.Name, "NodeGetInfo", ids[p.Field], p.Found+set, p.Expected, append([]Fix{fix}, server.restart()...)...)
	}
}
