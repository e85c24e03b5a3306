package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/fswatch"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

// ErrSandbox ends the process so that the service manager starts another one in a new sandbox: the
// process cannot change its own view of the file system. Registrations stay in the descriptor
// store.
var ErrSandbox = errors.New("the sandbox of this process no longer shows the node as it is; " +
	"the service manager starts another one, and what is registered stays")

const (
	// sandboxPause is the least time between two ends for a new sandbox.
	sandboxPause = time.Minute
	// journalPause is how long journald's socket must be gone.
	journalPause = 5 * time.Second
	// mountPause is the least time between two looks because of the host's mounts.
	mountPause = 500 * time.Millisecond
	maxEnded   = 4 << 10 // bytes of the file
)

// view is what the process sees of the kubelet's directories.
type view struct {
	Root, Registry unixsock.FileID // zero: it is missing
	// journald's socket, if it was removed on the host; zero: it was not
	Journal unixsock.FileID

	registryReadOnly, rootReadOnly bool

	onHost string // what the host has at the place of Registry (locate); empty: not known
	hidden bool   // it is another directory
}

// lookAround looks at the directories, after the last look. It blocks for as long as the file
// system does not answer.
func lookAround(registry string, last view) (v view, err error) {
	root := filepath.Dir(registry)
	look := func(path string, id *unixsock.FileID, readOnly *bool) error {
		f, err := unixsock.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		var st unix.Statfs_t
		if err == nil {
			err = unix.Statfs(path, &st)
		}
		*id, *readOnly = f.FileID, st.Flags&unix.ST_RDONLY != 0
		return err
	}
	err = errors.Join(look(root, &v.Root, &v.rootReadOnly), look(registry, &v.Registry, &v.registryReadOnly))
	if v.Registry != (unixsock.FileID{}) {
		v.onHost, v.hidden, _ = hiddenFromHost(registry, last) // on an error: visible
	}
	v.Journal = systemd.RemovedJournal()
	return v, err
}

// journalLost has to hold for journalPause: journald's next socket must exist before the next
// sandbox.
const journalLost = "systemd-journald has another socket, which this sandbox does not show"

// stale returns why the process, which saw first at its start, needs a new sandbox; none: it does
// not. Confined by Landlock, it can change only directories that existed when it started.
func (v view) stale(first view, confined bool) (reasons []string) {
	none := unixsock.FileID{}
	switch {
	case v.Registry != none && v.Registry != first.Registry && (v.registryReadOnly || confined):
		// One that became read-only would be the same in another process.
		reasons = append(reasons, "plugins_registry was created, and cannot be written in this sandbox")
	case first.Root != none && first.rootReadOnly && v.Root != none && !v.rootReadOnly:
		reasons = append(reasons, "something was mounted over root_dir, and is writable in this sandbox")
	case v.hidden && !first.hidden:
		reasons = append(reasons, "something was mounted over plugins_registry or unmounted, which this sandbox does not show")
	}
	if v.Journal != none && v.Journal != first.Journal {
		reasons = append(reasons, journalLost)
	}
	return reasons
}

// ended are the last ends of processes for a new sandbox, by reason.
type ended map[string]end

type end struct {
	view
	At time.Time
}

// mayEnd returns whether a process may end for the reason at all, and how long that has to wait. It
// may not if one ended for the same directories, or the same socket, already: another would see the
// same.
func (e ended) mayEnd(reason string, v view, now time.Time) (wait time.Duration, may bool) {
	last, ok := e[reason]
	if !ok || last.At.After(now) { // the clock was set
		return 0, true
	}
	may = last.Root != v.Root || last.Registry != v.Registry
	if reason == journalLost {
		may = last.Journal != v.Journal
	}
	return max(0, sandboxPause-now.Sub(last.At)), may
}

func readEnded(path string) (e ended, err error) {
	b, err := trust.Rule{}.ReadFile(path, maxEnded)
	if err == nil {
		err = json.Unmarshal(b, &e)
	}
	if e == nil {
		e = ended{}
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return e, err
}

// sandboxGuard knows what this process saw first, and why others ended before it.
type sandboxGuard struct {
	confined bool            // by Landlock
	writable unixsock.FileID // the plugins_registry that existed then; zero: none
	before   ended
	first    *view // nil: nothing was seen yet
	last     view
	lost     time.Time // since when journald's socket is
}

// look returns why the process has to end, and how long that has to wait; empty: it need not, or
// may not.
func (g *sandboxGuard) look(v view, now time.Time) (reason string, wait time.Duration) {
	if g.first == nil {
		first := v
		if v.registryReadOnly || g.confined && v.Registry != g.writable {
			first.Registry = unixsock.FileID{} // it can have been created since the sandbox was
		}
		g.first = &first
	}
	g.last = v
	reasons := v.stale(*g.first, g.confined)
	if !slices.Contains(reasons, journalLost) {
		g.lost = time.Time{}
	} else if g.lost.IsZero() {
		g.lost = now
	}
	for _, reason := range reasons {
		wait, may := g.before.mayEnd(reason, v, now)
		if reason == journalLost {
			wait = max(wait, journalPause-now.Sub(g.lost))
		}
		if may {
			return reason, wait
		}
	}
	return "", 0
}

// guardSandbox ends the process when its sandbox no longer shows the kubelet's directories as they
// are: once for the same directories, and once a minute, for each reason. It calls looked after its
// first look.
func (d *daemon) guardSandbox(ctx context.Context, looked func()) {
	defer looked()
	registry := string(d.agent.Status().PluginsRegistry)
	if d.notifier == nil || !d.options.KeepSockets || registry == "" {
		return // nobody would start another process, or a flag named the directory
	}
	file := filepath.Join(stateDir(d.options.runDir()), "sandbox.json")
	before, err := readEnded(file)
	d.note("read when a process ended for a new sandbox", err)
	guard := sandboxGuard{confined: d.landlock > 0, writable: d.writable, before: before}
	hints := d.watcher.Subscribe(registry, filepath.Dir(registry))
	defer hints.Close()
	mounts := make(chan struct{}, 1)
	d.work.Go(func() { d.note("watch the host's mounts", fswatch.WatchMounts(ctx, hostMounts, mounts)) })
	slot := d.pool.Slot(registry, hints.Hint)
	for {
		last := guard.last
		v, err := worker.Get(ctx, slot, time.Second, func() (view, error) { return lookAround(registry, last) }, nil)
		var again <-chan time.Time
		if err != nil {
			d.log.Debug("looking at the kubelet's directories", "error", err)
		} else if reason, wait := guard.look(v, time.Now()); reason != "" && wait > 0 {
			again = time.After(wait)
		} else if reason != "" {
			before[reason] = end{v, time.Now()}
			err := writeEnded(file, before)
			if err == nil {
				d.fail(fmt.Errorf("%s: %w", reason, ErrSandbox))
				return
			}
			// The next process would not know that this one ended, and end as well.
			d.note("note the end for a new sandbox", err)
			again = time.After(sandboxPause)
		}
		looked()
		select {
		case <-ctx.Done():
			return
		case <-hints.Hints():
		case <-d.journalRefused:
		case <-again:
		case <-mounts:
			rate.Pause(ctx, mountPause) // starting pods makes dozens at once
		}
	}
}

func writeEnded(path string, e ended) error {
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	temporary := path + ".new"
	if err := os.WriteFile(temporary, b, 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}
