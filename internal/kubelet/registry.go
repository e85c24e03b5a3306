// Package kubelet is the kubelet's side of a registration: the socket in plugins_registry
// by which the kubelet finds a driver. It publishes, guards, adopts and withdraws these
// sockets, and answers GetInfo and NotifyRegistrationStatus on them. Nothing that is not
// ours is ever removed or replaced.
package kubelet

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"syscall"

	"csi-registrar/internal/pluginreg"
	"csi-registrar/internal/status"
	"csi-registrar/internal/worker"

	"google.golang.org/grpc"
)

// Store keeps listeners beyond the end of the process (satisfied by systemd.Store).
// Names are registration-<driver>.
type Store interface {
	Keep(ctx context.Context, name string, c syscall.Conn) error
	// Forget takes everything of that name out of the store; none is no error.
	Forget(ctx context.Context, name string) error
}

type noStore struct{}

func (noStore) Keep(context.Context, string, syscall.Conn) error { return nil }
func (noStore) Forget(context.Context, string) error             { return nil }

// Options of a Registry. Log, Watch, WatchDir and Pool are needed.
type Options struct {
	Log *slog.Logger
	// RunDir is the daemon's directory under /run; records are kept in RunDir/registrations.
	// Empty: no records, and so nothing can be adopted.
	RunDir string
	// Store takes the listeners; nil: none.
	Store Store
	// KeepSockets leaves what the store took in place when a Socket is closed.
	KeepSockets bool
	// Dir is the directory that the kubelet watches, where it is not
	// <rootDir>/plugins_registry (node-driver-registrar's --plugin-registration-path).
	// It is never made, and temporary names are dot names within it.
	Dir string
	// Watch gives hints about a path, and takes ours, so that one channel serves both;
	// WatchDir about the entries of a directory.
	Watch    func(paths ...string) Watch
	WatchDir func(path string) Watch
	// Pool runs what may block for ever.
	Pool *worker.Pool
}

// Watch is a place for hints (satisfied by fswatch.Subscription).
type Watch interface {
	Hint()
	Hints() <-chan struct{} // capacity one
	Close()
}

// Registry is one plugins_registry and what this process serves in it.
type Registry struct {
	o   Options
	dir *directory

	server  *grpc.Server
	conns   connections
	others  *others
	entries Watch          // of the directory
	stop    func()         // ends the search for others, …
	running sync.WaitGroup // … which runs here

	mu      sync.Mutex
	sockets map[string]*Socket // by path
}

// Open prepares to serve in the plugins_registry of rootDir, the kubelet's --root-dir.
// Neither needs to exist yet.
func Open(rootDir string, o Options) (*Registry, error) {
	dir := pluginreg.Dir(rootDir)
	if o.Dir != "" {
		rootDir, dir = "", filepath.Clean(o.Dir)
	}
	if !filepath.IsAbs(dir) {
		return nil, fmt.Errorf("cannot use %s as the plugins_registry: give an absolute path", dir)
	}
	if o.Store == nil {
		o.Store, o.KeepSockets = noStore{}, false
	}
	ctx, stop := context.WithCancel(context.Background()) // until Close
	r := &Registry{
		o: o, dir: &directory{root: rootDir, path: dir}, entries: o.WatchDir(dir), stop: stop,
		server:  newServer(handshakeIn, idleFor),
		sockets: make(map[string]*Socket),
	}
	r.others = &others{r: r, wake: make(chan struct{}, 1), next: make(chan struct{}), known: make(map[string]answer)}
	r.entries.Hint() // for the first scan of others
	r.running.Go(func() { r.others.run(ctx) })
	return r, nil
}

// Socket returns the registration socket of a driver; nothing is published yet. One driver has
// one Socket at a time.
func (r *Registry) Socket(name string) (*Socket, error) {
	path, err := pluginreg.SocketPath(r.dir.path, name)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sockets[path] != nil {
		return nil, fmt.Errorf("the registration socket of %s is in use already", name)
	}
	s := &Socket{
		r: r, name: name, path: path, log: r.o.Log.With("driver", name), watch: r.o.Watch(path, linkOf(r.dir.root, name)),
		seen: status.Socket{Path: path, Place: status.Missing},
	}
	s.worker = r.o.Pool.Slot(path, s.watch.Hint)
	r.sockets[path] = s
	return s, nil
}

// drop removes a closed Socket.
func (r *Registry) drop(s *Socket) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sockets[s.path] == s {
		delete(r.sockets, s.path)
	}
}

// at returns our Socket of this path, by name alone; nil if it is none of ours.
func (r *Registry) at(path string) *Socket {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sockets[path]
}

// of returns our Socket of a driver; nil if there is none.
func (r *Registry) of(driver string) *Socket {
	path, _ := pluginreg.SocketPath(r.dir.path, driver) // empty for what is no driver's name
	return r.at(path)
}

// Close ends serving: calls in flight are answered, for at most 2 s or until ctx is done,
// and connections are told to go elsewhere, which is the next process when the listener
// is in the store. A failed Notify would deregister the driver (kubelet v1.36). Close the
// Sockets first.
func (r *Registry) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, closeGrace)
	defer cancel()
	r.stop()
	r.running.Wait()
	r.entries.Close()
	for _, c := range r.conns.list(nil) {
		if c.used() == silent { // so it waits for no answer
			c.Close()
		}
	}
	graceful := make(chan struct{})
	go func() {
		defer close(graceful)
		r.server.GracefulStop()
	}()
	select {
	case <-graceful:
		return nil
	case <-ctx.Done():
		closeAll(r.conns.list(nil))
		r.server.Stop()
		<-graceful
		return fmt.Errorf("cannot answer all calls of the kubelet in time: %w", context.Cause(ctx))
	}
}

// StorePrefix and a driver's name are the name of its registration socket in the descriptor store.
const StorePrefix = "registration-"
