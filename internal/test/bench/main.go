// Command bench measures csi-registrar as a node feels it, and prints what it found beside
// the budget. Given the command line of another registrar it measures that as well.
//
//	go run ./internal/test/bench [--bin bin/csi-registrar] [--quick] [--peer 'CMD --csi-address={socket} …']
//
// It measures the packaged binary, which scripts/build makes. Everything happens in a
// temporary directory; nothing on the machine is changed.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

func main() {
	bin := flag.String("bin", "bin/csi-registrar", "the `FILE` of the daemon to measure")
	peer := flag.String("peer", "", "another registrar's `COMMAND` for one driver; {socket}, {registry} and {name} are replaced")
	quick := flag.Bool("quick", false, "fewer repetitions, shorter waits: for a first look only")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := bench(ctx, *bin, *peer, *quick); err != nil {
		fmt.Fprintln(os.Stderr, "error: cannot measure:", err)
		os.Exit(1)
	}
}

func bench(ctx context.Context, bin, peer string, quick bool) error {
	bin, err := filepath.Abs(bin)
	if err != nil {
		return err
	}
	environment, err := unitEnvironment("systemd/csi-registrar.service")
	if err != nil {
		return err
	}
	programs := []program{{args: []string{bin, "run", "--config-root", "{root}", "--keep-sockets"}, environment: environment, notifies: true}}
	if peer != "" {
		programs = append(programs, program{args: strings.Fields(peer)})
	}
	fmt.Printf("noise: %s\n\n%-52s %10s %10s %10s\n", noise(), "", "goal", "seen", "peer")
	for _, measure := range []func(context.Context, []program, bool) error{
		sizes, serveToAccept, startToReady, restarts, memoryAndIdling,
	} {
		if err := measure(ctx, programs, quick); err != nil {
			return err
		}
	}
	fmt.Printf("\nnoise: %s\n", noise())
	return nil
}

// unitEnvironment returns what Environment= of a unit sets: the daemon is measured as it is
// shipped.
func unitEnvironment(unit string) (environment []string, err error) {
	text, err := os.ReadFile(unit)
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), "Environment="); ok {
			environment = append(environment, strings.Fields(value)...)
		}
	}
	return environment, err
}

// row prints a line of the table: the daemon's figure and, where there is one, the peer's. A
// goal of 0 or more is the most that is good.
func row(name, unit string, goal float64, seen []float64) {
	cell := func(v float64) string { return fmt.Sprintf("%.4g %s", v, unit) }
	line := fmt.Sprintf("%-52s %10s %10s", name, "", cell(seen[0]))
	if goal >= 0 {
		line = fmt.Sprintf("%-52s %10s %10s", name, cell(goal), cell(seen[0]))
	}
	if len(seen) > 1 {
		line += fmt.Sprintf(" %10s", cell(seen[1]))
	}
	if goal >= 0 && seen[0] > goal {
		line += "  over the goal"
	}
	fmt.Println(line)
}

// noGoal is for figures that have none.
const noGoal = -1

// noise shows how much this machine itself disturbs: how late a sleep of a millisecond ends,
// and how many processes wait for a CPU.
func noise() string {
	var late []time.Duration
	for range 300 {
		begun := time.Now()
		time.Sleep(time.Millisecond)
		late = append(late, time.Since(begun)-time.Millisecond)
	}
	slices.Sort(late)
	load, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		load = []byte(err.Error())
	}
	return fmt.Sprintf("a sleep of 1 ms ends %s too late (median; worst %s); load %s", late[len(late)/2], late[len(late)-1], strings.TrimSpace(string(load)))
}

// pick is how often, or how long, in a full and in a quick run.
func pick[T any](quick bool, full, short T) T {
	if quick {
		return short
	}
	return full
}
