package daemon

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"csi-registrar/internal/agent"
	"csi-registrar/internal/config"
	"csi-registrar/internal/control"
	"csi-registrar/internal/doctor"
)

// quiet is how long the folders of the configuration must have been quiet before a change
// is applied (spec §3): an editor or a package manager writes more than once.
const quiet = time.Second

// Run is the daemon with configuration files, until ctx is done.
func Run(ctx context.Context, o Options) error {
	res := config.Load(o.Source)
	log, level := newLogger(o.Stderr, res.Config.Log)
	d := newDaemon(o, log, "")
	k := &keeper{daemon: d, level: level}
	return d.run(ctx, backend{d.agent, k.reload}, func(ctx context.Context) error {
		if err := k.begin(ctx, res); err != nil {
			return err
		}
		d.work.Go(func() { k.follow(ctx) })
		d.onHangup(ctx, func() { d.note("reloading", k.reload(ctx)) })
		return nil
	})
}

// backend is the daemon as the control socket sees it.
type backend struct {
	*agent.Agent
	reload func(context.Context) error
}

// Reload implements control.Backend.
func (b backend) Reload(ctx context.Context) error { return b.reload(ctx) }

// Alive implements control.Backend.
func (b backend) Alive(ctx context.Context) error { return b.Agent.Alive(ctx) }

var _ control.Backend = backend{}

// keeper keeps the configuration in force: the files' if they are right, else the last
// good one.
type keeper struct {
	*daemon
	level *slog.LevelVar

	mu         sync.Mutex // one load at a time
	inForce    *config.Config
	files      []string // of inForce
	patience   config.Patience
	next       time.Time // when to load again without a hint; zero: not by time
	told       string    // mistakes and warnings that the log has already
	unfinished bool      // what is in force is not all that the files say
	lastGood   string
}

// begin brings the first configuration into force. With mistakes in the files that is
// the last good one, or if there is none every table that is right.
func (k *keeper) begin(ctx context.Context, res *config.Result) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := os.MkdirAll(k.options.runDir(), 0o755); err != nil {
		k.log.Warn("nothing is remembered over a restart", "error", err)
	}
	k.lastGood = filepath.Join(k.options.runDir(), lastGoodName(k.options.Source))
	c := res.Config
	k.tell(res)
	if len(res.Mistakes) == 0 {
		c = k.keep(res, k.before(c))
	} else if good, err := config.LoadLastGood(k.lastGood); err == nil {
		c = good
		k.log.Warn("starting with the last good configuration", "drivers", len(c.Drivers))
	} else if errors.Is(err, fs.ErrNotExist) {
		k.log.Warn("starting with the tables that are right", "drivers", len(c.Drivers), "left_out", res.Faulty)
	} else {
		k.log.Warn("starting with the tables that are right", "drivers", len(c.Drivers), "left_out", res.Faulty, "error", err)
	}
	if lines := doctor.UnitDropIn(c.Kubelet.RootDir); lines != "" && k.notifier != nil {
		k.log.Info("this root_dir needs a drop-in of the unit, unless it is there already", "root_dir", c.Kubelet.RootDir, "drop_in", lines)
	}
	k.note("sweeping dead sockets", k.parts.sweep(ctx, c))
	return k.apply(ctx, c, res)
}

// before returns c and, of the last good configuration, the drivers whose listeners are in
// the store: what the process before this one served may vanish from the files for a while,
// as ever.
func (k *keeper) before(c *config.Config) *config.Config {
	kept := k.parts.unclaimed(c)
	if len(kept) == 0 {
		return c
	}
	good, err := config.LoadLastGood(k.lastGood)
	if err != nil || good.Kubelet != c.Kubelet {
		return c // nobody knows them: they are withdrawn
	}
	all := *c
	all.Drivers = slices.Clone(c.Drivers)
	for _, name := range kept {
		if d, known := good.Driver(name); known {
			all.Drivers = append(all.Drivers, d)
		}
	}
	return &all
}

// keep returns what the files say together with what vanished from them just now.
func (k *keeper) keep(res *config.Result, inForce *config.Config) *config.Config {
	kept := k.patience.Keep(inForce, res, time.Now())
	for _, name := range kept.Vanished {
		k.log.Warn("driver vanished from the configuration; it is withdrawn when it stays away", "driver", name, "after", time.Until(kept.Next).Round(time.Second))
	}
	if kept.Kubelet {
		k.log.Warn("root_dir vanished with its file; it is changed when it stays away", "root_dir", inForce.Kubelet.RootDir, "after", time.Until(kept.Next).Round(time.Second))
	}
	k.next = kept.Next
	return kept.Config
}

// apply brings c into force.
func (k *keeper) apply(ctx context.Context, c *config.Config, res *config.Result) error {
	k.setLevel(c.Log)
	err := k.agent.Apply(ctx, c, res.Files)
	k.inForce, k.files = c, res.Files
	k.unfinished = err != nil || len(res.Mistakes) > 0
	if k.unfinished {
		return err
	}
	k.note("keeping the configuration", config.SaveLastGood(k.lastGood, c, res.Files))
	k.note("withdrawing", k.agent.WithdrawKept(ctx, k.parts.unclaimed(c)))
	return nil
}

func (k *keeper) setLevel(l config.Log) {
	k.level.Set(logLevel(l.Level))
	if k.inForce != nil && k.inForce.Log.Format != l.Format {
		k.log.Warn("log.format takes effect at the next start", "format", l.Format)
	}
}

// reload is the command: what vanished from the files is withdrawn at once.
func (k *keeper) reload(ctx context.Context) error { return k.load(ctx, false) }

// load reads the files; with a mistake in them nothing changes.
func (k *keeper) load(ctx context.Context, patience bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	res := config.Load(k.options.Source)
	k.tell(res)
	k.next = time.Time{}
	if len(res.Mistakes) > 0 {
		return res.Mistakes
	}
	c := res.Config
	if patience {
		c = k.keep(res, k.inForce)
		if !k.unfinished && k.inForce.Equal(c) && slices.Equal(k.files, res.Files) {
			return nil
		}
	} else {
		k.patience.Begin(res)
	}
	if err := k.apply(ctx, c, res); err != nil {
		return err
	}
	k.log.Info("configuration applied", "MESSAGE_ID", messageApplied, "drivers", len(c.Drivers), "files", len(res.Files))
	return nil
}

// mostTold is how many mistakes of one load go to the log: a file that is no
// configuration at all has one in each line.
const mostTold = 20

// tell makes mistakes and warnings known, each set of them once.
func (k *keeper) tell(res *config.Result) {
	text := ""
	if len(res.Mistakes) > 0 {
		text = res.Mistakes.Error()
	}
	k.agent.ConfigError(text)
	said := text + fmt.Sprint(res.Warnings)
	if said == k.told {
		return
	}
	k.told = said
	for _, m := range res.Mistakes[:min(len(res.Mistakes), mostTold)] {
		k.log.Error("mistake in the configuration", "MESSAGE_ID", messageMistake, "mistake", m.String())
	}
	if more := len(res.Mistakes) - mostTold; more > 0 {
		k.log.Error("more mistakes in the configuration; `csi-registrar config check` names all", "MESSAGE_ID", messageMistake, "more", more)
	}
	for _, m := range res.Warnings[:min(len(res.Warnings), mostTold)] {
		k.log.Warn("the configuration is odd", "warning", m.String())
	}
}

// follow applies changes of the files when their folders are quiet.
func (k *keeper) follow(ctx context.Context) {
	paths := k.options.Source.Watch()
	hints := k.watcher.SubscribeDir(paths...)
	defer func() { hints.Close() }()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-hints.Hints():
			timer.Reset(quiet)
			continue
		case <-timer.C:
		}
		// Mistakes are told; everything else that can fail is noted.
		if err := k.load(ctx, true); err != nil && !errors.As(err, &config.Mistakes{}) {
			k.note("applying the configuration", err)
		}
		if next := k.when(); !next.IsZero() {
			timer.Reset(time.Until(next))
		}
		if now := k.options.Source.Watch(); !slices.Equal(paths, now) {
			paths = now
			hints.Close()
			hints = k.watcher.SubscribeDir(paths...)
			timer.Reset(quiet) // for what changed before it was watched
		}
	}
}

func (k *keeper) when() time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.next
}

// lastGoodName is the file's name: one for the folders, one for each --config FILE.
func lastGoodName(s config.Source) string {
	if s.File == "" {
		return "last-good.toml"
	}
	h := fnv.New32a()
	h.Write([]byte(s.File))
	return fmt.Sprintf("last-good-%08x.toml", h.Sum32())
}
