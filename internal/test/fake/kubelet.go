package fake

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
)

// The times of the kubelet (k8s.io/kubernetes v1.36.3, pkg/kubelet/pluginmanager and
// pkg/volume/csi), except for two that would make tests too slow: there NodeGetInfo may take 2 min,
// and the backoff grows to 122 s.
const (
	reconcileEvery  = time.Second
	getInfoTimeout  = time.Second
	notifyTimeout   = 5 * time.Second
	nodeInfoTimeout = 10 * time.Second
	firstBackoff    = 500 * time.Millisecond
	longestBackoff  = 4 * time.Second

	maxNodeIDLength = 256
)

// Action is an action of the kubelet.
type Action string

// Actions of the kubelet.
const (
	Registered   Action = "registered"
	Refused      Action = "refused"      // tried again later
	Unanswered   Action = "unanswered"   // GetInfo failed; tried again later
	Deregistered Action = "deregistered" // the socket was removed or replaced
	Reconciled   Action = "reconciled"   // one iteration of its loop, once a second
)

// Event is an action that the kubelet has taken. For Reconciled it only has the time.
type Event struct {
	At     time.Time
	What   Action
	Seen   time.Time // when the kubelet saw the socket appear
	Reason string    // except for Registered
	Registration
}

// Kubelet is a strict model of the part of the kubelet that registers CSI drivers: it only sees
// that files are created in and removed from plugins_registry, reconciles once a second, and has at
// most one pending operation per path. internal/test/e2e repeats tests with the kubelet's own code.
type Kubelet struct {
	dir     string
	api     *APIServer
	report  func(Event)
	watcher *fsnotify.Watcher
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu      sync.Mutex
	seen    int                 // identities assigned so far
	desired map[string]identity // by path
	actual  map[string]plugin   // by path
	paths   map[string]string   // driver to the path it is registered by
	busy    map[string]bool
	backoff map[string]backoff
}

// identity identifies one creation of a socket. For the kubelet each is another plugin.
type identity struct {
	n  int
	at time.Time
}

type plugin struct {
	identity
	Registration
}

type backoff struct {
	until time.Time
	by    time.Duration
}

// StartKubelet starts a kubelet. It creates dir if necessary, and registers the sockets that exist
// there. It calls report for each event, from several goroutines; report must not call the kubelet.
func StartKubelet(dir string, api *APIServer, report func(Event)) (*Kubelet, error) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	k := &Kubelet{
		dir: dir, api: api, report: report, watcher: watcher, cancel: cancel,
		desired: map[string]identity{}, actual: map[string]plugin{}, paths: map[string]string{},
		busy: map[string]bool{}, backoff: map[string]backoff{},
	}
	err = os.MkdirAll(dir, 0o755)
	if err == nil {
		err = k.traverse(dir)
	}
	if err != nil {
		cancel()
		return nil, errors.Join(err, watcher.Close())
	}
	k.running.Go(func() { k.run(ctx) })
	return k, nil
}

// Stop stops the kubelet at once, and cancels pending operations.
func (k *Kubelet) Stop() error {
	k.cancel()
	k.running.Wait()
	return k.watcher.Close()
}

// Registered returns the current registrations by driver.
func (k *Kubelet) Registered() map[string]Registration {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := map[string]Registration{}
	for path, p := range k.actual {
		if k.desired[path].n == p.n { // otherwise it is about to be deregistered
			all[p.Driver] = p.Registration
		}
	}
	return all
}

// Idle reports whether no call to a registration socket is pending.
func (k *Kubelet) Idle() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, busy := range k.busy {
		if busy {
			return false
		}
	}
	return true
}

func (k *Kubelet) run(ctx context.Context) {
	tick := time.NewTicker(reconcileEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-k.watcher.Events:
			switch {
			case e.Has(fsnotify.Create):
				k.created(e.Name)
			case e.Has(fsnotify.Remove):
				k.mu.Lock()
				delete(k.desired, e.Name)
				k.mu.Unlock()
			}
		case <-k.watcher.Errors: // an overflow, which the kubelet only logs
		case <-tick.C:
			k.reconcile(ctx)
		}
	}
}

func (k *Kubelet) traverse(dir string) error {
	return filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		switch {
		case err != nil:
			if path == dir {
				return err
			}
			return nil
		case d.IsDir():
			if strings.HasPrefix(d.Name(), ".") {
				return filepath.SkipDir
			}
			return k.watcher.Add(path)
		}
		k.created(path)
		return nil
	})
}

func (k *Kubelet) created(path string) {
	info, err := os.Stat(path)
	if err != nil || strings.HasPrefix(filepath.Base(path), ".") {
		return
	}
	if info.IsDir() {
		_ = k.traverse(path) // as in the kubelet: it may have been removed
		return
	}
	if info.Mode().Type() != os.ModeSocket {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.seen++
	k.desired[path] = identity{k.seen, time.Now()}
}

// reconcile deregisters sockets that were removed or recreated, and then registers new ones, but
// never does both for a path in one iteration.
func (k *Kubelet) reconcile(ctx context.Context) {
	k.mu.Lock()
	defer k.mu.Unlock()
	gone := map[string]bool{}
	for path, p := range k.actual {
		want, found := k.desired[path]
		if k.busy[path] || (found && want.n == p.n) {
			continue
		}
		reason := "its socket was removed"
		if found {
			reason = "its socket was recreated"
		}
		k.deregister(path, p, reason)
		gone[path] = true
	}
	for path, want := range k.desired {
		if gone[path] || k.busy[path] || k.actual[path].n == want.n || time.Now().Before(k.backoff[path].until) {
			continue
		}
		k.busy[path] = true
		k.running.Go(func() { k.attempt(ctx, path, want) })
	}
	k.report(Event{At: time.Now(), What: Reconciled})
}

// deregister is called with mu held.
func (k *Kubelet) deregister(path string, p plugin, reason string) {
	delete(k.actual, path)
	delete(k.paths, p.Driver)
	k.api.remove(p.Driver)
	k.report(Event{At: time.Now(), What: Deregistered, Seen: p.at, Reason: reason, Registration: p.Registration})
}
