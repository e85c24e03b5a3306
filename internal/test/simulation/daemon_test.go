package simulation

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"csi-registrar/internal/core/agent"
	"csi-registrar/internal/core/driver"
	"csi-registrar/internal/core/registrar"
	"csi-registrar/internal/core/regsocket"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/worker"
)

// process is one process of the daemon: the real agent, registrars, sockets and grace periods, put
// together as internal/daemon does (start.go, reload.go).
type process struct {
	w       *world
	number  int
	dead    bool
	killed  chan struct{} // closed by kill -9
	started time.Time
	stuck   int // calls that hang
	handles []*handle
	conns   []*conn

	agent    *agent.Agent
	pool     *worker.Pool
	options  regsocket.Options
	registry *regsocket.Registry
	stored   map[string][]*os.File
	handed   map[string]bool // the same, of the start
	mu       sync.Mutex      // of stored
	cancel   context.CancelFunc
	done     chan struct{}
	work     sync.WaitGroup

	hints     chan struct{}     // of the configuration files
	requests  chan chan<- error // for a reload
	leftovers chan *config.Config
	inForce   *config.InForce
	complete  bool
	moving    bool // it ends for another root_dir
	grace     config.Grace

	// Its history, for the invariants.
	failures  []failure
	causes    map[string][]string // of publications that are under way, by driver
	causedAt  map[string]time.Time
	first     map[string]bool      // it may publish without a cause: nothing is published
	adoptable map[string]bool      // what it found is as it should be
	asked     map[string]int       // republications because of reregister
	twice     map[string]time.Time // another publication without a cause may follow
	moves     map[string][]move    // publications
	lost      map[string]loss      // what happened to the socket since the last one
	lostAt    map[string]time.Time
	conflicts map[string]bool        // a conflict was shown since the last publication
	retaken   map[string][]time.Time // publications after one
	clockSet  bool                   // before it started
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
		stored: map[string][]*os.File{}, handed: map[string]bool{}, cancel: cancel, done: make(chan struct{}),
		grace: config.Grace{Period: config.GracePeriod}, hints: make(chan struct{}, 1), requests: make(chan chan<- error), leftovers: make(chan *config.Config, 1),
		causes: map[string][]string{}, causedAt: map[string]time.Time{}, first: map[string]bool{}, adoptable: map[string]bool{}, asked: map[string]int{},
		moves: map[string][]move{}, lost: map[string]loss{}, lostAt: map[string]time.Time{}, twice: map[string]time.Time{},
		conflicts: map[string]bool{}, retaken: map[string][]time.Time{}, clockSet: w.clockStep != 0,
	}
	w.process = p
	w.setClock()
	w.losesOthers(w.disturbed(p))
	// It sweeps by the records below its own root_dir, once, unless the files have errors.
	sweeps := !w.disturbed(p) && !w.admin.broken && w.files.latency <= slowDisk
	for _, d := range w.drivers {
		rec := w.files.nodes[recordOf(d.name)].recorded()
		n := w.files.nodes[w.socketOf(d.name)]
		swept := sweeps && n != nil && n.sock != nil && rec.Path == w.socketOf(d.name) && rec.of(n)
		if len(w.pid1.held[storeName(d.name)]) > 0 || swept {
			continue
		}
		w.lost[recordOf(d.name)] = true
		for _, root := range rootDirs {
			w.lost[socketIn(root, d.name)] = true
		}
	}
	for _, d := range w.drivers {
		p.adoptable[d.name] = w.adoptable(d)
		if p.first[d.name] = !p.adoptable[d.name]; p.first[d.name] {
			p.lose(d.name, withdrawn)
		}
		if n := w.files.nodes[w.socketOf(d.name)]; n != nil && n.maker != "daemon" || w.files.nodes[w.besides(d)] != nil {
			p.lose(d.name, taken)
		}
	}
	log := slog.New(&logHandler{p: p})
	p.options = regsocket.Options{
		Log: log, RunDir: runDir, Store: &store{p}, KeepSockets: true, Pool: p.pool, Host: p.host(),
		Watch: func(paths ...string) rate.Hinter { return w.files.watch(p, paths...) },
	}
	for name, socks := range w.pid1.held {
		for _, s := range socks {
			f := &os.File{}
			w.passed[f] = s
			driver := strings.TrimPrefix(name, regsocket.StorePrefix)
			p.stored[driver] = append(p.stored[driver], f)
			p.handed[driver] = true
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
	p.work.Go(func() { p.removeLeftovers(ctx) })
	p.follow(ctx)
	p.work.Wait()
	agentDone.Wait()
	p.registry.Close(context.WithoutCancel(ctx))
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

// losesOthers marks sockets below another root_dir as lost: they could not be removed, and have no
// record. See README.md, "Open".
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
			if rec.Cookie == s.cookie && rec.GetInfoAt.Before(s.askedAt) {
				s.askedAt = rec.GetInfoAt
			}
			for _, root := range rootDirs { // it was killed while it published
				if name := socketIn(root, d.name); (rec.Cookie != s.cookie || rec.Ino == 0) && p.w.files.nodes[name] != nil {
					p.w.lost[name] = true
				}
			}
			if s.told != nil && (p.w.files.mounts["r"].err != 0 || rec.Cookie != s.cookie || rec.Ino == 0 || rec.Notification.Registered != s.told.Registered || rec.Notification.At.Before(s.toldAt)) {
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
	return driver.Observe(p.w.driverAt(d.Socket).client(p, d.Timeout))
}

// Socket implements agent.Parts.
func (p *process) Socket(ctx context.Context, name string) (agent.Socket, error) {
	p.w.mu.Lock()
	// It is for a new registrar, which has counted nothing.
	delete(p.moves, name)
	delete(p.conflicts, name)
	delete(p.retaken, name)
	none := p.w.noSockets
	if none {
		p.tried("opens the socket of " + name)
	}
	p.w.mu.Unlock()
	if none {
		return nil, errors.New("too many open files")
	}
	s, err := p.registry.Socket(name)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	files := p.stored[name]
	delete(p.stored, name)
	p.mu.Unlock()
	if err := s.Adopt(ctx, files); err != nil && ctx.Err() != nil {
		return nil, errors.Join(err, s.Close(context.WithoutCancel(ctx), false))
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
	if good != nil && len(res.Errors) == 0 {
		served := *good.Config
		p.mu.Lock()
		served.Drivers = slices.DeleteFunc(slices.Clone(served.Drivers), func(d config.Driver) bool { return p.stored[d.Name] == nil })
		p.mu.Unlock()
		c = p.grace.Keep(&config.InForce{Config: &served, Files: good.Files}, res, time.Now(), false, w.mustStay).InForce
		p.checkRootDir(res, c, good)
	}
	if good != nil && len(res.Errors) > 0 {
		c = good
	}
	p.registry, _ = regsocket.Open(c.Kubelet.RootDir, p.options)
	p.apply(ctx, c, len(res.Errors) == 0)
}

// checkRootDir is configReloader.checkRootDir; access(2) fails where the disk is read-only or
// hangs.
func (p *process) checkRootDir(res *config.Result, c, inForce *config.InForce) {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	m := p.w.files.mounts["k"]
	refused := m.err == syscall.EROFS || m.hang != nil
	for _, d := range inForce.Drivers {
		refused = refused || d.Enabled && p.w.inUse(d.Name)
	}
	if c.Kubelet != inForce.Kubelet && refused {
		res.RejectRootDir(inForce, "cannot be used yet", "")
	}
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
	select {
	case p.leftovers <- c.Config:
	case <-p.leftovers:
		p.leftovers <- c.Config
	}
	return err
}

// removeLeftovers is configReloader.removeLeftovers.
func (p *process) removeLeftovers(ctx context.Context) {
	var c *config.Config
	var names []string
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case c = <-p.leftovers:
		case <-again:
		}
		var enabled []string
		for _, d := range c.Drivers {
			if d.Enabled {
				enabled = append(enabled, d.Name)
			}
		}
		p.mu.Lock()
		for _, name := range sortedKeys(p.stored) {
			if !slices.Contains(enabled, name) {
				names = append(names, name)
				delete(p.stored, name)
			}
		}
		p.mu.Unlock()
		again = nil
		if err := p.registry.RemoveLeftovers(ctx, enabled, names); err != nil {
			again = time.After(10 * time.Second)
		} else {
			names = nil
		}
	}
}

// leaveRootDir does the work of configReloader.leaveRootDir, and of PID 1 after it.
func (p *process) leaveRootDir(ctx context.Context, c *config.InForce) {
	p.w.mu.Lock()
	p.moving = true
	p.w.mu.Unlock()
	_ = p.agent.Leave(ctx, &config.Config{Kubelet: p.inForce.Kubelet, Drivers: c.Drivers}, errors.New("root_dir was changed"))
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	if p.w.process == p {
		p.w.admin.lastGood = c
		p.w.restart(false)
	}
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
		kept := p.grace.Keep(p.inForce, res, time.Now(), !grace, p.w.mustStay)
		by(kept.Next)
		if p.checkRootDir(res, kept.InForce, p.inForce); len(res.Errors) > 0 {
			by(time.Now().Add(config.GracePeriod))
			return res.Errors
		}
		if kept.Kubelet != p.inForce.Kubelet {
			p.leaveRootDir(ctx, kept.InForce)
			return nil
		}
		if grace && p.complete && p.inForce.Equal(kept.InForce) {
			return nil
		}
		return p.apply(ctx, kept.InForce, true)
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
// internal/sys/systemd: a descriptor is taken at once, but while PID 1 is busy nobody gets an
// answer.
type pid1 struct {
	held map[string][]*sock
	busy bool
	full bool // it takes no more
}

type store struct{ p *process }

// keepsAdoptable: a process forgets a listener that it found as it should be only after it removed
// the socket.
func (w *world) keepsAdoptable(p *process, d *csiDriver) {
	n := w.files.nodes[w.socketOf(d.name)]
	there := n != nil && n.sock != nil && n.sock.by == p && n.sock.madeAt.Before(p.started)
	if p.adoptable[d.name] && there && w.wanted(d) && time.Since(w.admin.editedAt) > 20*time.Second && !w.disturbed(p) && !p.troubled {
		w.violated("a registration that can be adopted is not lost", "%s is forgotten", d.name)
	}
}

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
		driver := strings.TrimPrefix(name, regsocket.StorePrefix)
		w.keepsAdoptable(s.p, w.driver(driver))
		s.p.first[driver] = true          // it was withdrawn
		if len(s.p.causes[driver]) == 0 { // else a publication has failed, and is tried again
			s.p.lose(driver, withdrawn)
		}
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
	with := c.(*handle).sock
	s.p.w.mu.Unlock()
	return s.change(name, with)
}

func (s *store) Forget(_ context.Context, name string) error { return s.change(name, nil) }
