// Package kubelet is the kubelet's side of a registration: the socket in plugins_registry
// by which the kubelet finds a driver. It publishes, guards, adopts and withdraws these
// sockets, and answers GetInfo and NotifyRegistrationStatus on them. Nothing that is not
// ours is ever removed or replaced.
package kubelet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"

	"csi-registrar/internal/status"
)

const (
	folderName = "plugins_registry"
	suffix     = "-reg.sock" // node-driver-registrar's, so that both meet at one path
	maxPath    = 107         // bytes of a Unix socket's path, without the final NUL
)

// Store keeps listeners beyond the end of the process (satisfied by systemd.Store).
// Names are registration-<driver>.
type Store interface {
	Keep(ctx context.Context, name string, c syscall.Conn) error
	// Forget takes everything of that name out of the store; none is no error.
	Forget(ctx context.Context, name string) error
}

// Options of a Registry. The zero value is good: nothing is logged, stored or recorded.
type Options struct {
	Log *slog.Logger
	// RunDir is the daemon's folder under /run; records are kept in RunDir/registrations.
	// Empty: no records.
	RunDir string
	// Store takes the listeners; nil: none.
	Store Store
	// KeepSockets leaves what the store took in place when a Socket is closed.
	KeepSockets bool
	// Folder is the folder that the kubelet watches, where it is not
	// <rootDir>/plugins_registry (node-driver-registrar's --plugin-registration-path).
	// It is never made, and temporary names are dot names within it.
	Folder string
	// Watch gives hints about a path, and takes ours, so that one channel serves both.
	// Nil: only the kubelet's calls and Socket.Hint give hints.
	Watch func(path string) Watch
}

// Watch is a place for hints (satisfied by fswatch.Subscription).
type Watch interface {
	Hint()
	Hints() <-chan struct{} // capacity one
	Close()
}

// unwatched is a Watch without a watcher.
type unwatched chan struct{}

func newUnwatched(string) Watch { return make(unwatched, 1) }

func (u unwatched) Hints() <-chan struct{} { return u }
func (u unwatched) Close()                 {}
func (u unwatched) Hint() {
	select {
	case u <- struct{}{}:
	default:
	}
}

// Registry is one plugins_registry and what this process serves in it.
type Registry struct {
	log         *slog.Logger
	root        string // empty: nothing is made outside the folder
	folder      *folder
	records     string // folder of the records; empty: none
	store       Store  // nil: none
	keepSockets bool
	watch       func(path string) Watch

	server *grpc.Server
	calls  *funnel
	served chan struct{} // closed when the server's Serve has returned
	conns  *connections
	rivals *rivals

	mu      sync.Mutex
	sockets map[string]*Socket // by path
	left    map[string]fileID  // by path: what closed Sockets left there, and in the store
}

// Open prepares to serve in the plugins_registry of rootDir, the kubelet's --root-dir.
// Neither needs to exist yet.
func Open(rootDir string, o Options) (*Registry, error) {
	dir := filepath.Join(rootDir, folderName)
	if o.Folder != "" {
		rootDir, dir = "", filepath.Clean(o.Folder)
	}
	if !filepath.IsAbs(dir) {
		return nil, fmt.Errorf("cannot use %s as the kubelet's plugin registry: give an absolute path", dir)
	}
	r := &Registry{
		log: o.Log, root: rootDir, folder: newFolder(rootDir, dir), store: o.Store, keepSockets: o.KeepSockets,
		calls: newFunnel(), served: make(chan struct{}), conns: newConnections(),
		sockets: make(map[string]*Socket), left: make(map[string]fileID),
		watch: o.Watch,
	}
	if r.watch == nil {
		r.watch = newUnwatched
	}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	if o.RunDir != "" {
		r.records = recordsIn(o.RunDir)
	}
	r.rivals = newRivals(dir, r.isOurs)
	r.server = newServer(r.conns)
	go func() {
		defer close(r.served)
		if err := r.server.Serve(r.calls); err != nil && !errors.Is(err, net.ErrClosed) {
			r.log.Error("registration sockets are no longer served", "error", err)
		}
	}()
	return r, nil
}

// Folder is the path of the plugins_registry.
func (r *Registry) Folder() string { return r.folder.path }

// PathOf is where a driver's registration socket belongs.
func (r *Registry) PathOf(name string) string {
	return filepath.Join(r.folder.path, name+suffix)
}

// Socket gives the registration socket of a driver; nothing is published yet. The name is
// checked before a path is made of it (status.ErrName). One driver has one Socket at a time.
func (r *Registry) Socket(name string) (*Socket, error) {
	if err := status.CheckName(name); err != nil {
		return nil, err
	}
	path := r.PathOf(name)
	if len(path) > maxPath {
		return nil, fmt.Errorf("cannot make a registration socket for %s: %s has %d bytes, a Unix socket's path at most %d: use a shorter root_dir", name, path, len(path), maxPath)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sockets[path] != nil {
		return nil, fmt.Errorf("the registration socket of %s is in use already", name)
	}
	s := r.newSocket(name, r.watch)
	r.sockets[path] = s
	return s, nil
}

func (r *Registry) newSocket(name string, watch func(path string) Watch) *Socket {
	return &Socket{r: r, name: name, path: r.PathOf(name), log: r.log.With("driver", name), watch: watch(r.PathOf(name))}
}

// drop forgets a closed Socket.
func (r *Registry) drop(s *Socket) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sockets[s.path] == s {
		delete(r.sockets, s.path)
	}
}

// leave notes what a Socket leaves at its path when it is closed; the zero fileID: nothing.
func (r *Registry) leave(path string, id fileID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.left[path] = id
}

// wasLeft tells whether a Socket that was closed left this file there.
func (r *Registry) wasLeft(path string, id fileID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.left[path] == id
}

// isOurs tells whether path belongs to one of our Sockets, by name alone: also one that
// is just being adopted, and would keep whoever asks it waiting.
func (r *Registry) isOurs(path string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sockets[path] != nil
}

// closeGrace is how long calls in flight may take at the end.
const closeGrace = 2 * time.Second

// Close ends serving: calls in flight are answered, for at most 2 s or until ctx is done,
// and connections are told to go elsewhere, which is the next process when the listener
// is in the store. A failed Notify would deregister the driver (kubelet v1.36). Close the
// Sockets first.
func (r *Registry) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, closeGrace)
	defer cancel()
	r.mu.Lock()
	open := len(r.sockets)
	r.mu.Unlock()

	r.calls.Close()
	<-r.served // nothing new comes in from here on
	r.conns.closeSilent()
	graceful := make(chan struct{})
	go func() {
		defer close(graceful)
		r.server.GracefulStop()
	}()
	var err error
	select {
	case <-graceful:
	case <-ctx.Done():
		err = fmt.Errorf("cannot answer all calls of the kubelet in time: %w", context.Cause(ctx))
		r.conns.closeAll()
		r.server.Stop()
		<-graceful
	}
	r.conns.closeAll()
	if open > 0 {
		err = errors.Join(err, fmt.Errorf("%d registration sockets were still open", open))
	}
	return err
}

// forget takes a driver's listener out of the store.
func (r *Registry) forget(ctx context.Context, name string) error {
	if r.store == nil {
		return nil
	}
	return r.store.Forget(ctx, storeName(name))
}

func storeName(driver string) string { return "registration-" + driver }

// remove unlinks the file at path if it is the very one, and tells whether it did.
//
// There is no unlink-if-it-is-this-inode: between the look and the unlink somebody could
// put another file there. The window is two system calls long, and only root can write
// in the folder. Renaming away first would close it, but the kubelet does not notice a
// rename-away, so it is no withdrawal.
func remove(path string, id fileID) (bool, error) {
	switch f, err := lookAt(path); {
	case errors.Is(err, os.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	case f.fileID != id:
		return false, nil
	}
	switch err := os.Remove(path); {
	case errors.Is(err, os.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	}
	return true, nil
}
