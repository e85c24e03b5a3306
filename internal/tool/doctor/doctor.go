// Package doctor finds out why a CSI driver is not registered: it does what the kubelet does,
// step by step, with the daemon or without it, and prints how to fix what is wrong.
//
// It runs as root and reads untrusted text: from drivers, processes and file names. Such text is
// only shown, marked by safetext.Quote or Word. In a Fix there is none of it, except names that
// were validated and paths that safetext.Command quotes.
package doctor

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"maps"
	"net"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/volumes"
	"csi-registrar/internal/sys/mountinfo"
	"csi-registrar/internal/sys/worker"
)

// Options select what to examine.
type Options struct {
	Source  config.Source
	Drivers []string // by name; none: all configured drivers
	Units   Units
	Version string // of this program; empty: not to be compared with the daemon's
	// Root is the root directory of /proc and of everything else but the configuration; tests have
	// their own. Default "/".
	Root string
	// NodeInfoTimeout is the time limit of NodeGetInfo. The kubelet's own is 2 minutes. Default
	// 15 s.
	NodeInfoTimeout time.Duration
	// Recent is how old a change of a unit's files may be to be worth showing. Default 1 day.
	Recent time.Duration
}

const (
	fileTimeout = 3 * time.Second // for a file system to answer
	// for a socket to accept and to answer GetInfo: the kubelet's own limit
	socketTimeout = time.Second
)

// diagnosis is one run of doctor.
type diagnosis struct {
	o        Options
	pool     *worker.Pool
	config   *config.Result
	daemon   daemon
	kubelet  *kubelet            // the kubelet of this node; nil: none was found
	runtimes []process           // container runtimes
	served   map[string][]plugin // what is served in plugins_registry, by driver
	stale    []plugin            // sockets in plugins_registry that nobody listens on
	report   Report

	properties    map[string]string // of the daemon's unit
	propertiesErr error             // why systemd could not be asked for them
	known         *sync.Map         // what was asked, by memo

	volumes       []volumes.Volume  // in use
	volumesErr    error             // why some could not be read
	inPods        []podMount        // what pods have mounted, in all mount namespaces
	kubeletMounts []mountinfo.Mount // none if they cannot be read
	waiting       []podWait         // pods that wait for a volume
}

// Run examines the node and its drivers. It changes nothing and makes only the calls that the
// kubelet makes. Each step has a time limit, even if a file system does not answer,
// and ends with ctx.
func Run(ctx context.Context, o Options) Report {
	o.Root = cmp.Or(o.Root, "/")
	o.NodeInfoTimeout = cmp.Or(o.NodeInfoTimeout, 15*time.Second)
	o.Recent = cmp.Or(o.Recent, 24*time.Hour)
	x := newDiagnosis(o)
	x.report = Report{Findings: []Finding{}, Checks: []Check{}}
	x.loadConfig(ctx)
	x.askUnit(ctx)
	x.awaitUnit(ctx)
	x.daemon = daemon{err: control.ErrNotRunning}
	// The control socket of a service that has failed is still there, and connecting
	// would start the service.
	if x.properties["ActiveState"] != "failed" {
		x.daemon = x.askDaemon(ctx)
	}
	x.served = x.plugins(ctx)
	// Not root itself: if only a file system below it hangs, later looks at root must not wait too.
	root := x.config.Config.Kubelet.RootDir
	x.volumes, x.volumesErr = look(ctx, x, path.Join(root, "{pods,plugins}"), func() ([]volumes.Volume, error) { return volumes.Read(root, x.proc(), 0) })

	x.configuration(ctx)
	x.kubelets(ctx)
	x.nodeObject(ctx)
	x.unit(ctx)
	x.running(ctx)
	x.withdrawals(ctx)
	x.watching(ctx)
	x.inPods = x.podMounts(ctx)
	if x.kubelet != nil {
		x.kubeletMounts = x.mountsOf(ctx, strconv.Itoa(x.kubelet.pid))
	}
	x.checkVolumes(ctx)
	x.withoutTable(ctx)
	x.staleSockets(ctx)
	x.drivers(ctx)
	x.degraded(ctx)
	x.report.arrange()
	return x.report
}

func newDiagnosis(o Options) *diagnosis {
	return &diagnosis{o: o, pool: worker.NewPool(), known: &sync.Map{}}
}

// drivers examines the drivers in parallel: the time limits of many drivers that hang would add
// up to minutes. Each driver adds its findings to a copy of the node's report.
func (x *diagnosis) drivers(ctx context.Context) {
	node := x.report
	node.Findings, node.Checks = slices.Clip(node.Findings), slices.Clip(node.Checks)
	own := each(x.config.Config.Drivers, func(d config.Driver) Report {
		y := *x
		y.report = node
		switch {
		case !x.selected(d.Name):
		case d.Enabled:
			y.driver(ctx, d)
		default:
			y.disabled(d)
		}
		return y.report
	})
	for _, r := range own {
		x.report.Findings = append(x.report.Findings, r.Findings[len(node.Findings):]...)
		x.report.Checks = append(x.report.Checks, r.Checks[len(node.Checks):]...)
	}
}

// each calls f for all items in parallel, and returns the results in the order of the items.
func each[T, R any](items []T, f func(T) R) []R {
	results := make([]R, len(items))
	var all sync.WaitGroup
	for i, item := range items {
		all.Go(func() { results[i] = f(item) })
	}
	all.Wait()
	return results
}

// memo returns what the first call of f with this key returned.
func memo[T any](x *diagnosis, key any, f func() (T, error)) (T, error) {
	first, _ := x.known.LoadOrStore(key, sync.OnceValues(f))
	return first.(func() (T, error))()
}

// look runs f, which accesses a file system and may never return. The error is then a
// *worker.NotAnswering, else that of the system call without its path, which is shown quoted or not
// at all.
func look[T any](ctx context.Context, x *diagnosis, path string, f func() (T, error)) (T, error) {
	value, err := worker.Get(ctx, x.pool.Slot(path, nil), fileTimeout, f, nil)
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return value, p.Err
	}
	if o, ok := errors.AsType[*net.OpError](err); ok {
		return value, o.Err
	}
	return value, err
}

// check runs f, which accesses a file system and may never return, as look does.
func (x *diagnosis) check(ctx context.Context, path string, f func() error) error {
	_, err := look(ctx, x, path, func() (struct{}, error) { return struct{}{}, f() })
	return err
}

// named reports whether drivers were named on the command line.
func (x *diagnosis) named() bool { return len(x.o.Drivers) > 0 }

// selected reports whether to examine a driver.
func (x *diagnosis) selected(name string) bool {
	return !x.named() || slices.Contains(x.o.Drivers, name)
}

// enabledDrivers returns the names of the drivers that have an enabled table.
func (x *diagnosis) enabledDrivers() (names []string) {
	for _, d := range x.config.Config.Drivers {
		if d.Enabled {
			names = append(names, d.Name)
		}
	}
	return names
}

func (x *diagnosis) registry() string {
	return rootdir.PluginsRegistry(x.config.Config.Kubelet.RootDir)
}

func (x *diagnosis) proc() string { return filepath.Join(x.o.Root, "proc") }

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
