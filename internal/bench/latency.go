package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// serveToAccept: a driver was absent for a while, then serves; how long until its
// registration socket accepts?
func serveToAccept(ctx context.Context, o options) error {
	cases := []struct {
		absent time.Duration
		times  int
	}{{200 * time.Millisecond, 100}, {3 * time.Second, 20}, {10 * time.Second, 5}, {time.Minute, 3}}
	if o.quick {
		cases = cases[:2]
		cases[0].times, cases[1].times = 30, 3
	}
	for _, c := range cases {
		ours, err := absences(ctx, o, c.absent, c.times, "")
		if err != nil {
			return err
		}
		var peer series
		if o.peer != "" {
			if peer, err = absences(ctx, o, c.absent, min(c.times, 10), o.peer); err != nil {
				return err
			}
		}
		compare(fmt.Sprintf("driver serves to socket accepts, absent %s", c.absent), ours, peer)
	}
	return nil
}

func absences(ctx context.Context, o options, absent time.Duration, times int, peer string) (s series, err error) {
	b, err := newNode(1)
	if err != nil {
		return nil, err
	}
	defer func() { err = first(err, b.close()) }()
	for range times {
		ctx, cancel := context.WithTimeout(ctx, absent+30*time.Second)
		defer cancel()
		var end func() error
		if peer == "" {
			if _, err := b.start(ctx, o); err != nil {
				return s, err
			}
			end = func() error { return b.end(syscall.SIGKILL) }
		} else if end, err = startPeer(ctx, peer, b, 0); err != nil {
			return s, err
		}
		time.Sleep(absent) // this is what is measured: a driver that is not there
		d, at, err := serve(name(0), b.socket(0))
		if err != nil {
			return s, err
		}
		accepted, err := await(ctx, b.regSock(0))
		if err != nil {
			return s, fmt.Errorf("no registration socket: %w", err)
		}
		s = append(s, accepted.Sub(at))
		if err := first(end(), d.stop(), b.manager.Drop()); err != nil {
			return s, err
		}
		// The next one begins as the first: nothing published, nothing kept.
		if err := os.RemoveAll(b.registry()); err != nil {
			return s, err
		}
		if err := os.RemoveAll(filepath.Join(b.root, "run/csi-registrar")); err != nil {
			return s, err
		}
	}
	return s, nil
}

// startPeer starts the other registrar for driver i, restarted a second after it ends, as
// the kubelet does with a container.
func startPeer(ctx context.Context, command string, b *node, i int) (end func() error, err error) {
	if err := os.MkdirAll(b.registry(), 0o750); err != nil {
		return nil, err
	}
	args := strings.Fields(strings.NewReplacer("{socket}", b.socket(i), "{registry}", b.registry(), "{name}", name(i)).Replace(command))
	running := func() (*exec.Cmd, error) {
		c := exec.Command(args[0], args[1:]...)
		return c, c.Start()
	}
	c, err := running()
	if err != nil {
		return nil, err
	}
	stop, done := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			ended := make(chan struct{})
			go func() { _ = c.Wait(); close(ended) }() // how it ends is its own matter
			select {
			case <-stop:
				err := c.Process.Kill()
				<-ended
				done <- err
				return
			case <-ended:
			}
			time.Sleep(time.Second)
			if c, err = running(); err != nil {
				done <- err
				return
			}
		}
	}()
	b.cmd = nil
	return func() error { close(stop); return <-done }, nil
}

// startToReady: how long from exec to READY=1, with 20 drivers that are there.
func startToReady(ctx context.Context, o options) (err error) {
	b, err := newNode(20)
	if err != nil {
		return err
	}
	defer func() { err = first(err, b.close()) }()
	stop, err := b.drivers(20)
	if err != nil {
		return err
	}
	defer func() { err = first(err, stop()) }()
	var s series
	for range times(o, 30, 10) {
		d, err := b.start(ctx, o)
		if err != nil {
			return err
		}
		s = append(s, d)
		if err := first(b.end(syscall.SIGKILL), b.manager.Drop(), os.RemoveAll(b.registry())); err != nil {
			return err
		}
	}
	s.print("start to ready, 20 drivers")
	return nil
}

// restartThroughStore: how long somebody who connects while the daemon is killed and
// started again waits for the answer.
func restartThroughStore(ctx context.Context, o options) (err error) {
	b, err := newNode(1)
	if err != nil {
		return err
	}
	defer func() { err = first(err, b.close()) }()
	stop, err := b.drivers(1)
	if err != nil {
		return err
	}
	defer func() { err = first(err, stop()) }()
	if _, err := b.start(ctx, o); err != nil {
		return err
	}
	if _, err := await(ctx, b.regSock(0)); err != nil {
		return err
	}
	inode, err := inodeOf(b.regSock(0))
	if err != nil {
		return err
	}
	var s series
	for range times(o, 100, 20) {
		if err := b.end(syscall.SIGKILL); err != nil {
			return err
		}
		answered := make(chan error, 1)
		begun := time.Now()
		go func() { answered <- getInfo(ctx, b.regSock(0)) }()
		if _, err := b.start(ctx, o); err != nil {
			return err
		}
		if err := <-answered; err != nil {
			return fmt.Errorf("a GetInfo during the restart failed: %w", err)
		}
		s = append(s, time.Since(begun))
		if now, err := inodeOf(b.regSock(0)); err != nil || now != inode {
			return fmt.Errorf("the registration socket is another one: %w", err)
		}
	}
	s.print("kill -9 to GetInfo answered, through the store")
	return nil
}

func inodeOf(path string) (uint64, error) {
	var st syscall.Stat_t
	err := syscall.Stat(path, &st)
	return st.Ino, err
}

// getInfoUnderLoad: GetInfo, each on its own connection as the kubelet calls, while three
// others do the same.
func getInfoUnderLoad(ctx context.Context, o options) (err error) {
	b, err := newNode(1)
	if err != nil {
		return err
	}
	defer func() { err = first(err, b.close()) }()
	stop, err := b.drivers(1)
	if err != nil {
		return err
	}
	defer func() { err = first(err, stop()) }()
	if _, err := b.start(ctx, o); err != nil {
		return err
	}
	if _, err := await(ctx, b.regSock(0)); err != nil {
		return err
	}
	const callers = 4
	got := make(chan series, callers)
	failed := make(chan error, callers)
	for range callers {
		go func() {
			var s series
			for range times(o, 1000, 200) {
				begun := time.Now()
				if err := getInfo(ctx, b.regSock(0)); err != nil {
					failed <- err
					break
				}
				s = append(s, time.Since(begun))
			}
			got <- s
		}()
	}
	var all series
	for range callers {
		all = append(all, <-got...)
	}
	select {
	case err := <-failed:
		return err
	default:
	}
	all.print("GetInfo, 4 callers, connection included")
	return nil
}

func times(o options, full, quick int) int {
	if o.quick {
		return quick
	}
	return full
}

func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
