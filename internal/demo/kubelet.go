package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// The kubelet's own times (k8s.io/kubernetes v1.36, pkg/kubelet/pluginmanager and
// pkg/volume/csi).
const (
	reconcileEvery   = time.Second
	getInfoTimeout   = time.Second
	nodeInfoTimeout  = 2 * time.Minute
	notifyTimeout    = 5 * time.Second
	firstBackoff     = 500 * time.Millisecond
	longestBackoff   = 122 * time.Second
	mostNodeIDLength = 256
)

// Happening is a thing that the stand-in kubelet did.
type Happening string

// What can happen.
const (
	Registered   Happening = "registered"   // and told the plugin so
	Refused      Happening = "refused"      // could not register; tried again later
	Deregistered Happening = "deregistered" // the socket is gone, or another one is there
	Reconciled   Happening = "reconciled"   // looked at everything once; each second
)

// Event tells what happened.
type Event struct {
	At     time.Time
	What   Happening
	Socket string // path of the registration socket
	Driver string
	NodeID string // with Registered
	Err    error  // with Refused
}

// Kubelet stands in for the part of the kubelet that registers CSI drivers: it watches
// plugins_registry as the kubelet does (Create and Remove, nothing else), reconciles once
// a second, calls GetInfo, asks the driver for NodeGetInfo and notifies the plugin.
//
// It is as true as the demo needs, and leaves out: subfolders, plugins that are no CSI
// drivers, CSINode and Node objects with the refusals that come from the API server, and
// doing several registrations at once. What is proved with it is proved again with the
// kubelet's own code in internal/e2e.
type Kubelet struct {
	dir     string
	watcher *fsnotify.Watcher
	report  func(Event)

	plugins map[string]*plugin // by path
}

// plugin is a registration socket.
type plugin struct {
	wanted     int    // which appearance of the path should be registered; 0: none
	registered int    // which one is; 0: none
	driver     string // its name, while registered
	seen       int    // how often the path appeared
	backoff    time.Duration
	notBefore  time.Time
}

// NewKubelet begins to watch dir, which must exist; sockets that are in it already count
// as new. report is called from Run, for each event in order.
func NewKubelet(dir string, report func(Event)) (*Kubelet, error) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("cannot watch %s: %w", dir, err)
	}
	k := &Kubelet{dir: dir, watcher: watcher, report: report, plugins: map[string]*plugin{}}
	if err := k.begin(); err != nil {
		return nil, errors.Join(fmt.Errorf("cannot watch %s: %w", dir, err), watcher.Close())
	}
	return k, nil
}

func (k *Kubelet) begin() error {
	if err := k.watcher.Add(k.dir); err != nil {
		return err
	}
	entries, err := os.ReadDir(k.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		k.appeared(filepath.Join(k.dir, e.Name()))
	}
	return nil
}

// Run works until ctx is done. It is called once, and gives the watch back at its end.
func (k *Kubelet) Run(ctx context.Context) error {
	tick := time.NewTicker(reconcileEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return k.watcher.Close()
		case err := <-k.watcher.Errors:
			return errors.Join(fmt.Errorf("cannot watch %s: %w", k.dir, err), k.watcher.Close())
		case e := <-k.watcher.Events:
			switch {
			case e.Has(fsnotify.Create):
				k.appeared(e.Name)
			case e.Has(fsnotify.Remove):
				k.vanished(e.Name)
			}
		case <-tick.C:
			k.reconcile(ctx)
		}
	}
}

func (k *Kubelet) appeared(path string) {
	info, err := os.Stat(path)
	if err != nil || info.Mode().Type() != os.ModeSocket || strings.HasPrefix(filepath.Base(path), ".") {
		return
	}
	p := k.plugins[path]
	if p == nil {
		p = &plugin{}
		k.plugins[path] = p
	}
	// Each appearance is a new identity, even if the old one was never seen to go.
	p.seen++
	p.wanted = p.seen
}

func (k *Kubelet) vanished(path string) {
	if p := k.plugins[path]; p != nil {
		p.wanted = 0
	}
}

// reconcile makes what is registered what is wanted: first away, then new.
func (k *Kubelet) reconcile(ctx context.Context) {
	for path, p := range k.plugins {
		if p.registered != 0 && p.registered != p.wanted {
			k.tell(Event{What: Deregistered, Socket: path, Driver: p.driver})
			p.registered = 0
		}
	}
	for path, p := range k.plugins {
		if p.wanted == 0 || p.registered == p.wanted || time.Now().Before(p.notBefore) {
			continue
		}
		name, nodeID, err := register(ctx, path)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			// The backoff is the path's: it stays when the socket is made anew.
			p.backoff = min(max(2*p.backoff, firstBackoff), longestBackoff)
			p.notBefore = time.Now().Add(p.backoff)
			k.tell(Event{What: Refused, Socket: path, Driver: name, Err: err})
			continue
		}
		p.registered, p.driver, p.backoff = p.wanted, name, 0
		k.tell(Event{What: Registered, Socket: path, Driver: name, NodeID: nodeID})
	}
	k.tell(Event{What: Reconciled})
}

func (k *Kubelet) tell(e Event) {
	e.At = time.Now()
	k.report(e)
}

// register does for one socket what the kubelet does.
func register(ctx context.Context, socket string) (name, nodeID string, err error) {
	conn, err := dial(socket)
	if err != nil {
		return "", "", err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	client := registration.NewRegistrationClient(conn)
	info, err := getInfo(ctx, client)
	if err != nil {
		return "", "", err // the kubelet does not notify either
	}
	nodeID, refusal := accept(ctx, info)
	status := &registration.RegistrationStatus{PluginRegistered: refusal == nil}
	if refusal != nil {
		status.Error = refusal.Error()
	}
	notify, cancel := context.WithTimeout(ctx, notifyTimeout)
	defer cancel()
	if _, err := client.NotifyRegistrationStatus(notify, status); err != nil {
		return info.GetName(), "", errors.Join(refusal, fmt.Errorf("cannot notify the plugin: %w", err))
	}
	return info.GetName(), nodeID, refusal
}

// getInfo waits for a socket that exists but does not accept yet, as the kubelet does.
func getInfo(ctx context.Context, client registration.RegistrationClient) (*registration.PluginInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, getInfoTimeout)
	defer cancel()
	info, err := client.GetInfo(ctx, &registration.InfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return nil, fmt.Errorf("cannot get the plugin's info: %w", err)
	}
	return info, nil
}

// accept decides on what the plugin said, and asks the driver itself.
func accept(ctx context.Context, info *registration.PluginInfo) (nodeID string, err error) {
	if info.GetType() != registration.CSIPlugin {
		return "", fmt.Errorf("%q is not a CSI plugin", info.GetType())
	}
	if !supported(info.GetSupportedVersions()) {
		return "", fmt.Errorf("no version of CSI 1.x among %q", info.GetSupportedVersions())
	}
	if _, err := os.Stat(info.GetEndpoint()); err != nil {
		return "", fmt.Errorf("cannot see the driver's endpoint: %w", err)
	}
	conn, err := dial(info.GetEndpoint())
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	ctx, cancel := context.WithTimeout(ctx, nodeInfoTimeout)
	defer cancel()
	node, err := csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return "", fmt.Errorf("cannot ask the driver for NodeGetInfo: %w", err)
	}
	if n := len(node.GetNodeId()); n == 0 || n > mostNodeIDLength {
		return "", fmt.Errorf("the node id has %d characters, 1 to %d are allowed", n, mostNodeIDLength)
	}
	return node.GetNodeId(), nil
}

func supported(versions []string) bool {
	for _, v := range versions {
		if strings.HasPrefix(strings.TrimPrefix(v, "v"), "1.") {
			return true
		}
	}
	return false
}

func dial(socket string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("cannot connect to %s: %w", socket, err)
	}
	return conn, nil
}
