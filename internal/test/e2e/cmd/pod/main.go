// Command pod is what runs in the pods of a test node, in an image of its own:
//
//	pod pause       wait for TERM
//	pod write FILE  write a line to FILE every 100 ms until TERM
//
// The file is opened for each line, so that each line proves that the path still works. A line is
// the time since the kernel started and the longest delay of an independent clock since the line
// before, both in ms: a gap that the clock has, too, was caused by the machine, not by the volume.
// A line that cannot be written is reported on standard error and missing in the file.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const interval = 100 * time.Millisecond

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	switch args := os.Args[1:]; {
	case len(args) == 1 && args[0] == "pause":
		<-ctx.Done()
	case len(args) == 2 && args[0] == "write":
		write(ctx, args[1])
	default:
		fmt.Fprintln(os.Stderr, "usage: pod pause | pod write FILE")
		os.Exit(2)
	}
}

func write(ctx context.Context, path string) {
	var worst atomic.Int64
	go watchClock(ctx, &worst)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		if err := appendLine(path, fmt.Sprintf("%d %d\n", uptime().Milliseconds(), time.Duration(worst.Swap(0)).Milliseconds())); err != nil {
			fmt.Fprintln(os.Stderr, "error:", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func appendLine(path, line string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	if _, err := f.WriteString(line); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}

// watchClock keeps the longest delay of a tick in worst.
func watchClock(ctx context.Context, worst *atomic.Int64) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := time.Now()
		worst.Store(max(worst.Load(), int64(now.Sub(last)-interval)))
		last = now
	}
}

// uptime also counts while the machine is off, because its kernel is the host's.
func uptime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return 0 // cannot happen: the clock exists since Linux 2.6
	}
	return time.Duration(ts.Nano())
}
