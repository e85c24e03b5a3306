package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"

	"csi-registrar/internal/core/control"
)

func sizes(_ context.Context, programs []program, _ bool) error {
	var seen []float64
	for _, p := range programs {
		path, err := exec.LookPath(p.args[0])
		if err != nil {
			return err
		}
		fi, err := os.Stat(path)
		if err != nil {
			return err
		}
		seen = append(seen, float64(fi.Size())/(1<<20))
	}
	row("packaged binary", "MiB", 16, seen)
	return nil
}

// serveToAccept: a driver was absent for a while, then serves; how long until its
// registration socket accepts?
func serveToAccept(ctx context.Context, programs []program, quick bool) error {
	for _, c := range []struct {
		absent      time.Duration
		full, short int
	}{{200 * time.Millisecond, 100, 20}, {3 * time.Second, 20, 2}, {10 * time.Second, 5, 1}} {
		var median, worst []float64
		for _, p := range programs {
			took, err := absences(ctx, p, c.absent, pick(quick, c.full, c.short))
			if err != nil {
				return fmt.Errorf("driver absent for %s: %w", c.absent, err)
			}
			median, worst = append(median, took[len(took)/2]), append(worst, took[len(took)-1])
		}
		name := fmt.Sprintf("driver absent %s, serves to socket accepts", c.absent)
		row(name+", median", "ms", 10, median)
		row(name+", worst", "ms", 50, worst)
	}
	return nil
}

// absences returns the sorted times in milliseconds.
func absences(ctx context.Context, p program, absent time.Duration, times int) (took []float64, err error) {
	b, err := newNode(1)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	for range times {
		if _, err := b.start(ctx, p); err != nil {
			return nil, err
		}
		// This is what is measured: a driver that is not there.
		if err := sleep(ctx, absent); err != nil {
			return nil, err
		}
		served, err := b.drivers[0].Start()
		if err != nil {
			return nil, err
		}
		accepted, err := accepts(ctx, b.registrationSocket(0))
		if err != nil {
			return nil, err
		}
		took = append(took, milliseconds(accepted.Sub(served)))
		if err := errors.Join(b.drivers[0].Stop(), b.reset()); err != nil {
			return nil, err
		}
	}
	slices.Sort(took)
	return took, nil
}

// accepts waits until somebody listens at path, and returns the moment.
func accepts(ctx context.Context, path string) (time.Time, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, 30*time.Second, errors.New("no registration socket within 30 s"))
	defer cancel()
	for {
		c, err := net.Dial("unix", path)
		now := time.Now()
		if err == nil {
			return now, c.Close()
		}
		if err := sleep(ctx, 100*time.Microsecond); err != nil {
			return now, err
		}
	}
}

// startToReady: from exec to READY=1, with 20 drivers that serve.
func startToReady(ctx context.Context, programs []program, quick bool) (err error) {
	b, err := newNode(20)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.serve(); err != nil {
		return err
	}
	var took []float64
	for range pick(quick, 30, 10) {
		d, err := b.start(ctx, programs[0])
		if err != nil {
			return err
		}
		took = append(took, milliseconds(d))
		if err := b.reset(); err != nil {
			return err
		}
	}
	slices.Sort(took)
	row("start to ready, 20 drivers, median", "ms", 50, took[len(took)/2:len(took)/2+1])
	return nil
}

// restarts counts what the kubelet writes when a registrar is killed and started again. The kubelet
// looks once a second, and must have looked before the next restart.
func restarts(ctx context.Context, programs []program, quick bool) error {
	times := pick(quick, 100, 5)
	var seen []float64
	for _, p := range programs {
		writes, err := writesIn(ctx, p, times)
		if err != nil {
			return fmt.Errorf("restarts: %w", err)
		}
		seen = append(seen, float64(writes))
	}
	row(fmt.Sprintf("CSINode writes in %d restarts (kill -9)", times), "", 0, seen)
	return nil
}

func writesIn(ctx context.Context, p program, times int) (writes int64, err error) {
	b, err := newNode(1)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.serve(); err != nil {
		return 0, err
	}
	if _, err := b.start(ctx, p); err != nil {
		return 0, err
	}
	if err := b.register(ctx); err != nil {
		return 0, err
	}
	before := b.writes.Load()
	for range times {
		if err := b.end(syscall.SIGKILL); err != nil {
			return 0, err
		}
		if _, err := b.start(ctx, p); err != nil {
			return 0, err
		}
		if err := sleep(ctx, 2200*time.Millisecond); err != nil { // two of the kubelet's looks
			return 0, err
		}
	}
	return b.writes.Load() - before, nil
}

// memoryAndIdling measures memory and CPU time when all drivers are registered and nothing happens,
// and while the metrics are scraped.
func memoryAndIdling(ctx context.Context, programs []program, quick bool) error {
	for _, c := range []struct {
		drivers        int
		goal, switches float64 // MiB of PSS; voluntary context switches
	}{{1, 18, 15}, {20, 22, 150}, {100, 34, noGoal}, {1000, noGoal, noGoal}} {
		var settled, scraped, switches []float64
		for _, p := range programs {
			if !p.notifies && c.drivers > 20 {
				continue
			}
			u, err := use(ctx, p, c.drivers, quick)
			if err != nil {
				return fmt.Errorf("%d drivers: %w", c.drivers, err)
			}
			settled, scraped, switches = append(settled, u.settled), append(scraped, u.scraped), append(switches, u.switches)
		}
		row(fmt.Sprintf("PSS with %d drivers, settled", c.drivers), "MiB", c.goal, settled)
		row(fmt.Sprintf("PSS with %d drivers, scraped every 30 s", c.drivers), "MiB", c.goal, scraped[:1])
		// In a quarter of a minute, the Probe of the whole minute would count four times.
		row(fmt.Sprintf("voluntary switches in an idle minute, %d drivers", c.drivers), "", pick(quick, c.switches, noGoal), switches)
	}
	return nil
}

type used struct{ settled, scraped, switches float64 }

func use(ctx context.Context, p program, n int, quick bool) (u used, err error) {
	b, err := newNode(n)
	if err != nil {
		return u, err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.serve(); err != nil {
		return u, err
	}
	if _, err := b.start(ctx, p); err != nil {
		return u, err
	}
	if err := b.register(ctx); err != nil {
		return u, err
	}
	// It may take this long until a daemon has settled.
	if err := sleep(ctx, 15*time.Second); err != nil {
		return u, err
	}
	before, err := switches(b.running)
	if err != nil {
		return u, err
	}
	idle := pick(quick, time.Minute, 15*time.Second)
	if err := sleep(ctx, idle); err != nil {
		return u, err
	}
	after, err := switches(b.running)
	if err != nil {
		return u, err
	}
	u.switches = math.Round((after - before) * float64(time.Minute) / float64(idle))
	if u.settled, err = pss(b.running); err != nil || !p.notifies {
		return u, err
	}
	for range pick(quick, 4, 2) {
		if err := scrape(ctx, b.root); err != nil {
			return u, err
		}
		now, err := pss(b.running)
		if err != nil {
			return u, err
		}
		u.scraped = max(u.scraped, now)
		if err := sleep(ctx, pick(quick, 30*time.Second, 2*time.Second)); err != nil {
			return u, err
		}
	}
	return u, nil
}

// scrape reads the metrics, over a new connection as a collector on the node does.
func scrape(ctx context.Context, root string) error {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", control.Path(root))
	}}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://./metrics", nil)
	if err != nil {
		return err
	}
	answer, err := client.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("cannot scrape: %s", answer.Status)
	}
	_, err = io.Copy(io.Discard, answer.Body)
	return err
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
