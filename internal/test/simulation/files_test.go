package simulation

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"os"
	"path"
	"sort"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/credentials"

	"csi-registrar/internal/core/regsocket"
	"csi-registrar/internal/node/pluginreg"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/unixsock"
)

// The model of the file systems, after inode(7), unlink(2), rename(2), inotify(7) and unix(7). Two
// are mounted: one with two root directories of a kubelet, /k and /k2, and /run at /r. Each can be
// full, and the first one read-only or hanging.

const runDir = "/r/csi-registrar"

var rootDirs = []string{"/k", "/k2"}

// node is a file. Somebody made it: "daemon", or whoever else.
type node struct {
	unixsock.FileID
	mode    uint16
	maker   string
	changed int64
	data    []byte
	sock    *sock
	record  *record // what data says; nil: was not needed yet
}

// mount is the state of a file system.
type mount struct {
	err syscall.Errno // of everything that changes it; 0: none
	// While there is no space, a socket can be bound for each one that was removed and that nobody
	// holds: its inode is free.
	spare int
	hang  chan struct{} // not nil: it does not answer until this is closed
	// The call after so many others hangs until stallEnd is closed, and the others go on.
	stall    int
	stallEnd chan struct{}
	stalled  []chan struct{} // of all calls that hang so
	thawedAt time.Time       // when calls that hung went on
	// when changes were possible again
	writableAt time.Time
	// The call after so many others fails with fault; 0: none.
	faultIn int
	fault   syscall.Errno
}

type files struct {
	w       *world
	nodes   map[string]*node
	ino     uint64
	mounts  map[string]*mount // by the first letter of their path
	watches []*watch
	latency time.Duration // of each call
}

func newFiles(w *world) *files {
	f := &files{w: w, nodes: map[string]*node{}, mounts: map[string]*mount{"k": {}, "r": {}}}
	dirs := []string{"/", "/r"}
	for _, root := range rootDirs {
		dirs = append(dirs, root, root+"/plugins", rootdir.PluginsRegistry(root))
	}
	for _, dir := range dirs {
		f.put(dir, &node{mode: syscall.S_IFDIR | 0o750, maker: "kubelet"})
	}
	return f
}

// put makes a file, and tells who watches.
func (f *files) put(name string, n *node) *node {
	if n.Ino == 0 {
		f.ino++
		n.Dev, n.Ino, n.Born = 1, f.ino, time.Now().UnixNano()
	}
	n.changed = time.Now().UnixNano()
	f.nodes[name] = n
	delete(f.w.lost, name)
	f.notify(name)
	f.w.kubelet.created(name)
	return n
}

// drop removes a file, and tells who watches.
func (f *files) drop(name string) {
	n := f.nodes[name]
	delete(f.nodes, name)
	if n.sock != nil && n.maker == "daemon" {
		n.sock.inodeOf = f.mounts[name[1:2]]
		n.sock.freeInode()
	} else if driver := driverOf(name); driver != "" && time.Since(f.w.of(driver).cameAt) > time.Second {
		f.w.of(driver).leftAt = time.Now()
	}
	f.notify(name)
	f.w.kubelet.removed(name, n)
}

// lose is rm: what the daemon had there may be published once more.
func (f *files) lose(name string) {
	if p := f.w.process; p != nil && path.Base(path.Dir(name)) == rootdir.PluginsRegistryName {
		p.first[driverOf(name)] = true
		p.lose(driverOf(name), removed)
	}
	f.drop(name)
}

// removeAll is rm -rf.
func (f *files) removeAll(dir string) {
	for _, name := range f.below(dir) {
		f.lose(name)
	}
	if f.nodes[dir] != nil {
		f.drop(dir)
	}
}

// below returns the paths in a directory and its subdirectories, sorted.
func (f *files) below(dir string) (names []string) {
	for name := range f.nodes {
		if isBelow(name, dir) {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	return names
}

func isBelow(name, dir string) bool {
	return len(name) > len(dir) && name[len(dir)] == '/' && name[:len(dir)] == dir
}

// watch is a place for hints, as of fswatch.Watcher.
type watch struct {
	f     *files
	p     *process
	paths []string
	hints chan struct{}
}

func (f *files) watch(p *process, paths ...string) *watch {
	f.w.mu.Lock()
	defer f.w.mu.Unlock()
	x := &watch{f, p, paths, make(chan struct{}, 1)}
	f.watches = append(f.watches, x)
	return x
}

func (x *watch) Hint() {
	select {
	case x.hints <- struct{}{}:
	default:
	}
}

func (x *watch) Hints() <-chan struct{} { return x.hints }

func (x *watch) Close() {
	x.f.w.mu.Lock()
	defer x.f.w.mu.Unlock()
	for i, o := range x.f.watches {
		if o == x {
			x.f.watches = append(x.f.watches[:i], x.f.watches[i+1:]...)
			return
		}
	}
}

func (f *files) notify(name string) {
	for _, x := range f.watches {
		for _, p := range x.paths {
			if p == name || isBelow(p, name) {
				x.Hint()
			}
		}
	}
}

// resolve returns what is at a path. There are no symbolic links here.
func (f *files) resolve(name string) (*node, error) {
	n := f.nodes[name]
	if n == nil {
		return nil, &os.PathError{Op: "stat", Path: name, Err: syscall.ENOENT}
	}
	return n, nil
}

func (n *node) file() unixsock.File {
	return unixsock.File{FileID: n.FileID, Mode: n.mode, UID: uint32(os.Geteuid()), Changed: n.changed}
}

// sock is a listening socket: it listens for as long as somebody has a descriptor of it.
type sock struct {
	bound  string
	cookie uint64
	refs   int
	queue  chan *conn // not accepted yet; nil: another program's socket
	driver string     // which its GetInfo names
	// endpoint is announced by GetInfo of another registrar, after slow.
	endpoint string
	slow     time.Duration
	by       *process // which serves it, or did last

	inodeOf   *mount // which has an inode of it that has no name any more; nil: there is none
	answering int    // calls that the daemon answers now
	forgotten bool   // the kubelet told it to a process that ended, and the record does not have it

	madeAt, movedAt, askedAt, toldAt, acceptedAt time.Time // acceptedAt: first
	told                                         *status.Notification
}

// call is one call of the kubelet on a connection.
type call struct {
	notify *status.Notification // nil: GetInfo
	reply  chan callReply       // capacity 1
}

type callReply struct {
	endpoint string
	versions []string
	name     string
	err      error
}

var errReset = syscall.ECONNRESET

// conn is a connection of the kubelet.
type conn struct {
	net.Conn
	sock   *sock
	number byte
	calls  chan call
	closed chan struct{}
	isOpen bool
}

func (c *conn) close() { // under the world's lock
	if c.isOpen {
		c.isOpen = false
		close(c.closed)
	}
}

func (c *conn) Close() error { return nil } // the model of the server closes it

// Read gives the product's connection a byte, so that the server's model can ask for ours.
func (c *conn) Read(b []byte) (int, error) {
	b[0] = c.number
	return 1, nil
}

func (c *conn) RemoteAddr() net.Addr { return &net.UnixAddr{Net: "unix"} }

func (c *conn) SyscallConn() (syscall.RawConn, error) { return nil, errors.New("a model has none") }

// dial is connect(2) to a Unix socket.
func (f *files) dial(name string) (*conn, error) {
	n, err := f.resolve(name)
	if err != nil {
		return nil, err
	}
	if n.sock == nil || n.sock.refs == 0 {
		return nil, syscall.ECONNREFUSED
	}
	f.w.connections++
	c := &conn{number: byte(f.w.connections), sock: n.sock, calls: make(chan call, 4), closed: make(chan struct{}), isOpen: true}
	if n.sock.queue == nil { // another program, which answers at once
		return c, nil
	}
	f.w.conns[c.number] = c
	select {
	case n.sock.queue <- c:
		return c, nil
	default:
		return nil, syscall.EAGAIN
	}
}

// handle is a descriptor of a listening socket in a process.
type handle struct {
	p    *process
	sock *sock
	stop chan struct{}
	open bool
}

func (w *world) newHandle(p *process, s *sock) *handle {
	h := &handle{p: p, sock: s, stop: make(chan struct{}), open: true}
	s.refs++
	s.by = p
	p.handles = append(p.handles, h)
	return h
}

func (h *handle) Accept() (net.Conn, error) {
	select {
	case <-h.stop:
		return nil, net.ErrClosed
	default:
	}
	select {
	case c := <-h.sock.queue:
		return c, nil
	case <-h.stop:
		return nil, net.ErrClosed
	}
}

func (h *handle) Close() error {
	h.p.w.mu.Lock()
	defer h.p.w.mu.Unlock()
	h.close()
	return nil
}

func (h *handle) close() {
	if h.open {
		h.open = false
		close(h.stop)
		h.sock.release()
	}
}

func (h *handle) Addr() net.Addr                        { return &net.UnixAddr{Net: "unix", Name: h.sock.bound} }
func (h *handle) SyscallConn() (syscall.RawConn, error) { return nil, errors.New("a model has none") }

// release closes one descriptor. With the last one, connections that nobody accepted are reset.
func (s *sock) release() {
	if s.refs--; s.refs > 0 {
		return
	}
	s.freeInode()
	for {
		select {
		case c := <-s.queue:
			c.close()
		default:
			return
		}
	}
}

// freeInode frees the inode of a socket that nobody holds.
func (s *sock) freeInode() {
	if s.inodeOf != nil && s.refs == 0 {
		s.inodeOf.spare++
		s.inodeOf = nil
	}
}

// The effect of a system call on a file system: a full one still looks and removes, and binds to an
// inode that was freed.
type access int

const (
	looks access = iota
	removes
	makes
	binds
)

// enter begins a system call of a process and takes the world's lock: it waits while the file
// system does not answer. It fails, without the lock, if it cannot be done.
func (p *process) enter(name string, does access) error {
	w := p.w
	if name[1] == 'k' { // /run is memory, and records are written under a mutex
		time.Sleep(w.files.latency)
	}
	w.mu.Lock()
	m := w.files.mounts[name[1:2]]
	for {
		switch {
		case p.dead:
			w.mu.Unlock()
			return syscall.EIO
		case m.hang != nil:
			p.await(m.hang)
			continue
		case m.stallEnd != nil:
			if m.stall--; m.stall < 0 {
				end := m.stallEnd
				m.stallEnd = nil
				p.await(end)
			}
		}
		break
	}
	if p.dead {
		w.mu.Unlock()
		return syscall.EIO
	}
	err := p.faulty(name, does)
	if err == nil {
		err = p.allowed(name, does)
	}
	if err != nil {
		w.mu.Unlock()
	}
	return err
}

// faulty returns the error of the one call that fails. In memory only a lack of space can.
func (p *process) faulty(name string, does access) error {
	m := p.w.files.mounts[name[1:2]]
	if m.fault == 0 || name[1] == 'r' && does < makes {
		return nil
	}
	if m.faultIn--; m.faultIn >= 0 {
		return nil
	}
	err := &os.PathError{Op: "call", Path: name, Err: m.fault}
	if does == looks {
		err.Err = syscall.EIO
	}
	m.fault = 0
	p.w.tell("daemon %d: %s", p.number, err)
	p.w.faultAt = time.Now()
	p.w.undamagedSince, p.w.intactSince = time.Time{}, time.Time{}
	p.tried(name)
	p.troubled = true
	p.faults++
	p.w.failed[name] = true
	return err
}

// allowed returns an error if the state of the file system does not allow it.
func (p *process) allowed(name string, does access) error {
	m := p.w.files.mounts[name[1:2]]
	if does == binds && m.err == syscall.ENOSPC && m.spare > 0 {
		m.spare--
		return nil
	}
	if does >= makes && m.err != 0 || does == removes && m.err == syscall.EROFS {
		p.tried(name)
		p.troubled = true
		p.unswept = p.unswept || does == removes && time.Since(p.started) < patience
		p.w.failed[name] = true
		return &os.PathError{Op: "change", Path: name, Err: m.err}
	}
	if does != looks {
		delete(p.w.failed, name)
	}
	return nil
}

// await waits without the lock.
func (p *process) await(c chan struct{}) {
	p.stuck++
	p.troubled = true
	p.w.mu.Unlock()
	select {
	case <-c:
	case <-p.killed:
	}
	p.w.mu.Lock()
	p.stuck--
}

// host is the operating system for a process.
func (p *process) host() *regsocket.Host {
	w, f := p.w, p.w.files
	stat := func(name string) (unixsock.File, error) {
		if err := p.enter(name, looks); err != nil {
			return unixsock.File{}, err
		}
		defer w.mu.Unlock()
		n, err := f.resolve(name)
		if err != nil {
			return unixsock.File{}, err
		}
		return n.file(), nil
	}
	missingParent := func(name string) error {
		if d := f.nodes[path.Dir(name)]; d == nil || d.mode&syscall.S_IFMT != syscall.S_IFDIR {
			return &os.PathError{Op: "create", Path: name, Err: syscall.ENOENT}
		}
		return nil
	}
	remove := func(name string) error {
		n := f.nodes[name]
		if n == nil {
			return &os.PathError{Op: "remove", Path: name, Err: syscall.ENOENT}
		}
		w.removedByDaemon(p, name, n)
		p.lostAt[driverOf(name)] = time.Now() // it is about to publish another, or withdraws it
		f.drop(name)
		if driver := driverOf(name); driver != "" {
			w.of(driver).leftAt = time.Time{} // nobody left it
		}
		return nil
	}
	return &regsocket.Host{
		Stat: stat, Lstat: stat,
		Mkdir: func(name string, _ os.FileMode) error {
			if err := p.enter(name, makes); err != nil {
				return err
			}
			defer w.mu.Unlock()
			if err := missingParent(name); err != nil {
				return err
			}
			if f.nodes[name] != nil {
				return nil
			}
			f.put(name, &node{mode: syscall.S_IFDIR | 0o750, maker: "daemon"})
			return nil
		},
		MkdirAll: func(name string, _ os.FileMode) error {
			if err := p.enter(name, looks); err != nil {
				return err
			}
			_, err := f.resolve(name)
			w.mu.Unlock()
			if err == nil {
				return nil
			}
			if err := p.enter(name, makes); err != nil {
				return err
			}
			defer w.mu.Unlock()
			for _, dir := range []string{path.Dir(path.Dir(name)), path.Dir(name), name} {
				if f.nodes[dir] == nil {
					f.put(dir, &node{mode: syscall.S_IFDIR | 0o750, maker: "daemon"})
				}
			}
			return nil
		},
		Remove: func(name string) error {
			if err := p.enter(name, removes); err != nil {
				return err
			}
			defer w.mu.Unlock()
			return remove(name)
		},
		RemoveFile: func(name string, id unixsock.FileID) (bool, error) {
			if err := p.enter(name, looks); err != nil {
				return false, err
			}
			defer w.mu.Unlock()
			if n := f.nodes[name]; n == nil || n.FileID != id {
				return false, nil
			}
			if err := p.allowed(name, removes); err != nil {
				return false, err
			}
			return true, remove(name)
		},
		Rename: func(from, to string) error {
			if err := p.enter(to, removes); err != nil {
				return err
			}
			defer w.mu.Unlock()
			n := f.nodes[from]
			if n == nil || missingParent(to) != nil {
				return &os.PathError{Op: "rename", Path: from, Err: syscall.ENOENT}
			}
			if old := f.nodes[to]; old != nil {
				w.removedByDaemon(p, to, old)
			}
			delete(f.nodes, from)
			f.put(to, n)
			return nil
		},
		ReadDir: func(name string) ([]fs.DirEntry, error) {
			if err := p.enter(name, looks); err != nil {
				return nil, err
			}
			defer w.mu.Unlock()
			if _, err := f.resolve(name); err != nil {
				return nil, err
			}
			var entries []fs.DirEntry
			for _, below := range f.below(name) {
				if path.Dir(below) == name {
					entries = append(entries, entry{path.Base(below), f.nodes[below]})
				}
			}
			return entries, nil
		},
		Sockets: func(dir string) ([]string, error) {
			if err := p.enter(dir, looks); err != nil {
				return nil, err
			}
			defer w.mu.Unlock()
			return f.sockets(dir), nil
		},
		ReadFile: func(name string) ([]byte, error) {
			if err := p.enter(name, looks); err != nil {
				return nil, err
			}
			defer w.mu.Unlock()
			if w.shortage {
				w.shortage, w.opensAt = false, time.Now()
				return nil, &os.PathError{Op: "open", Path: name, Err: syscall.EMFILE}
			}
			n, err := f.resolve(name)
			if err != nil {
				return nil, err
			}
			return n.data, nil
		},
		WriteFile: func(name string, data []byte, _ os.FileMode) error {
			if err := p.enter(name, makes); err != nil {
				return err
			}
			defer w.mu.Unlock()
			if err := missingParent(name); err != nil {
				return err
			}
			f.put(name, &node{mode: syscall.S_IFREG, data: data, maker: "daemon"})
			return nil
		},
		Vacate: func(ctx context.Context, name string) (bool, error) {
			var before uint64
			for {
				if err := p.enter(name, looks); err != nil {
					return false, err
				}
				n, err := f.resolve(name)
				switch {
				case err != nil:
					w.mu.Unlock()
					return false, nil
				case n.mode&syscall.S_IFMT != syscall.S_IFSOCK:
					w.mu.Unlock()
					return false, &unixsock.InUse{Path: name, Holder: "a file"}
				case n.sock != nil && n.sock.refs != 0, before != 0 && before != n.Ino:
					w.mu.Unlock()
					return false, &unixsock.InUse{Path: name, Holder: "a socket", Live: true}
				case before != 0:
					defer w.mu.Unlock()
					if err := p.allowed(name, removes); err != nil {
						return false, err
					}
					return true, remove(name)
				}
				before = n.Ino
				w.mu.Unlock()
				select { // as unixsock.Vacate waits
				case <-time.After(100 * time.Millisecond):
				case <-ctx.Done():
					return false, context.Cause(ctx)
				}
			}
		},
		GetInfo: func(ctx context.Context, name string) (pluginreg.Info, unixsock.Cred, error) {
			if err := p.enter(name, looks); err != nil {
				return pluginreg.Info{}, unixsock.Cred{}, err
			}
			defer w.mu.Unlock()
			n, err := f.resolve(name)
			if err == nil && n.sock != nil && n.sock.slow > 0 {
				w.mu.Unlock()
				select {
				case <-time.After(n.sock.slow):
				case <-ctx.Done():
					err = context.Cause(ctx)
				}
				w.mu.Lock()
			}
			if err != nil {
				return pluginreg.Info{}, unixsock.Cred{}, err
			}
			if n.sock == nil || n.sock.refs == 0 {
				return pluginreg.Info{}, unixsock.Cred{}, syscall.ECONNREFUSED
			}
			return pluginreg.Info{Type: "CSIPlugin", Name: n.sock.driver, Endpoint: n.sock.endpoint}, unixsock.Cred{PID: int(n.Ino)}, nil
		},
		Listen: func(_ context.Context, name string, before func(syscall.Conn) error) (regsocket.Listener, unixsock.File, error) {
			// A publication comes later than its cause.
			time.Sleep(time.Microsecond)
			w.mu.Lock()
			w.cookies++
			s := &sock{bound: name, cookie: w.cookies, queue: make(chan *conn, 16)}
			h := w.newHandle(p, s)
			w.mu.Unlock()
			err := before(h)
			s.madeAt = time.Now()
			if err == nil {
				err = p.enter(name, binds)
			}
			if err != nil {
				return nil, unixsock.File{}, errors.Join(err, h.Close())
			}
			defer w.mu.Unlock()
			if err := missingParent(name); err != nil {
				h.close()
				return nil, unixsock.File{}, err
			}
			if f.nodes[name] != nil {
				h.close()
				return nil, unixsock.File{}, &os.PathError{Op: "bind", Path: name, Err: syscall.EADDRINUSE}
			}
			n := f.put(name, &node{mode: syscall.S_IFSOCK | 0o600, maker: "daemon", sock: s})
			w.published(p, name, n)
			if w.removesAtOnce == driverOf(name) {
				w.removesAtOnce = ""
				w.tell("it is removed at once")
				f.lose(name)
				return h, unixsock.File{}, nil
			}
			return h, n.file(), nil
		},
		Cookie: func(c syscall.Conn) (uint64, error) { return c.(*handle).sock.cookie, nil },
		FileListener: func(d *os.File) (regsocket.Listener, error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			if p.dead {
				return nil, net.ErrClosed
			}
			return w.newHandle(p, w.passed[d]), nil
		},
		PeerCred:  func(net.Conn) (unixsock.Cred, error) { return unixsock.Cred{PID: 4711}, nil },
		NewServer: func(creds credentials.TransportCredentials) regsocket.Server { return newServer(p, creds) },
	}
}

// setClock makes the times in the records as old as they are by a wall clock that was set.
func (w *world) setClock() {
	step := w.clockStep
	if w.clockStep = 0; step == 0 {
		return
	}
	var shift func(v any) any
	shift = func(v any) any {
		switch v := v.(type) {
		case map[string]any:
			for key := range v {
				v[key] = shift(v[key])
			}
		case string:
			if at, err := time.Parse(time.RFC3339Nano, v); err == nil && !at.IsZero() {
				return at.Add(-step)
			}
		}
		return v
	}
	for _, driver := range driverNames {
		n := w.files.nodes[recordOf(driver)]
		if n == nil {
			continue
		}
		var rec map[string]any
		d := json.NewDecoder(bytes.NewReader(n.data))
		d.UseNumber() // cookies
		err := d.Decode(&rec)
		if err == nil {
			n.data, err = json.Marshal(shift(rec))
		}
		if err != nil {
			panic(err)
		}
		n.record = nil
	}
	w.tell("the clock was set by %s", step)
}

// sockets are those that the kubelet sees in a directory.
func (f *files) sockets(dir string) (found []string) {
	for _, name := range f.below(dir) {
		if n := f.nodes[name]; n.mode&syscall.S_IFMT == syscall.S_IFSOCK && !strings.HasPrefix(path.Base(name), ".") {
			found = append(found, name)
		}
	}
	return found
}

// entry is a directory's entry.
type entry struct {
	name string
	n    *node
}

func (e entry) Name() string { return e.name }
func (e entry) IsDir() bool  { return e.n.mode&syscall.S_IFMT == syscall.S_IFDIR }
func (e entry) Type() fs.FileMode {
	switch e.n.mode & syscall.S_IFMT {
	case syscall.S_IFSOCK:
		return fs.ModeSocket
	case syscall.S_IFDIR:
		return fs.ModeDir
	}
	return 0
}
func (e entry) Info() (fs.FileInfo, error) { return nil, errors.New("a model has none") }
