package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// settling is what a daemon may take to come to rest after its drivers are registered.
const settling = 15 * time.Second

// atRest: what the daemon costs when all is well, with 1 to 1,000 registered drivers.
func atRest(ctx context.Context, o options) error {
	var base usage
	for _, n := range []int{1, 20, 100, 1000} {
		u, err := restWith(ctx, o, n)
		if err != nil {
			return fmt.Errorf("%d drivers: %w", n, err)
		}
		u.print(fmt.Sprintf("%d registered", n), o.idle)
		if n == 1 {
			base = u
		} else {
			value("  growth per driver, PSS", (u.pss-base.pss)/float64(n-1), "kB")
		}
	}
	return nil
}

func restWith(ctx context.Context, o options, n int) (u usage, err error) {
	b, err := newNode(n)
	if err != nil {
		return u, err
	}
	defer func() { err = first(err, b.close()) }()
	stop, err := b.drivers(n)
	if err != nil {
		return u, err
	}
	defer func() { err = first(err, stop()) }()
	if _, err := b.start(ctx, o); err != nil {
		return u, err
	}
	for i := range n {
		if _, err := await(ctx, b.regSock(i)); err != nil {
			return u, err
		}
		if err := register(ctx, b.regSock(i)); err != nil {
			return u, err
		}
	}
	time.Sleep(settling)
	return measure(b.cmd.Process.Pid, o.idle)
}

// peerAtRest: the same for the other registrar, one process.
func peerAtRest(ctx context.Context, o options) (err error) {
	if o.peer == "" {
		return nil
	}
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
	end, err := startPeer(ctx, o.peer, b, 0)
	if err != nil {
		return err
	}
	defer func() { err = first(err, end()) }()
	if _, err := await(ctx, b.regSock(0)); err != nil {
		return err
	}
	if err := register(ctx, b.regSock(0)); err != nil {
		return err
	}
	pid, err := childNamed(strings.Fields(o.peer)[0])
	if err != nil {
		return err
	}
	time.Sleep(settling)
	u, err := measure(pid, o.idle)
	if err == nil {
		u.print("peer, 1 registered", o.idle)
	}
	return err
}

// childNamed finds our child that runs a program.
func childNamed(program string) (int, error) {
	list, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/children", os.Getpid()))
	if err != nil {
		return 0, err
	}
	for _, pid := range strings.Fields(string(list)) {
		if exe, err := os.Readlink(filepath.Join("/proc", pid, "exe")); err == nil && filepath.Base(exe) == filepath.Base(program) {
			return strconv.Atoi(pid)
		}
	}
	return 0, fmt.Errorf("%s does not run", program)
}

// usage is what a process costs; memory in kB.
type usage struct {
	pss, dirty     float64
	files, threads int
	idleSwitches   int
	idleCPU        time.Duration
}

func (u usage) print(who string, idle time.Duration) {
	value(who+": PSS", u.pss/1000, "MB")
	value(who+": private dirty", u.dirty/1000, "MB")
	fmt.Printf("%-46s %9d descriptors, %d threads\n", who, u.files, u.threads)
	fmt.Printf("%-46s %9d switches, %.2f ms CPU\n", fmt.Sprintf("%s: idle %s", who, idle), u.idleSwitches, float64(u.idleCPU)/1e6)
}

// measure looks at a process, and again after a while.
func measure(pid int, idle time.Duration) (u usage, err error) {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	before, cpuBefore, err := activity(dir)
	if err != nil {
		return u, err
	}
	time.Sleep(idle)
	after, cpuAfter, err := activity(dir)
	if err != nil {
		return u, err
	}
	u.idleSwitches, u.idleCPU = after-before, cpuAfter-cpuBefore
	for field, to := range map[string]*float64{"Pss:": &u.pss, "Private_Dirty:": &u.dirty} {
		if *to, err = fieldOf(filepath.Join(dir, "smaps_rollup"), field); err != nil {
			return u, err
		}
	}
	files, err := os.ReadDir(filepath.Join(dir, "fd"))
	if err != nil {
		return u, err
	}
	tasks, err := os.ReadDir(filepath.Join(dir, "task"))
	u.files, u.threads = len(files), len(tasks)
	return u, err
}

// activity sums what all threads did: voluntary switches and time on a CPU.
func activity(dir string) (switches int, cpu time.Duration, err error) {
	tasks, err := filepath.Glob(filepath.Join(dir, "task", "*"))
	if err != nil {
		return 0, 0, err
	}
	for _, t := range tasks {
		n, err := fieldOf(filepath.Join(t, "status"), "voluntary_ctxt_switches:")
		if err != nil {
			return 0, 0, err
		}
		s, err := os.ReadFile(filepath.Join(t, "schedstat"))
		if err != nil {
			return 0, 0, err
		}
		ns, err := strconv.ParseInt(strings.Fields(string(s))[0], 10, 64)
		if err != nil {
			return 0, 0, err
		}
		switches, cpu = switches+int(n), cpu+time.Duration(ns)
	}
	return switches, cpu, nil
}

func fieldOf(file, name string) (float64, error) {
	f, err := os.Open(file)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if words := strings.Fields(s.Text()); len(words) > 1 && words[0] == name {
			return strconv.ParseFloat(words[1], 64)
		}
	}
	return 0, fmt.Errorf("%s has no %s", file, name)
}
