package fake

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// The kubelet's own times (k8s.io/kubernetes v1.36.3, pkg/kubelet/pluginmanager and
// pkg/volume/csi), except for two: NodeGetInfo may take 2 min there, and the backoff grows to
// 122 s. No test would end in a minute with those.
const (
	reconcileEvery  = time.Second
	getInfoTimeout  = time.Second
	notifyTimeout   = 5 * time.Second
	nodeInfoTimeout = 10 * time.Second
	firstBackoff    = 500 * time.Millisecond
	longestBackoff  = 4 * time.Second

	maxNodeIDLength = 256
)

// APIServer is what the API server holds of the node; it outlives the kubelet.
type APIServer struct {
	mu      sync.Mutex
	labels  map[string]string // of the Node: topology, never removed
	entries map[string]string // of the CSINode: driver to node id
}

// NewAPIServer makes one that holds nothing.
func NewAPIServer() *APIServer {
	return &APIServer{labels: map[string]string{}, entries: map[string]string{}}
}

// update is the kubelet's UpdateNode, with what the API server, or the kubelet for it, refuses.
func (a *APIServer) update(r Registration) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if old, found := a.entries[r.Driver]; found && old != r.NodeID {
		delete(a.entries, r.Driver) // the next try passes
		return fmt.Errorf("the node id is immutable: it was %q, is %q", old, r.NodeID)
	}
	for k, v := range r.Topology {
		if old, found := a.labels[k]; found && old != v {
			return fmt.Errorf("detected topology value collision: driver reported %q:%q but existing label is %q:%q", k, v, k, old)
		}
	}
	maps.Copy(a.labels, r.Topology)
	a.entries[r.Driver] = r.NodeID
	return nil
}

// Align gives a topology the values of the Node's labels, for those stay.
func (a *APIServer) Align(topology map[string]string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for k := range topology {
		if v, found := a.labels[k]; found {
			topology[k] = v
		}
	}
}

func (a *APIServer) remove(driver string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.entries, driver)
}

// Registration is what the kubelet knows of a driver because it was registered.
type Registration struct {
	Socket   string // the registration socket
	Driver   string
	Endpoint string
	NodeID   string
	Limit    int64
	Topology map[string]string
}

// Action is something that the kubelet does.
type Action string

// Actions of the kubelet.
const (
	Registered   Action = "registered"
	Refused      Action = "refused"      // tried again later
	Unanswered   Action = "unanswered"   // GetInfo failed; tried again later
	Deregistered Action = "deregistered" // the socket was removed or replaced
	Reconciled   Action = "reconciled"   // compared everything once; each second
)

// Event is something that the kubelet did. Of Reconciled there is only the time.
type Event struct {
	At     time.Time
	What   Action
	Seen   time.Time // when the kubelet saw the socket appear
	Reason string    // except for Registered
	Registration
}

// Kubelet is a strict model of the part of the kubelet that registers CSI drivers: it only sees
// files that are created in and removed from plugins_registry, reconciles once a second, and does
// one thing at a time for a path. Tests with it are repeated with the kubelet's own code in
// internal/e2e.
type Kubelet struct {
	dir     string
	api     *APIServer
	report  func(Event)
	watcher *fsnotify.Watcher
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu      sync.Mutex
	seen    int                 // identities given away
	desired map[string]identity // by path
	actual  map[string]plugin   // by path
	paths   map[string]string   // driver to the path it is registered by
	busy    map[string]bool
	backoff map[string]backoff
}

// identity is one appearance of a socket: the kubelet takes each for another plugin.
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

// StartKubelet starts one: every socket that is in dir, which is made, is new to it. report
// is called for each event, by several goroutines; it must not call the kubelet.
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

// Stop ends it in the middle of whatever it does.
func (k *Kubelet) Stop() error {
	k.cancel()
	k.running.Wait()
	return k.watcher.Close()
}

// Registered returns what is registered now, by driver.
func (k *Kubelet) Registered() map[string]Registration {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := map[string]Registration{}
	for path, p := range k.actual {
		if k.desired[path].n == p.n { // else it is about to go
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
		_ = k.traverse(path) // as in the kubelet: it may be gone already
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

// reconcile makes what is registered what is desired: first away, then new, and never both
// for one path in one round.
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

// attempt registers one socket, and bears the consequences.
func (k *Kubelet) attempt(ctx context.Context, path string, want identity) {
	err := k.register(ctx, path, want)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.busy[path] = false
	if ctx.Err() != nil {
		return
	}
	if err == nil {
		delete(k.backoff, path)
		return
	}
	by := min(max(2*k.backoff[path].by, firstBackoff), longestBackoff)
	k.backoff[path] = backoff{time.Now().Add(by), by}
}

func (k *Kubelet) register(ctx context.Context, path string, want identity) error {
	p := plugin{want, Registration{Socket: path}}
	tell := func(what Action, reason error) {
		if ctx.Err() == nil {
			e := Event{At: time.Now(), What: what, Seen: want.at, Registration: p.Registration}
			if reason != nil {
				e.Reason = reason.Error()
			}
			k.report(e)
		}
	}
	conn, err := dial(path)
	if err != nil {
		return err
	}
	defer conn.Close()
	client := registration.NewRegistrationClient(conn)
	limited, cancel := context.WithTimeout(ctx, getInfoTimeout)
	info, err := client.GetInfo(limited, &registration.InfoRequest{}, grpc.WaitForReady(true))
	cancel()
	if err != nil {
		tell(Unanswered, err) // the kubelet does not notify the plugin either
		return err
	}
	p.Driver, p.Endpoint = info.GetName(), info.GetEndpoint()
	refusal := k.accept(ctx, info, &p)
	status := &registration.RegistrationStatus{PluginRegistered: refusal == nil}
	if refusal != nil {
		status.Error = refusal.Error()
		tell(Refused, refusal)
	} else {
		tell(Registered, nil)
	}
	limited, cancel = context.WithTimeout(ctx, notifyTimeout)
	defer cancel()
	_, err = client.NotifyRegistrationStatus(limited, status)
	if err != nil && refusal == nil && ctx.Err() == nil {
		k.mu.Lock()
		if now, found := k.actual[path]; found && now.n == want.n {
			k.deregister(path, now, "Notify failed: "+err.Error())
		}
		k.mu.Unlock()
	}
	return errors.Join(refusal, err)
}

// accept validates, asks the driver, and takes the plugin in.
func (k *Kubelet) accept(ctx context.Context, info *registration.PluginInfo, p *plugin) error {
	if info.GetType() != registration.CSIPlugin {
		return fmt.Errorf("%q is not a CSI plugin", info.GetType())
	}
	k.mu.Lock()
	holder, taken := k.paths[p.Driver]
	if !taken {
		k.paths[p.Driver] = p.Socket
	}
	k.mu.Unlock()
	if taken {
		return fmt.Errorf("%s is already registered from %s with the same version", p.Driver, holder)
	}
	err := ask(ctx, info, p)
	k.mu.Lock()
	defer k.mu.Unlock()
	if err == nil {
		err = k.api.update(p.Registration)
	}
	if err != nil || ctx.Err() != nil {
		delete(k.paths, p.Driver)
		return errors.Join(err, ctx.Err())
	}
	k.actual[p.Socket] = *p
	return nil
}

// ask asks the driver itself.
func ask(ctx context.Context, info *registration.PluginInfo, p *plugin) error {
	if !slices.ContainsFunc(info.GetSupportedVersions(), func(v string) bool { return strings.HasPrefix(strings.TrimPrefix(v, "v"), "1.") }) {
		return fmt.Errorf("no version of CSI 1.x among %q", info.GetSupportedVersions())
	}
	if _, err := os.Stat(p.Endpoint); err != nil {
		return fmt.Errorf("cannot see the driver's endpoint: %w", err)
	}
	conn, err := dial(p.Endpoint)
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, nodeInfoTimeout)
	defer cancel()
	node, err := csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err != nil {
		return fmt.Errorf("NodeGetInfo: %w", err)
	}
	if n := len(node.GetNodeId()); n == 0 || n > maxNodeIDLength {
		return fmt.Errorf("the node id has %d characters, 1 to %d are allowed", n, maxNodeIDLength)
	}
	p.NodeID, p.Limit, p.Topology = node.GetNodeId(), node.GetMaxVolumesPerNode(), node.GetAccessibleTopology().GetSegments()
	return nil
}

func dial(path string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
}
