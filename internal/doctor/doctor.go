// Package doctor finds out why a CSI driver is not registered: it does what the kubelet
// does, step by step, with the daemon or without it, and says what to mend.
package doctor

import (
	"context"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"csi-registrar/internal/config"
	"csi-registrar/internal/control"
)

// Options says what to examine.
type Options struct {
	Source  config.Source
	Drivers []string // by name; none: all that are configured
	Units   Units    // nil: systemd is not asked
	// Root is where the rest of the node is, of which tests make their own: /proc and the
	// files of the kubelets' distributions. Default "/".
	Root string
	// Patience is how long NodeGetInfo may take, for which the kubelet waits 2 minutes.
	// Default 15 s.
	Patience time.Duration
}

// exam is one examination.
type exam struct {
	o       Options
	config  *config.Result
	service service
	daemon  daemon
	kubelet *kubelet            // the one that counts; nil: none was found
	served  map[string][]plugin // what is served in plugins_registry, by driver
	named   bool                // drivers were named
	report  Report
}

// Run examines the node and its drivers. It changes nothing, and a driver sees nothing
// but the calls that the kubelet would make. It takes as long as the slowest driver.
func Run(ctx context.Context, o Options) Report {
	if o.Root == "" {
		o.Root = "/"
	}
	if o.Patience == 0 {
		o.Patience = 15 * time.Second
	}
	x := &exam{o: o, named: len(o.Drivers) > 0}
	x.report = Report{Findings: []Finding{}, Checks: []Check{}}
	x.config = config.Load(o.Source)
	x.service = x.askUnit(ctx)
	x.daemon = daemon{err: control.ErrNotRunning}
	// The control socket of a service that has failed is still there, and connecting
	// would start it.
	if x.service.properties["ActiveState"] != "failed" {
		x.daemon = askDaemon(ctx, control.Path(o.Source.Root))
	}
	x.served = x.plugins(ctx)

	x.configuration()
	x.kubelets()
	x.unit(ctx)
	x.running()
	x.watching()
	for _, d := range x.config.Config.Drivers {
		if !x.wanted(d.Name) {
			continue
		}
		if !d.Enabled {
			x.disabled(ctx, d)
			continue
		}
		x.driver(ctx, d)
	}
	x.report.Healthy = !slices.ContainsFunc(x.report.Findings, func(f Finding) bool { return f.Severity == Problem })
	return x.report
}

// wanted tells whether a driver is to be examined.
func (x *exam) wanted(name string) bool {
	return !x.named || slices.Contains(x.o.Drivers, name)
}

func (x *exam) registry() string { return x.config.Config.Kubelet.PluginsRegistry() }

func (x *exam) proc() string { return filepath.Join(x.o.Root, "proc") }

// count is a number with its noun.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return strconv.Itoa(n) + " " + noun + "s"
}
