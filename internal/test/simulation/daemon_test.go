package simulation

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"csi-registrar/internal/core/agent"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/core/regsocket"
	"csi-registrar/internal/core/registrar"
	"csi-registrar/internal/sys/worker"
)

// process is one process of the daemon: the real agent, registrars, sockets and grace periods, put
// together as internal/daemon does (parts.go, reload.go).
type process struct {
	w       *world
	number  int
	dead    bool
	killed  chan struct{} // closed by kill -9
	started time.Time
	stuck   int // calls that hang
	handles []*handle
	conns   []*conn

	agent      *agent.Agent
	pool       *worker.Pool
	options    kubelet.Options
	registries map[string]*kubelet.Registry
	stored     map[string][]*os.File
	mu         sync.Mutex // of registries and stored
	cancel     context.CancelFunc
	done       chan struct{}
	work       sync.WaitGroup

	hints    chan struct{}     // of the configuration files
	requests chan chan<- error // for a reload
	inForce  *config.InForce
	complete bool
	grace    config.Grace

	// What it did, for the invariants.
	failures  []failure
	causes    map[string][]string // of publications that are under way, by driver
	causedAt  map[string]time.Time
	first     map[string]bool        // it may publish without a cause: nothing is published
	adoptable map[string]bool        // what it found is as it should be
	asked     map[string]int         // republications because of reregister
	twice     map[string]time.Time   // another publication without a cause may follow
	moves     map[string][]time.Time // publications
	begun     map[string][]time.Time // what the registrar counts
	troubled  bool                   // something failed or hung
	faults    int                    // calls that failed alone
	unswept   bool                   // something could not be removed while it started
	directory uint64                 // the inode that it published in first; 0: none
}

type failure struct {
	at   time.Time
	path string
}

// startDaemon is what PID 1 does: it hands over what the store has.
func (w *world) startDaemon() {
	ctx, cancel := context.WithCancel(context.Background())
	w.processes++
	p := &process{
		w: w, number: w.processes, killed: make(chan struct{}), started: time.Now(), pool: worker.NewPool(),
		registries: map[string]*kubelet.Registry{}, stored: map[string][]*os.File{}, cancel: cancel, done: make(chan struct{}),
		hints: make(chan struct{}, 1), requests: make(chan chan<- error),
		causes: map[string][]string{}, causedAt: map[string]time.Time{}, first: map[string]bool{}, adoptable: map[string]bool{}, asked: map[string]int{},
		moves: map[string][]time.Time{}, begun: map[string][]time.Time{}, twice: map[string]time.Time{},
	}
	w.process = p
	w.losesOthers(w.disturbed(p))
	// It sweeps by the records below its own root_dir, once, unless the files have errors.
	sweeps := !w.disturbed(p) && !w.admin.broken && w.files.latency <= slowDisk
	for _, d := range w.drivers {
		rec := w.files.nodes[recordOf(d.name)].recorded()
		n := w.files.nodes[w.socketOf(d.name)]
		swept := sweeps && n != nil && n.sock != nil && rec.Path == w.socketOf(d.name) && rec.Bound == n.sock.bound
		if len(w.pid1.held[storeName(d.name)]) > 0 || swept {
			continue
		}
		w.lost[recordOf(d.name)] = true
		for _, root := range rootDirs {
			w.lost[socketIn(root, d.name)], w.lost[linkIn(root, d.name)] = true, true
		}
	}
	// Below its own root_dir it sweeps links once, sockets until they are gone.
	for _, root := range rootDirs {
		for _, name := range w.files.below(root) {
			if strings.HasPrefix(path.Base(name), ".") && (root != w.admin.root || w.disturbed(p) && path.Dir(name) != w.registry()) {
				w.lost[name] = true
			}
		}
	}
	for _, d := range w.drivers {
		p.adoptable[d.name] = w.adoptable(d)
		p.first[d.name] = !p.adoptable[d.name]
	}
	log := slog.New(&logHandler{p: p})
	p.options = kubelet.Options{
		Log: log, RunDir: runDir, Store: &store{p}, KeepSockets: true, Pool: p.pool, Host: p.host(),
		Watch:    func(paths ...string) kubelet.Watch { return w.files.watch(p, false, paths...) },
		WatchDir: func(dir string) kubelet.Watch { return w.files.watch(p, true, dir) },
	}
	for name, socks := range w.pid1.held {
		for _, s := range socks {
			f := &os.File{}
			w.passed[f] = s
			driver := strings.TrimPrefix(name, kubelet.StorePrefix)
			p.stored[driver] = append(p.stored[driver], f)
		}
	}
	p.agent = agent.New(log, p, "simulation")
	go p.run(ctx)
}

// run is daemon.Run.
func (p *process) run(ctx context.Context) {
	defer close(p.done)
	var agentDone sync.WaitGroup
	agentDone.Go(func() { _ = p.agent.Run(ctx) })
	p.begin(ctx)
	p.follow(ctx)
	p.work.Wait()
	agentDone.Wait()
	p.mu.Lock()
	registries := p.registries
	p.mu.Unlock()
	for _, r := range registries {
		_ = r.Close(context.WithoutCancel(ctx))
	}
	for _, files := range p.stored {
		for _, f := range files {
			f.Close()
		}
	}
}

// stop ends the process, in order or by kill -9.
func (p *process) stop(kill bool) {
	p.w.process = nil
	if kill {
		p.exit()
	}
	p.cancel()
}

// losesOthers: what could not be removed below another root_dir has no record: see README.md,
// "Open".
func (w *world) losesOthers(troubled bool) {
	if troubled {
		for _, name := range w.files.below(other(w.admin.root)) {
			w.lost[name] = true
		}
	}
}

// exit is the end of the process: it can do nothing any more, and all its descriptors are closed.
func (p *process) exit() {
	if p.dead {
		return
	}
	p.dead = true
	p.w.losesOthers(p.w.troubled())
	for _, d := range p.w.drivers {
		rec := p.w.files.nodes[recordOf(d.name)].recorded()
		for _, s := range p.w.pid1.held[storeName(d.name)] {
			// The next Check would have written it.
			if rec.Bound == s.bound && rec.GetInfoAt.Before(s.askedAt) {
				s.askedAt = rec.GetInfoAt
			}
			for _, root := range rootDirs { // it was killed while it published
				if name := socketIn(root, d.name); rec.Bound != s.bound && p.w.files.nodes[name] != nil {
					p.w.lost[name], p.w.lost[linkIn(root, d.name)] = true, true
				}
			}
			if s.told != nil && (p.w.files.mounts["r"].err != 0 || rec.Bound != s.bound || rec.Notification.Registered != s.told.Registered || rec.Notification.At.Before(s.toldAt)) {
				s.forgotten = true
			}
		}
	}
	close(p.killed)
	for _, h := range p.handles {
		h.close()
	}
	select {
	case <-p.done: // it was not killed
		p.w.checkEnd(p)
	default:
	}
	for _, c := range p.conns {
		c.close()
	}
}

// Driver implements agent.Parts.
func (p *process) Driver(d config.Driver) registrar.Driver {
	return p.w.driverAt(d.Socket).client(p, d.Timeout)
}

func (p *process) registry(root string) (*kubelet.Registry, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.registries[root] == nil {
		r, err := kubelet.Open(root, p.options)
		if err != nil {
			return nil, err
		}
		p.registries[root] = r
	}
	return p.registries[root], nil
}

// Socket implements agent.Parts.
func (p *process) Socket(ctx context.Context, c *config.Config, name string) (agent.Socket, error) {
	p.w.mu.Lock()
	none := p.w.noSockets
	if none {
		p.tried("opens the socket of " + name)
	}
	p.w.mu.Unlock()
	if none {
		return nil, errors.New("too many open files")
	}
	r, err := p.registry(c.Kubelet.RootDir)
	if err != nil {
		return nil, err
	}
	s, err := r.Socket(name)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	files := p.stored[name]
	delete(p.stored, name)
	p.mu.Unlock()
	if err := s.Adopt(ctx, files); err != nil && ctx.Err() != nil {
		return nil, errors.Join(err, s.Close(context.WithoutCancel(ctx)))
	}
	return s, nil
}

// begin is configReloader.begin.
func (p *process) begin(ctx context.Context) {
	w := p.w
	w.mu.Lock()
	res, good := w.admin.result(), w.admin.lastGood
	w.mu.Unlock()
	c := res.InForce()
	if good != nil {
		served := *good.Config
		p.mu.Lock()
		served.Drivers = slices.DeleteFunc(slices.Clone(served.Drivers), func(d config.Driver) bool { return p.stored[d.Name] == nil })
		p.mu.Unlock()
		switch {
		case len(res.Errors) == 0:
			c = p.grace.Keep(&config.InForce{Config: &served, Files: good.Files}, res, time.Now(), w.mustStay).InForce
		default:
			c = good
		}
	}
	if r, err := p.registry(c.Kubelet.RootDir); err == nil {
		var names, enabled []string
		for _, d := range c.Drivers {
			names = append(names, d.Name)
			if d.Enabled {
				enabled = append(enabled, d.Name)
			}
		}
		_, _ = r.Sweep(ctx, names)
		if len(res.Errors) == 0 {
			_, _ = r.SweepRecords(ctx, enabled)
		}
	}
	p.apply(ctx, c, len(res.Errors) == 0)
}

func (p *process) apply(ctx context.Context, c *config.InForce, complete bool) error {
	err := p.agent.Apply(ctx, c.Config, c.Files)
	p.inForce, p.complete = c, complete
	if !complete {
		return err
	}
	p.w.mu.Lock()
	if !p.dead {
		p.w.admin.lastGood = c
	}
	p.w.mu.Unlock()
	var unclaimed []string
	p.mu.Lock()
	for _, name := range slices.Sorted(maps.Keys(p.stored)) {
		if d, _ := c.Driver(name); !d.Enabled {
			unclaimed = append(unclaimed, name)
		}
	}
	p.mu.Unlock()
	p.work.Go(func() { _ = p.agent.WithdrawKept(ctx, unclaimed) })
	return err
}

// follow is configReloader.follow.
func (p *process) follow(ctx context.Context) {
	next := time.Now()
	by := func(t time.Time) {
		if next.IsZero() || !t.IsZero() && t.Before(next) {
			next = t
		}
	}
	read := func(grace bool) error {
		next = time.Time{}
		p.w.mu.Lock()
		res := p.w.admin.result()
		p.w.mu.Unlock()
		if len(res.Errors) > 0 {
			return res.Errors
		}
		c := res.InForce()
		if grace {
			kept := p.grace.Keep(p.inForce, res, time.Now(), p.w.mustStay)
			by(kept.Next)
			if c = kept.InForce; p.complete && p.inForce.Equal(c) {
				return nil
			}
		} else {
			p.grace = config.Grace{}
		}
		return p.apply(ctx, c, true)
	}
	for {
		var due <-chan time.Time
		if !next.IsZero() {
			due = time.After(time.Until(next))
		}
		select {
		case <-ctx.Done():
			return
		case <-p.hints:
			by(time.Now().Add(500 * time.Millisecond))
		case done := <-p.requests:
			done <- read(false)
		case <-due:
			_ = read(true)
		}
	}
}

// logHandler finds the causes in the log.
type logHandler struct {
	p      *process
	driver string
}

func (h *logHandler) Enabled(_ context.Context, level slog.Level) bool {
	return level == slog.LevelInfo
}
func (h *logHandler) WithGroup(string) slog.Handler { return h }
func (h *logHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	for _, a := range attrs {
		if a.Key == "driver" {
			return &logHandler{h.p, a.Value.String()}
		}
	}
	return h
}

func (h *logHandler) Handle(_ context.Context, r slog.Record) error {
	if w := h.p.w; w.story != nil {
		line := fmt.Sprintf("    daemon %d %s: %s", h.p.number, h.driver, r.Message)
		r.Attrs(func(a slog.Attr) bool {
			if a.Key == "reason" || a.Key == "error" || a.Key == "cause" {
				line += ", " + a.String()
			}
			return true
		})
		w.mu.Lock()
		w.tell("%s", line)
		w.mu.Unlock()
	}
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "cause" {
			h.p.w.caused(h.p, h.driver, a.Value.String(), r.Message == "withdrawing")
		}
		return a.Key != "cause"
	})
	return nil
}

// pid1 is the descriptor store, for systemd's notify (sd_pid_notify_with_fds(3), FDSTORE=1) and
// internal/sys/systemd: a descriptor is taken at once, but while PID 1 is busy nobody is told so.
type pid1 struct {
	held map[string][]*sock
	busy bool
	full bool // it takes no more
}

type store struct{ p *process }

func (s *store) change(name string, with *sock) error {
	w := s.p.w
	w.mu.Lock()
	if s.p.dead {
		w.mu.Unlock()
		return io.ErrClosedPipe
	}
	if with != nil && w.pid1.full && len(w.pid1.held[name]) == 0 {
		w.mu.Unlock()
		return errors.New("the descriptor store is full")
	}
	if with != nil {
		with.refs++
	}
	for _, old := range w.pid1.held[name] {
		old.release()
	}
	delete(w.pid1.held, name)
	if with == nil {
		s.p.first[strings.TrimPrefix(name, kubelet.StorePrefix)] = true // it was withdrawn
	} else {
		w.pid1.held[name] = []*sock{with}
	}
	busy := w.pid1.busy
	w.mu.Unlock()
	if busy {
		time.Sleep(300 * time.Millisecond)
	}
	return nil
}

func (s *store) Keep(_ context.Context, name string, c syscall.Conn) error {
	s.p.w.mu.Lock()
	with := s.p.w.socks[c.(kubelet.Listener).Addr().String()]
	s.p.w.mu.Unlock()
	return s.change(name, with)
}

func (s *store) Forget(_ context.Context, name string) error { return s.change(name, nil) }
