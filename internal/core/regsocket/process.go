package kubelet

import (
	"context"
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

	"csi-registrar/internal/sys/process"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/unixsock"
)

// ProcessName is the name of the kubelet's pidfd in the descriptor store.
const ProcessName = "kubelet"

// Process follows the kubelet, which is the process that calls NotifyRegistrationStatus: a pidfd of
// it is readable once it has ended, so nothing polls. The pidfd is also in the descriptor store,
// because after a restart of the daemon no kubelet calls.
type Process struct {
	o       ProcessOptions
	host    *Host
	running sync.WaitGroup // of follow
	saves   sync.WaitGroup // of save

	saving sync.Mutex // one writer of the record and of the store at a time

	mu     sync.Mutex
	last   status.Kubelet
	pidfd  *os.File // of last; nil: there is none
	closed bool
}

// ProcessOptions are the options of NewProcess. Log and Observe are required.
type ProcessOptions struct {
	Log     *slog.Logger
	Store   Store                // nil: none
	RunDir  string               // as in Options
	Observe func(status.Kubelet) // called at each change, one at a time; must not block
}

// processRecord is the record of the kubelet for the next process.
type processRecord struct {
	status.Kubelet
	// Inode is the pidfd's, which is the process's own since Linux 6.9. Before that all pidfds
	// have the same one.
	Inode uint64 `json:"inode"`
}

// NewProcess returns a Process that does not know a kubelet yet.
func NewProcess(o ProcessOptions) *Process {
	if o.Store == nil {
		o.Store = noStore{}
	}
	return &Process{o: o, host: newHost()}
}

// Adopt continues with the pidfd that the descriptor store held while no process ran. One without
// its record is dropped: the end of that kubelet is not noticed.
func (p *Process) Adopt(ctx context.Context, files []*os.File) error {
	if len(files) == 0 {
		return nil
	}
	rec, err := p.readRecord() // fails without a RunDir
	var pidfd *os.File
	for _, f := range files {
		if inode, statErr := inodeOf(f); err == nil && statErr == nil && inode == rec.Inode && pidfd == nil {
			pidfd, err = process.Copy(f)
		}
		err = errors.Join(err, f.Close())
	}
	if pidfd == nil {
		return errors.Join(err, p.o.Store.Forget(ctx, ProcessName))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last, p.pidfd = rec.Kubelet, pidfd
	p.running.Go(func() { p.follow(pidfd) })
	p.o.Observe(p.last)
	return err
}

// confirmed follows the process at the other end of a connection by which the kubelet reported a
// result.
func (p *Process) confirmed(c net.Conn) {
	next, pidfd, err := identify(c.(syscall.Conn))
	if err != nil {
		p.o.Log.Debug("the end of the kubelet cannot be noticed", "error", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	same := pidfd == nil && p.pidfd == nil || pidfd != nil && p.pidfd != nil && next.PID == p.last.PID && !process.HasEnded(p.pidfd)
	if p.closed || same {
		if pidfd != nil {
			_ = pidfd.Close() // a copy that nobody else uses; no error of it matters
		}
		return
	}
	if !p.last.EndedAt.IsZero() {
		p.o.Log.Info("another kubelet has reported", "pid", next.PID)
	}
	before := p.pidfd
	p.last, p.pidfd = next, pidfd
	if before != nil {
		_ = before.Close() // this ends its follow
	}
	p.saves.Add(1)
	p.running.Go(func() {
		p.save()
		if pidfd != nil {
			p.follow(pidfd)
		}
	})
	p.o.Observe(next)
}

// identify returns the peer of a connection; the zero Kubelet if it cannot be followed.
func identify(c syscall.Conn) (status.Kubelet, *os.File, error) {
	cred, err := unixsock.PeerCred(c)
	if err != nil {
		return status.Kubelet{}, nil, err
	}
	pidfd, err := process.Peer(c)
	if err != nil {
		return status.Kubelet{}, nil, err
	}
	return status.Kubelet{PID: cred.PID, ConfirmedAt: time.Now().UTC()}, pidfd, nil
}

// follow records the end of the process, unless the pidfd is closed before.
func (p *Process) follow(pidfd *os.File) {
	if process.AwaitEnd(pidfd) != nil {
		return
	}
	p.mu.Lock()
	// Else it ended before the daemon's restart.
	noticed := p.pidfd == pidfd && p.last.EndedAt.IsZero() && !p.closed
	if noticed {
		p.saves.Add(1)
		p.last.EndedAt = time.Now().UTC()
		p.o.Log.Info("the kubelet ended", "pid", p.last.PID)
		p.o.Observe(p.last)
	}
	p.mu.Unlock()
	if noticed {
		p.save()
	}
}

// save puts the pidfd into the store and writes the record.
func (p *Process) save() {
	defer p.saves.Done()
	p.saving.Lock()
	defer p.saving.Unlock()
	p.mu.Lock()
	rec, pidfd := processRecord{Kubelet: p.last}, p.pidfd
	p.mu.Unlock()
	err := p.store(pidfd, &rec)
	if err == nil && p.o.RunDir != "" {
		err = p.host.writeJSON(p.recordPath(), rec)
	}
	p.mu.Lock()
	replaced := p.pidfd != pidfd // and closed; the next save is of the other one
	p.mu.Unlock()
	if err != nil && !replaced {
		p.o.Log.Warn("after a restart of csi-registrar the end of the kubelet will not be noticed", "error", err)
	}
}

// store puts the pidfd into the store, and its inode into the record.
func (p *Process) store(pidfd *os.File, rec *processRecord) (err error) {
	ctx := context.Background() // both have their own time limit
	if pidfd == nil {
		return p.o.Store.Forget(ctx, ProcessName)
	}
	if rec.Inode, err = inodeOf(pidfd); err != nil || !rec.EndedAt.IsZero() { // then it is there
		return err
	}
	return p.o.Store.Keep(ctx, ProcessName, pidfd)
}

func (p *Process) recordPath() string { return filepath.Join(p.o.RunDir, "state", "kubelet.json") }

func (p *Process) readRecord() (rec processRecord, err error) {
	if p.o.RunDir == "" {
		return rec, errors.New("there is no record of the kubelet")
	}
	b, err := p.host.ReadFile(p.recordPath())
	if err == nil {
		err = json.Unmarshal(b, &rec)
	}
	if err != nil {
		return processRecord{}, fmt.Errorf("cannot read the record of the kubelet: %w", err)
	}
	return rec, nil
}

func inodeOf(f *os.File) (uint64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, errors.ErrUnsupported
	}
	return stat.Ino, nil
}

// Close ends following. The pidfd stays in the store for the next process.
func (p *Process) Close() error {
	p.mu.Lock()
	p.closed = true
	pidfd := p.pidfd
	p.mu.Unlock()
	p.saves.Wait()
	var err error
	if pidfd != nil {
		err = pidfd.Close()
	}
	p.running.Wait()
	return err
}
