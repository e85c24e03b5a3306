// Command bench measures csi-registrar as a node feels it: how soon a driver is
// registered, what the daemon costs at rest, and what a start and a storm take. Given the
// command line of another registrar it measures that beside it, in the same run.
//
//	go run ./internal/bench --bin bin/csi-registrar [--quick] [--peer 'CMD --csi-address={socket} …']
//
// Everything happens in a temporary folder; nothing on the machine is changed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"
)

// options say what is measured and how long.
type options struct {
	bin, peer string
	quick     bool
	only      string
	idle      time.Duration
}

func main() {
	var o options
	flag.StringVar(&o.bin, "bin", "bin/csi-registrar", "the daemon to measure")
	flag.StringVar(&o.peer, "peer", "", "another registrar's command line for one driver; {socket}, {registry} and {name} are replaced")
	flag.BoolVar(&o.quick, "quick", false, "fewer repetitions, no long waits")
	flag.StringVar(&o.only, "only", "", "only the measures whose name contains this")
	flag.DurationVar(&o.idle, "idle", time.Minute, "how long to look at the daemon at rest")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := bench(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "error: cannot measure:", err)
		os.Exit(1)
	}
}

func bench(ctx context.Context, o options) error {
	bin, err := filepath.Abs(o.bin)
	if err != nil {
		return err
	}
	o.bin = bin
	if o.quick {
		o.idle = min(o.idle, 10*time.Second)
	}
	size, err := os.Stat(o.bin)
	if err != nil {
		return err
	}
	fmt.Printf("noise: %s\n\n", noise())
	fmt.Printf("%-46s %12s %12s %12s\n", "", "median", "p99", "worst")
	value("binary size", float64(size.Size())/1e6, "MB")
	measures := []struct {
		name string
		run  func(context.Context, options) error
	}{
		{"serve", serveToAccept},
		{"start", startToReady},
		{"restart", restartThroughStore},
		{"getinfo", getInfoUnderLoad},
		{"rest", atRest},
		{"storm", storms},
		{"peer", peerAtRest},
	}
	var errs []error
	for _, m := range measures {
		if strings.Contains(m.name, o.only) && ctx.Err() == nil {
			if err := m.run(ctx, o); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", m.name, err))
			}
		}
	}
	fmt.Printf("\nnoise: %s\n", noise())
	return errors.Join(errs...)
}

// noise says how much this machine itself disturbs: how late a sleep of a millisecond
// ends, and how many processes wait for a CPU.
func noise() string {
	var late series
	for range 300 {
		begun := time.Now()
		time.Sleep(time.Millisecond)
		late = append(late, time.Since(begun)-time.Millisecond)
	}
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		load = []byte(err.Error())
	}
	return fmt.Sprintf("a sleep of 1 ms ends %s too late (median; worst %s); load %s", late.at(0.5), late.at(1), strings.TrimSpace(string(load)))
}
