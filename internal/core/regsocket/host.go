package regsocket

import (
	"context"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"csi-registrar/internal/node/pluginreg"
	"csi-registrar/internal/sys/process"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
)

// Host is the part of the operating system that a Registry uses: files, sockets, and the server
// behind them. internal/test/simulation replaces all of it with a model.
type Host struct {
	Stat, Lstat   func(path string) (unixsock.File, error)
	Mkdir, Remove func(path string) error
	Rename        func(from, to string) error
	MkdirAll      func(path string, mode os.FileMode) error
	ReadDir       func(path string) ([]fs.DirEntry, error)
	Sockets       func(dir string) []string
	ReadFile      func(path string) ([]byte, error)
	WriteFile     func(path string, data []byte, mode os.FileMode) error
	RemoveFile    func(path string, id unixsock.FileID) (bool, error)
	Vacate        func(ctx context.Context, path string) (removed bool, err error)
	GetInfo       func(ctx context.Context, path string) (pluginreg.Info, unixsock.Cred, error)
	Listen        func(ctx context.Context, path string, before func(syscall.Conn) error) (Listener, unixsock.File, error)
	Cookie        func(syscall.Conn) (uint64, error)
	FileListener  func(*os.File) (Listener, error)
	PeerCred      func(net.Conn) (unixsock.Cred, error)
	StartTime     func(pid int) uint64
	NewServer     func(credentials.TransportCredentials) Server
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
		Stat: unixsock.Stat, Lstat: unixsock.Lstat, RemoveFile: unixsock.Remove, Vacate: unixsock.Vacate,
		Mkdir: makeDirectory, Remove: os.Remove,
		Rename: os.Rename, MkdirAll: os.MkdirAll,
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
		StartTime: process.StartTime,
		NewServer: newServer,
	}
}
