package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/fswatch"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

// ErrSandbox ends the process so that the service manager starts another one in a new sandbox: the
// process cannot change its own view of the file system. Registrations stay in the descriptor
// store.
var ErrSandbox = errors.New("the sandbox of this process no longer shows the kubelet's directories as they are; " +
	"the service manager starts another one, and what is registered stays")

const (
	// sandboxPause is the least time between two ends for a new sandbox.
	sandboxPause = time.Minute
	// linksPause is how long the directory of the endpoint links must be gone: the next process
	// makes it again, which must not interfere with a recursive delete of root_dir (kubeadm reset).
	linksPause = 5 * time.Second
	// mountPause is the least time between two looks because of the host's mounts.
	mountPause = 500 * time.Millisecond
	maxEnded   = 4 << 10 // bytes of the file
)

// view is what the process sees of the kubelet's directories.
type view struct {
	Root, Registry, Links unixsock.FileID // zero: it is missing

	registryReadOnly, rootReadOnly bool
	hidden                         bool // the host has another directory at the place of Registry
}

// lookAround looks at the directories. It blocks for as long as the file system does not answer.
func lookAround(registry string) (v view, err error) {
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
	var linksReadOnly bool // ignored: the identity is enough
	err = errors.Join(look(root, &v.Root, &v.rootReadOnly), look(registry, &v.Registry, &v.registryReadOnly),
		look(rootdir.EndpointLinks(root), &v.Links, &linksReadOnly))
	if v.Registry != (unixsock.FileID{}) {
		v.hidden, _ = hiddenFromHost(registry) // without an answer it counts as visible
	}
	return v, err
}

// linksLost is the one reason that has to hold for linksPause.
const linksLost = "plugins/csi-registrar is missing or new, and cannot be written in this sandbox"

// stale returns why the process, which saw first at its start, needs a new sandbox; empty: it does
// not. Confined by Landlock, it can change only directories that existed when it started.
func (v view) stale(first view, confined bool) string {
	none := unixsock.FileID{}
	switch {
	case v.Registry != none && v.Registry != first.Registry && (v.registryReadOnly || confined):
		// One that was read-only from the start, or became so, would be the same in another
		// process.
		return "plugins_registry was created, and cannot be written in this sandbox"
	case first.Root != none && first.rootReadOnly && v.Root != none && !v.rootReadOnly:
		return "something was mounted over root_dir, and is writable in this sandbox"
	case v.hidden && !first.hidden:
		return "something was mounted over plugins_registry or unmounted, which this sandbox does not show"
	case (v.Links == none || v.Links != first.Links) && v.Registry != none && (first.rootReadOnly || confined) && v.Root == first.Root && v.Registry == first.Registry:
		return linksLost
	}
	return ""
}

// ended are the last ends of processes for a new sandbox, by reason.
type ended map[string]end

type end struct {
	view
	At time.Time
}

// in returns whether a process may end for the reason at all, and how long that has to wait. It may
// not if one ended for the same directories already: another would see the same.
func (e ended) in(reason string, v view, now time.Time) (wait time.Duration, may bool) {
	last, ok := e[reason]
	if !ok || last.At.After(now) { // the clock was set
		return 0, true
	}
	return max(0, sandboxPause-now.Sub(last.At)), last.Root != v.Root || last.Registry != v.Registry || last.Links != v.Links
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

// guardSandbox ends the process when its sandbox no longer shows the kubelet's directories as they
// are: once for the same directories, and once a minute, for each reason. It calls looked after its
// first look.
func (d *daemon) guardSandbox(ctx context.Context, looked func()) {
	defer looked()
	registry := d.agent.Status().PluginsRegistry // the one at the start: of the unit's sandbox
	if d.notifier == nil || !d.options.KeepSockets || registry == "" {
		return // nobody would start another process, or a flag named the directory
	}
	file := filepath.Join(stateDir(d.options.runDir()), "sandbox.json")
	before, err := readEnded(file)
	d.note("reading when a process ended for a new sandbox", err)
	hints := d.watcher.Subscribe(registry, filepath.Dir(registry), rootdir.EndpointLinks(filepath.Dir(registry)))
	defer hints.Close()
	mounts := make(chan struct{}, 1)
	d.work.Go(func() { d.note("watching the host's mounts", fswatch.WatchMounts(ctx, hostMounts, mounts)) })
	slot := d.pool.Slot(registry, hints.Hint)
	var first view
	var lost time.Time // since when the links are
	for seen := false; ; {
		type result struct {
			view
			err error
		}
		r, err := worker.Do(ctx, slot, time.Second, func() result { v, err := lookAround(registry); return result{v, err} }, nil)
		var again <-chan time.Time
		switch err := errors.Join(err, r.err); {
		case err != nil:
			d.log.Debug("looking at the kubelet's directories", "error", err)
		case !seen:
			first, seen = r.view, true
		default:
			now, reason := time.Now(), r.stale(first, d.landlock > 0)
			r.Links = unixsock.FileID{}
			if reason != linksLost {
				lost = time.Time{}
			} else {
				if lost.IsZero() {
					lost = now
				}
				r.Links = first.Links // once for each that was lost
			}
			wait, may := before.in(reason, r.view, now)
			if reason == linksLost {
				wait = max(wait, linksPause-now.Sub(lost))
			}
			switch {
			case reason == "" || !may:
			case wait > 0:
				again = time.After(wait)
			default:
				before[reason] = end{r.view, time.Now()}
				d.note("noting the end for a new sandbox", writeEnded(file, before))
				d.fail(fmt.Errorf("%s: %w", reason, ErrSandbox))
				return
			}
		}
		looked()
		select {
		case <-ctx.Done():
			return
		case <-hints.Hints():
		case <-again:
		case <-mounts:
			pause(ctx, mountPause) // starting pods makes dozens at once
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
