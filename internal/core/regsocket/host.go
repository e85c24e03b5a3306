package kubelet

import (
	"context"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"

	"google.golang.org/grpc"

	"csi-registrar/internal/node/pluginreg"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
)

// Host is the part of the operating system that a Registry uses: files, sockets, and the server
// behind them. internal/test/simulation replaces all of it with a model.
type Host struct {
	Stat, Lstat                    func(path string) (unixsock.File, error)
	Mkdir, Remove, Trust           func(path string) error
	Rename, MoveIntoPlace, Symlink func(from, to string) error
	MkdirAll                       func(path string, mode os.FileMode) error
	Readlink                       func(path string) (string, error)
	ReadDir                        func(path string) ([]fs.DirEntry, error)
	Sockets                        func(dir string) []string
	ReadFile                       func(path string) ([]byte, error)
	WriteFile                      func(path string, data []byte, mode os.FileMode) error
	RemoveFile                     func(path string, id unixsock.FileID) (bool, error)
	Vacate                         func(ctx context.Context, path string) (removed bool, err error)
	RemoveStale                    func(ctx context.Context, paths []string) ([]string, error)
	Probe                          func(ctx context.Context, path string) (unixsock.Liveness, unixsock.Cred, error)
	GetInfo                        func(ctx context.Context, path string) (pluginreg.Info, unixsock.Cred, error)
	Listen                         func(ctx context.Context, path string) (Listener, unixsock.File, error)
	FileListener                   func(*os.File) (net.Listener, error)
	PeerCred                       func(net.Conn) (unixsock.Cred, error)
	NewServer                      func() Server
}

// Listener is a listening Unix socket (implemented by *net.UnixListener).
type Listener interface {
	net.Listener // its connections implement syscall.Conn, too
	syscall.Conn
	SetDeadline(time.Time) error
}

// Server answers the kubelet's calls (implemented by *grpc.Server).
type Server interface {
	grpc.ServiceRegistrar
	Serve(net.Listener) error
	GracefulStop()
	Stop()
}

func newHost() *Host {
	return &Host{
		Stat: unixsock.Stat, Lstat: unixsock.Lstat, RemoveFile: unixsock.Remove, RemoveStale: unixsock.RemoveStale, Vacate: unixsock.Vacate,
		Mkdir: makeDirectory, Remove: os.Remove, Trust: trust.SocketOwner("root").Path,
		Rename: os.Rename, MoveIntoPlace: unixsock.MoveIntoPlace, Symlink: os.Symlink, MkdirAll: os.MkdirAll,
		Readlink: os.Readlink, ReadDir: os.ReadDir, Sockets: pluginreg.Sockets, WriteFile: os.WriteFile,
		ReadFile: func(path string) ([]byte, error) { return trust.Rule{}.ReadFile(path, maxRecord) },
		Probe:    unixsock.Probe, GetInfo: pluginreg.GetInfo, FileListener: net.FileListener,
		Listen: func(ctx context.Context, path string) (Listener, unixsock.File, error) {
			return unixsock.Listen(ctx, path)
		},
		PeerCred:  func(c net.Conn) (unixsock.Cred, error) { return unixsock.PeerCred(c.(*net.UnixConn)) },
		NewServer: func() Server { return newServer(handshakeIn, idleFor) },
	}
}
