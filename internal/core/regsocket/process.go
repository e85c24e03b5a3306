package regsocket

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/process"
)

// Process follows the kubelet, which is the process that calls NotifyRegistrationStatus: a pidfd of
// it is readable once it has ended, so nothing polls. The next process of the daemon finds it by
// its record, because no kubelet calls after a restart of the daemon.
type Process struct {
	log     *slog.Logger
	observe func(status.Kubelet)
	file    string // of the record; empty: there is none
	host    *Host
	running sync.WaitGroup // of follow

	mu     sync.Mutex
	last   processRecord
	pidfd  *os.File // of last; nil: there is none
	closed bool
}

// processRecord is the record of the kubelet for the next process.
type processRecord struct {
	status.Kubelet
	// process.StartTime; 0: not visible, so it cannot be found again
	Started uint64 `json:"started"`
}

// NewProcess returns a Process that does not know a kubelet yet. runDir is as in Options. observe
// is called at each change, one at a time; it must not block.
func NewProcess(log *slog.Logger, runDir string, observe func(status.Kubelet)) *Process {
	p := &Process{log: log, observe: observe, host: newHost()}
	if runDir != "" {
		p.file = filepath.Join(runDir, "state", "kubelet.json")
	}
	return p
}

// Adopt continues with the kubelet that an earlier process recorded, which may have ended since.
func (p *Process) Adopt() error {
	if p.file == "" {
		return nil
	}
	var rec processRecord
	b, err := p.host.ReadFile(p.file)
	if err == nil {
		err = json.Unmarshal(b, &rec)
	}
	if err != nil || rec.Started == 0 {
		return ignoreMissing(err)
	}
	toAges(&rec.ConfirmedAt, &rec.EndedAt)
	pidfd, err := process.Open(rec.PID)
	if err == nil && process.StartTime("/proc", rec.PID) != rec.Started { // another process
		err = errors.Join(unix.ESRCH, pidfd.Close())
		pidfd = nil
	}
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last, p.pidfd = rec, pidfd
	p.running.Go(func() { p.follow(pidfd) })
	p.observe(rec.Kubelet)
	return nil
}

// confirmed follows the process at the other end of a connection by which the kubelet reported a
// result.
func (p *Process) confirmed(c net.Conn) {
	pid, pidfd, err := process.Peer(c.(syscall.Conn))
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.log.Debug("the end of the kubelet cannot be noticed", "error", err)
		p.observe(status.Kubelet{})
		return
	}
	if p.closed || p.pidfd != nil && pid == p.last.PID && !process.HasEnded(p.pidfd) {
		_ = pidfd.Close() // a copy that nobody else uses; no error of it matters
		return
	}
	if !p.last.EndedAt.IsZero() {
		p.log.Info("another kubelet has reported", "pid", pid)
	}
	if p.pidfd != nil {
		_ = p.pidfd.Close() // this ends its follow
	}
	p.last, p.pidfd = processRecord{status.Kubelet{PID: pid, ConfirmedAt: time.Now()}, process.StartTime("/proc", pid)}, pidfd
	p.save()
	p.running.Go(func() { p.follow(pidfd) })
	p.observe(p.last.Kubelet)
}

// follow records the end of the process, unless the pidfd is closed before. A process without one
// has ended.
func (p *Process) follow(pidfd *os.File) {
	if pidfd != nil && process.AwaitEnd(pidfd) != nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	// else it ended before the daemon's restart
	if p.pidfd == pidfd && p.last.EndedAt.IsZero() && !p.closed {
		p.last.EndedAt = time.Now()
		p.log.Info("the kubelet ended", "pid", p.last.PID)
		p.save()
		p.observe(p.last.Kubelet)
	}
}

// save writes the record; the caller holds p.mu, which no look takes.
func (p *Process) save() {
	if p.file == "" {
		return
	}
	if err := p.host.writeJSON(p.file, p.last); err != nil {
		p.log.Warn("after a restart of csi-registrar the end of the kubelet will not be noticed", "error", fmt.Errorf("cannot write the record: %w", err))
	}
}

// Close ends following.
func (p *Process) Close() error {
	p.mu.Lock()
	p.closed = true
	pidfd := p.pidfd
	p.mu.Unlock()
	var err error
	if pidfd != nil {
		err = pidfd.Close()
	}
	p.running.Wait()
	return err
}
