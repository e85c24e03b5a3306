// Package doctor finds out why a CSI driver is not registered: it does what the kubelet
// does, step by step, with the daemon or without it, and says how to fix what is wrong.
//
// It runs as root and reads what others wrote: drivers, processes, names of files. Their
// text is only shown, and marked by safetext.Quote or Word; a Fix holds none of it but a name
// that was checked or a path, which safetext.Command quotes.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"sync"
	"time"

	"csi-registrar/internal/config"
	"csi-registrar/internal/control"
	"csi-registrar/internal/pluginreg"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/worker"
)

// Options select what to examine.
type Options struct {
	Source  config.Source
	Drivers []string // by name; none: all that are configured
	Units   Units    // nil: systemd is not asked
	// Root is where the rest of the node is, of which tests make their own: /proc and the
	// files of the kubelets' distributions. Default "/".
	Root string
	// NodeInfoTimeout is how long NodeGetInfo may take, for which the kubelet waits 2
	// minutes. Default 15 s.
	NodeInfoTimeout time.Duration
}

const (
	fileTimeout   = 3 * time.Second // for a file system to answer
	socketTimeout = time.Second     // for a socket to accept and to answer GetInfo: the kubelet's own limit
)

// diagnosis is one run of doctor.
type diagnosis struct {
	o       Options
	pool    *worker.Pool
	config  *config.Result
	service service
	daemon  daemon
	kubelet *kubelet            // the one that counts; nil: none was found
	served  map[string][]plugin // what is served in plugins_registry, by driver
	named   bool                // drivers were named
	report  Report
}

// Run examines the node and its drivers. It changes nothing, and a driver sees nothing
// but the calls that the kubelet would make. Each step has a time limit, also where a file
// system does not answer; all of them end with ctx.
func Run(ctx context.Context, o Options) Report {
	if o.Root == "" {
		o.Root = "/"
	}
	if o.NodeInfoTimeout == 0 {
		o.NodeInfoTimeout = 15 * time.Second
	}
	x := &diagnosis{o: o, pool: worker.NewPool(), named: len(o.Drivers) > 0}
	x.report = Report{Findings: []Finding{}, Checks: []Check{}, Plugins: []Plugin{}}
	x.loadConfig(ctx)
	x.service = x.askUnit(ctx)
	x.daemon = daemon{err: control.ErrNotRunning}
	// The control socket of a service that has failed is still there, and connecting
	// would start it.
	if x.service.properties["ActiveState"] != "failed" {
		x.daemon = x.askDaemon(ctx)
	}
	x.served = x.plugins(ctx)

	x.configuration(ctx)
	x.kubelets(ctx)
	x.unit(ctx)
	x.running()
	x.watching(ctx)
	x.volumes(ctx)
	x.drivers(ctx)
	findings := x.report.Findings
	sort.SliceStable(findings, func(i, j int) bool { return findings[i].rank() < findings[j].rank() })
	x.report.Healthy = !slices.ContainsFunc(x.report.Findings, func(f Finding) bool { return f.Severity == Problem })
	return x.report
}

// drivers examines the drivers, all at once: of those that hang each has its time limits, and
// their sum would be minutes. Each has a copy of the report, as it is about the node, and adds to it.
func (x *diagnosis) drivers(ctx context.Context) {
	node := x.report
	node.Findings, node.Checks = slices.Clip(node.Findings), slices.Clip(node.Checks)
	own := each(x.config.Config.Drivers, func(d config.Driver) Report {
		y := *x
		y.report = node
		switch {
		case !x.wanted(d.Name):
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

// each calls f for all items at the same time, and returns its results in their order.
func each[T, R any](items []T, f func(T) R) []R {
	results := make([]R, len(items))
	var all sync.WaitGroup
	for i, item := range items {
		all.Go(func() { results[i] = f(item) })
	}
	all.Wait()
	return results
}

// look runs f, which looks at a file system and may never return; then the error says that
// the file system of path does not answer.
func look[T any](ctx context.Context, x *diagnosis, path string, f func() (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	r, err := worker.Do(ctx, x.pool.Slot(path, nil), fileTimeout, func() result {
		value, err := f()
		return result{value, bare(err)}
	}, nil)
	switch {
	case err == nil:
		return r.value, r.err
	case errors.As(err, new(*worker.NotAnswering)):
		return r.value, fmt.Errorf("the file system of %s does not answer", safetext.Word(path))
	}
	return r.value, err // ctx has ended
}

// bare is the system's own error, without the path in it, which is shown quoted or not at all.
func bare(err error) error {
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		return p.Err
	}
	if o, ok := errors.AsType[*net.OpError](err); ok {
		return o.Err
	}
	return err
}

// wanted reports whether a driver is to be examined.
func (x *diagnosis) wanted(name string) bool {
	return !x.named || slices.Contains(x.o.Drivers, name)
}

func (x *diagnosis) registry() string { return pluginreg.Dir(x.config.Config.Kubelet.RootDir) }

func (x *diagnosis) proc() string { return filepath.Join(x.o.Root, "proc") }

// count is a number with its noun.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}
