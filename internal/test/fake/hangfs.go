package fake

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// HangFS is a FUSE file system in memory that stops answering on request, like a dead NFS server:
// every system call with a path in it, or with the mount point itself, then blocks until Resume,
// Close or SIGKILL. It can contain directories, symbolic links, sockets that can be bound and
// connected to, and empty files. The kernel does not cache its contents.
//
// A hanging HangFS leaves requests in the kernel's queue instead of reading them: a process whose
// request was read could not even be killed (fs/fuse/dev.c, request_wait_answer), including the
// process that serves the file system.
type HangFS struct {
	dir  string
	file *os.File // /dev/fuse

	mu      sync.Mutex // one of Hang, Resume and Close at a time
	hanging bool
	stopped chan struct{} // the server stopped reading
	resumed chan struct{}
	done    chan struct{} // closed when the server has returned

	// Only used by the server.
	nodes map[uint64]*node
	last  uint64 // the number of the newest node; numbers are not reused
}

// MountHangFS mounts an empty file system at dir and serves it. The error is fs.ErrPermission or
// fs.ErrNotExist where FUSE is not available.
func MountHangFS(dir string) (*HangFS, error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("cannot open /dev/fuse: %w", err)
	}
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d,allow_other,default_permissions", fd, os.Geteuid(), os.Getegid())
	if err := unix.Mount("hangfs", dir, "fuse", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return nil, errors.Join(fmt.Errorf("cannot mount a FUSE file system at %s: %w", dir, err), unix.Close(fd))
	}
	h := &HangFS{
		dir: dir,
		// not earlier: before the mount, epoll reports an error for it
		file:    os.NewFile(uintptr(fd), "/dev/fuse"),
		stopped: make(chan struct{}),
		resumed: make(chan struct{}),
		done:    make(chan struct{}),
		nodes:   map[uint64]*node{},
	}
	h.add(unix.S_IFDIR|0o755, header{UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())})
	go h.serve()
	if err := h.refuse(); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	return h, nil
}

// refuse makes the kernel send a poll and a flush request. The server answers that it does not
// implement them, so the kernel never sends them again. Later requests would be a deadlock: Go adds
// each file that it opens to the epoll instance with which it also waits for /dev/fuse, so that the
// server would wait for itself; and a process cannot end before a flush is answered.
func (h *HangFS) refuse() error {
	path := filepath.Join(h.dir, "poll")
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("cannot create a file in it: %w", err)
	}
	_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	if err = errors.Join(err, unix.Close(fd), unix.Unlink(path)); err != nil {
		return fmt.Errorf("cannot poll a file in it: %w", err)
	}
	return nil
}

// Hang stops answering. When it returns, no request is being processed.
func (h *HangFS) Hang() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.hanging {
		return nil
	}
	if err := h.file.SetReadDeadline(time.Unix(1, 0)); err != nil {
		return fmt.Errorf("cannot stop answering: %w", err)
	}
	select {
	case <-h.stopped:
		h.hanging = true
		return nil
	case <-h.done:
		return errors.New("cannot stop answering: the file system was unmounted")
	}
}

// Resume answers again, also the requests that wait.
func (h *HangFS) Resume() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.hanging {
		return nil
	}
	if err := h.file.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("cannot answer again: %w", err)
	}
	h.hanging = false
	h.resumed <- struct{}{}
	return nil
}

// Close unmounts the file system. Calls that hang return an error.
func (h *HangFS) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	err := unix.Unmount(h.dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) // does not wait
	err = errors.Join(err, h.file.Close())
	if h.hanging {
		h.hanging = false
		h.resumed <- struct{}{}
	}
	<-h.done
	if err != nil {
		return fmt.Errorf("cannot unmount %s: %w", h.dir, err)
	}
	return nil
}

// The protocol is described in linux/fuse.h and fuse(4). Cache times are zero: nothing is cached.

const (
	opLookup      = 1
	opForget      = 2
	opGetattr     = 3
	opSetattr     = 4
	opReadlink    = 5
	opSymlink     = 6
	opMknod       = 8
	opMkdir       = 9
	opUnlink      = 10
	opRmdir       = 11
	opRename      = 12
	opInit        = 26
	opReaddir     = 28
	opInterrupt   = 36
	opDestroy     = 38
	opBatchForget = 42
	opRename2     = 45
)

type (
	header struct {
		Len, Opcode           uint32
		Unique, Node          uint64
		UID, GID, PID, Unused uint32
	}
	attr struct {
		Ino, Size, Blocks                            uint64
		Atime, Mtime, Ctime                          uint64
		AtimeNsec, MtimeNsec, CtimeNsec, Mode, Nlink uint32
		UID, GID, Rdev, BlockSize, Flags             uint32
	}
	attrOut struct {
		Valid [2]uint64
		Attr  attr
	}
	entryOut struct {
		Node, Generation uint64
		Valid            [3]uint64
		Attr             attr
	}
	initOut struct {
		Major, Minor, MaxReadahead, Flags uint32
		MaxBackground, Congestion         uint16
		MaxWrite, TimeGran                uint32
		Unused                            [9]uint32
	}
	setattrIn struct {
		Valid, _             uint32
		_                    [6]uint64
		_                    [3]uint32
		Mode, _, UID, GID, _ uint32
	}
)

func (h *HangFS) serve() {
	defer close(h.done)
	buf := make([]byte, 64<<10)
	for {
		n, err := h.file.Read(buf)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			h.stopped <- struct{}{}
			<-h.resumed
			continue
		case errors.Is(err, unix.ENOENT): // the caller was killed before we read its request
			continue
		case err != nil: // closed, or unmounted by somebody else
			return
		}
		var in header
		size, err := binary.Decode(buf[:n], binary.NativeEndian, &in)
		if err != nil {
			continue
		}
		switch in.Opcode {
		case opForget, opBatchForget, opInterrupt, opDestroy:
			continue // these have no answer
		}
		body, errno := h.answer(in, buf[size:n])
		if errno != 0 {
			body = nil
		}
		out := binary.NativeEndian.AppendUint32(nil, uint32(16+len(body)))
		out = binary.NativeEndian.AppendUint32(out, uint32(-int32(errno)))
		out = binary.NativeEndian.AppendUint64(out, in.Unique)
		// ENOENT: the caller was killed meanwhile. The next Read returns any other error.
		_, _ = h.file.Write(append(out, body...))
	}
}

func (h *HangFS) answer(in header, body []byte) ([]byte, unix.Errno) {
	n := h.nodes[in.Node]
	if n == nil && in.Opcode != opInit {
		return nil, unix.ESTALE
	}
	switch in.Opcode {
	case opInit:
		return encode(initOut{Major: 7, Minor: 31, MaxWrite: 4096, TimeGran: 1}), 0
	case opLookup:
		return entry(n.entries[names(body)[0]])
	case opGetattr:
		return encode(attrOut{Attr: n.attr}), 0
	case opSetattr:
		return n.setattr(body)
	case opReadlink:
		return []byte(n.target), 0
	case opSymlink:
		made := h.add(unix.S_IFLNK|0o777, in)
		made.target = names(body)[1]
		return n.enter(names(body)[0], made)
	case opMknod: // mode, rdev, umask and padding; the kernel applied the umask
		return n.enter(names(body[16:])[0], h.add(binary.NativeEndian.Uint32(body), in))
	case opMkdir: // mode and umask
		return n.enter(names(body[8:])[0], h.add(unix.S_IFDIR|binary.NativeEndian.Uint32(body), in))
	case opUnlink, opRmdir:
		return n.remove(names(body)[0])
	case opRename:
		return n.rename(h.nodes[binary.NativeEndian.Uint64(body)], names(body[8:]), 0)
	case opRename2:
		return n.rename(h.nodes[binary.NativeEndian.Uint64(body)], names(body[16:]), binary.NativeEndian.Uint32(body[8:]))
	case opReaddir: // handle, offset, size
		return n.list(binary.NativeEndian.Uint64(body[8:]), int(binary.NativeEndian.Uint32(body[16:]))), 0
	}
	// The kernel does not need open, opendir, release, flush, poll, create and access.
	return nil, unix.ENOSYS
}

// names returns the strings of a request, each of which ends with a zero byte.
func names(body []byte) []string {
	var list []string
	for _, b := range bytes.Split(body, []byte{0}) {
		list = append(list, string(b))
	}
	return list
}

func encode(v any) []byte {
	out, err := binary.Append(nil, binary.NativeEndian, v)
	if err != nil {
		panic(err) // our own structs, all of fixed size
	}
	return out
}
