package chaos

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
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
// pkg/volume/csi), but for two: NodeGetInfo may take 2 min there, and the backoff grows to
// 122 s. Nothing would settle in a minute with those.
const (
	kubeletLoop     = time.Second
	getInfoTimeout  = time.Second
	notifyTimeout   = 5 * time.Second
	nodeInfoTimeout = 10 * time.Second
	firstBackoff    = 500 * time.Millisecond
	longestBackoff  = 4 * time.Second
)

// Cluster is what the API server holds of the node; it outlives the kubelet.
type Cluster struct {
	mu      sync.Mutex
	labels  map[string]string // of the Node: topology, never removed
	entries map[string]string // of the CSINode: driver to node id
}

// put is UpdateNode: what the API server, or the kubelet for it, refuses.
func (c *Cluster) put(driver string, l Learned) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if old, there := c.entries[driver]; there && old != l.NodeID {
		delete(c.entries, driver) // the next try passes
		return fmt.Errorf("the node id is immutable: it was %q, is %q", old, l.NodeID)
	}
	for k, v := range l.Topology {
		if old, there := c.labels[k]; there && old != v {
			return fmt.Errorf("detected topology value collision: driver reported %q:%q but existing label is %q:%q", k, v, k, old)
		}
	}
	maps.Copy(c.labels, l.Topology)
	c.entries[driver] = l.NodeID
	return nil
}

// align gives a topology the values that the Node's labels have, for those stay.
func (c *Cluster) align(topology map[string]string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := range topology {
		if v, there := c.labels[k]; there {
			topology[k] = v
		}
	}
}

func (c *Cluster) drop(driver string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.entries, driver)
}

// Learned is what the kubelet knows of a driver because it was registered.
type Learned struct {
	Driver   string
	Endpoint string
	NodeID   string
	Limit    int64
	Topology map[string]string
}

// Event is something that the kubelet did.
type Event struct {
	At      time.Time
	What    string // registered, refused, deregistered, unanswered
	Socket  string
	Since   time.Time // when the kubelet noticed the socket that it is about
	Learned Learned
	Why     string
}

// What an Event can be.
const (
	registered   = "registered"
	refused      = "refused"
	deregistered = "deregistered"
	unanswered   = "unanswered" // GetInfo failed
)

// Kubelet is a strict model of the kubelet's plugin manager: it sees what is created in
// and removed from plugins_registry and nothing else, reconciles once a second, and serialises by path.
type Kubelet struct {
	dir     string
	cluster *Cluster
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

type identity struct {
	n  int
	at time.Time
}

type plugin struct {
	identity
	learned Learned
}

type backoff struct {
	until time.Time
	by    time.Duration
}

// StartKubelet starts one: everything in dir, which is made, is new to it.
func StartKubelet(dir string, c *Cluster, report func(Event)) (*Kubelet, error) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	k := &Kubelet{
		dir: dir, cluster: c, report: report, watcher: watcher, cancel: cancel,
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

// Kill ends it in the middle of whatever it does.
func (k *Kubelet) Kill() error {
	k.cancel()
	k.running.Wait()
	return k.watcher.Close()
}

// Registered tells what is registered now, by driver, and by which socket.
func (k *Kubelet) Registered() (map[string]Learned, map[string]string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	learned, paths := map[string]Learned{}, map[string]string{}
	for path, p := range k.actual {
		if k.desired[path].n == p.n { // else it is about to go
			learned[p.learned.Driver], paths[p.learned.Driver] = p.learned, path
		}
	}
	return learned, paths
}

func (k *Kubelet) run(ctx context.Context) {
	tick := time.NewTicker(kubeletLoop)
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

// reconcile makes what is registered what is wanted: first away, then new, and never both
// for one path in one round.
func (k *Kubelet) reconcile(ctx context.Context) {
	k.mu.Lock()
	defer k.mu.Unlock()
	gone := map[string]bool{}
	for path, p := range k.actual {
		want, there := k.desired[path]
		if k.busy[path] || (there && want.n == p.n) {
			continue
		}
		why := "its socket was removed"
		if there {
			why = "its socket was made anew"
		}
		k.deregister(path, p, why)
		gone[path] = true
	}
	for path, want := range k.desired {
		if gone[path] || k.busy[path] || k.actual[path].n == want.n || time.Now().Before(k.backoff[path].until) {
			continue
		}
		k.busy[path] = true
		k.running.Go(func() { k.attempt(ctx, path, want) })
	}
}

// deregister is called with mu held.
func (k *Kubelet) deregister(path string, p plugin, why string) {
	delete(k.actual, path)
	delete(k.paths, p.learned.Driver)
	k.cluster.drop(p.learned.Driver)
	k.report(Event{At: time.Now(), What: deregistered, Socket: path, Since: p.at, Learned: p.learned, Why: why})
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
	tell := func(what string, l Learned, err error) {
		if ctx.Err() == nil {
			e := Event{At: time.Now(), What: what, Socket: path, Since: want.at, Learned: l}
			if err != nil {
				e.Why = err.Error()
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
		tell(unanswered, Learned{}, err)
		return err
	}
	l := Learned{Driver: info.GetName(), Endpoint: info.GetEndpoint()}
	p := plugin{want, l}
	refusal := k.accept(ctx, path, info, &p)
	status := &registration.RegistrationStatus{PluginRegistered: refusal == nil}
	if refusal != nil {
		status.Error = refusal.Error()
		tell(refused, p.learned, refusal)
	} else {
		tell(registered, p.learned, nil)
	}
	limited, cancel = context.WithTimeout(ctx, notifyTimeout)
	defer cancel()
	_, err = client.NotifyRegistrationStatus(limited, status)
	if err != nil && refusal == nil && ctx.Err() == nil {
		k.mu.Lock()
		if now, there := k.actual[path]; there && now.n == want.n {
			k.deregister(path, now, "Notify failed: "+err.Error())
		}
		k.mu.Unlock()
	}
	return errors.Join(refusal, err)
}

// accept validates, asks the driver, and takes the plugin in.
func (k *Kubelet) accept(ctx context.Context, path string, info *registration.PluginInfo, p *plugin) error {
	name := info.GetName()
	k.mu.Lock()
	holder, taken := k.paths[name]
	if !taken && info.GetType() == registration.CSIPlugin {
		k.paths[name] = path
	}
	k.mu.Unlock()
	switch {
	case info.GetType() != registration.CSIPlugin:
		return fmt.Errorf("%q is no CSI plugin", info.GetType())
	case taken:
		return fmt.Errorf("%s is already registered from %s with the same version", name, holder)
	}
	err := k.ask(ctx, info, p)
	k.mu.Lock()
	defer k.mu.Unlock()
	if err == nil {
		err = k.cluster.put(name, p.learned)
	}
	if err != nil || ctx.Err() != nil {
		delete(k.paths, name)
		return errors.Join(err, ctx.Err())
	}
	k.actual[path] = *p
	return nil
}

func (k *Kubelet) ask(ctx context.Context, info *registration.PluginInfo, p *plugin) error {
	if _, err := os.Stat(info.GetEndpoint()); err != nil {
		return fmt.Errorf("cannot see the endpoint: %w", err)
	}
	if len(info.GetSupportedVersions()) == 0 || !strings.HasPrefix(info.GetSupportedVersions()[0], "1.") {
		return fmt.Errorf("no supported version among %q", info.GetSupportedVersions())
	}
	conn, err := dial(info.GetEndpoint())
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
	if node.GetNodeId() == "" {
		return errors.New("the node id is empty")
	}
	p.learned.NodeID, p.learned.Limit = node.GetNodeId(), node.GetMaxVolumesPerNode()
	p.learned.Topology = node.GetAccessibleTopology().GetSegments()
	return nil
}

func dial(path string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
}
