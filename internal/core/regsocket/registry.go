// Package regsocket is the part of a registration that faces the kubelet: the socket in
// plugins_registry through which the kubelet finds a driver. It publishes, guards, adopts and
// withdraws these sockets, and answers GetInfo and NotifyRegistrationStatus on them. It removes
// and replaces only its own.
package regsocket

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/node/pluginreg"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

// StorePrefix, followed by the driver's name, is the name of a listener in the descriptor store.
const StorePrefix = "registration-"

// Store keeps descriptors beyond the end of the process (implemented by systemd.Store). The name
// of a listener is StorePrefix and the driver's name.
type Store interface {
	// Keep stores a copy of a descriptor in place of those with that name.
	Keep(ctx context.Context, name string, c syscall.Conn) error
	// Forget removes everything with that name; it is not an error if there is nothing.
	Forget(ctx context.Context, name string) error
}

type noStore struct{}

func (noStore) Keep(context.Context, string, syscall.Conn) error { return nil }
func (noStore) Forget(context.Context, string) error             { return nil }

// Options are the options of Open. Log, Watch and Pool are required.
type Options struct {
	Log *slog.Logger
	// RunDir is the daemon's directory below /run, which holds the records. Empty: there are no
	// records, so nothing can be adopted.
	RunDir string
	// Store keeps the listeners; nil: none.
	Store Store
	// KeepSockets leaves the sockets that the store has in place when they are closed.
	KeepSockets bool
	// Dir is the directory that the kubelet watches, if it is not
	// <rootDir>/plugins_registry (node-driver-registrar's --plugin-registration-path).
	// It is never created.
	Dir string
	// Watch gives hints about paths.
	Watch func(paths ...string) rate.Hinter
	// Pool runs calls that may never return.
	Pool *worker.Pool
	// Process follows the kubelet that calls; nil: its end is not noticed.
	Process *Process
	// Host is the operating system; nil: the real one.
	Host *Host
}

// Registry is a plugins_registry with the sockets that this process serves in it.
type Registry struct {
	o   Options // Host is never nil
	dir *directory

	server  Server
	callers *callers

	mu      sync.Mutex
	sockets map[string]*Socket // by path
	survey  *survey            // the last one; nil: none
}

// Open returns the Registry of rootDir, the kubelet's --root-dir. Neither it nor the
// plugins_registry needs to exist yet.
func Open(rootDir string, o Options) (*Registry, error) {
	dir := rootdir.PluginsRegistry(rootDir)
	if o.Dir != "" {
		rootDir, dir = "", filepath.Clean(o.Dir)
	}
	if !filepath.IsAbs(dir) {
		return nil, fmt.Errorf("cannot use %s as the plugins_registry: give an absolute path", dir)
	}
	if o.Store == nil {
		o.Store, o.KeepSockets = noStore{}, false
	}
	o.Host = cmp.Or(o.Host, newHost())
	r := &Registry{
		o: o, dir: &directory{host: o.Host, root: rootDir, path: dir},
		callers: &callers{TransportCredentials: insecure.NewCredentials()},
		sockets: make(map[string]*Socket),
	}
	r.server = o.Host.NewServer(r.callers)
	registerapi.RegisterRegistrationServer(r.server, service{})
	return r, nil
}

// Socket returns the registration socket of a driver, which is not published yet. A driver has one
// Socket at a time.
func (r *Registry) Socket(name string) (*Socket, error) {
	path, err := rootdir.SocketPath(r.dir.path, name)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sockets[path] != nil {
		return nil, fmt.Errorf("the registration socket of %s is in use already", name)
	}
	s := &Socket{
		r: r, name: name, path: path, log: r.o.Log.With("driver", name), watch: r.o.Watch(path),
		seen: status.Socket{Path: path, Place: status.Missing},
	}
	s.worker = r.o.Pool.Slot(path, s.watch.Hint)
	s.again = time.AfterFunc(againAfter, s.watch.Hint)
	s.again.Stop()
	r.sockets[path] = s
	return s, nil
}

// drop removes a closed Socket.
func (r *Registry) drop(s *Socket) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.sockets, s.path)
}

// socketAt returns our Socket with this path; nil if there is none.
func (r *Registry) socketAt(path string) *Socket {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sockets[path]
}

// Close ends serving. It answers calls in flight, for at most closeGrace or until ctx is done,
// because a failed Notify deregisters the driver (kubelet v1.36). Clients are told to connect
// again: to the next process if the listener is in the store. Close the Sockets first.
func (r *Registry) Close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, closeGrace)
	defer cancel()
	defer context.AfterFunc(ctx, r.callers.close)()
	r.server.GracefulStop()
}

// Host is the part of the operating system that a Registry uses: files, sockets, and the server
// behind them. internal/test/simulation replaces all of it with a model.
type Host struct {
	Stat, Lstat  func(path string) (unixsock.File, error)
	Mkdir        func(path string, mode os.FileMode) error
	MkdirAll     func(path string, mode os.FileMode) error
	Rename       func(from, to string) error
	Remove       func(path string) error
	ReadDir      func(path string) ([]fs.DirEntry, error)
	Sockets      func(dir string) ([]string, error)
	ReadFile     func(path string) ([]byte, error)
	WriteFile    func(path string, data []byte, mode os.FileMode) error
	RemoveFile   func(path string, id unixsock.FileID) (bool, error)
	Vacate       func(ctx context.Context, path string) (removed bool, err error)
	GetInfo      func(ctx context.Context, path string) (pluginreg.Info, unixsock.Cred, error)
	Listen       func(ctx context.Context, path string, before func(syscall.Conn) error) (Listener, unixsock.File, error)
	Cookie       func(syscall.Conn) (uint64, error)
	FileListener func(*os.File) (Listener, error)
	PeerCred     func(net.Conn) (unixsock.Cred, error)
	NewServer    func(credentials.TransportCredentials) Server
}

// Listener is a listening Unix socket (implemented by *net.UnixListener).
type Listener interface {
	net.Listener // its connections implement syscall.Conn, too
	syscall.Conn
}

// Server answers the kubelet's calls (implemented by *grpc.Server).
type Server interface {
	grpc.ServiceRegistrar
	Serve(net.Listener) error
	GracefulStop()
}

func newHost() *Host {
	return &Host{
		Stat: unixsock.Stat, Lstat: unixsock.Lstat, RemoveFile: unixsock.Remove, Vacate: unixsock.Vacate,
		Mkdir: os.Mkdir, MkdirAll: os.MkdirAll, Rename: os.Rename, Remove: os.Remove,
		ReadDir: os.ReadDir, Sockets: pluginreg.Sockets, WriteFile: os.WriteFile,
		ReadFile: func(path string) ([]byte, error) { return trust.Rule{}.ReadFile(path, maxRecord) },
		GetInfo:  pluginreg.GetInfo,
		FileListener: func(f *os.File) (Listener, error) {
			l, err := net.FileListener(f)
			if err != nil {
				return nil, err
			}
			return l.(Listener), nil // as all listeners of package net are
		},
		Listen: func(ctx context.Context, path string, before func(syscall.Conn) error) (Listener, unixsock.File, error) {
			return unixsock.Listen(ctx, path, before)
		},
		Cookie:    unixsock.Cookie,
		PeerCred:  func(c net.Conn) (unixsock.Cred, error) { return unixsock.PeerCred(c.(*net.UnixConn)) },
		NewServer: newServer,
	}
}
