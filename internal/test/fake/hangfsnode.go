package fake

import (
	"encoding/binary"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

type node struct {
	attr    attr
	target  string           // of a symbolic link
	entries map[string]*node // of a directory
}

func (h *HangFS) add(mode uint32, in header) *node {
	h.last++ // FUSE requires that the root is number 1
	n := &node{attr: attr{Ino: h.last, Mode: mode, Nlink: 1, UID: in.UID, GID: in.GID, BlockSize: 4096}}
	if mode&unix.S_IFMT == unix.S_IFDIR {
		n.entries = map[string]*node{}
	}
	n.changed()
	n.attr.Mtime, n.attr.MtimeNsec = n.attr.Ctime, n.attr.CtimeNsec
	h.nodes[h.last] = n
	return n
}

func (n *node) changed() {
	now := time.Now()
	n.attr.Ctime, n.attr.CtimeNsec = uint64(now.Unix()), uint32(now.Nanosecond())
	if n.entries != nil {
		n.attr.Mtime, n.attr.MtimeNsec = n.attr.Ctime, n.attr.CtimeNsec
	}
}

func (n *node) enter(name string, made *node) ([]byte, unix.Errno) {
	if n.entries[name] != nil {
		return nil, unix.EEXIST
	}
	n.entries[name] = made
	n.changed()
	return entry(made)
}

func (n *node) remove(name string) ([]byte, unix.Errno) {
	switch gone := n.entries[name]; {
	case gone == nil:
		return nil, unix.ENOENT
	case len(gone.entries) > 0:
		return nil, unix.ENOTEMPTY
	}
	delete(n.entries, name)
	n.changed()
	return nil, 0
}

func (n *node) rename(to *node, names []string, flags uint32) ([]byte, unix.Errno) {
	from, old := n.entries[names[0]], to.entries[names[1]]
	switch {
	case from == nil, flags&unix.RENAME_EXCHANGE != 0 && old == nil:
		return nil, unix.ENOENT
	case flags&unix.RENAME_NOREPLACE != 0 && old != nil:
		return nil, unix.EEXIST
	case flags&unix.RENAME_EXCHANGE == 0 && old != nil && len(old.entries) > 0:
		return nil, unix.ENOTEMPTY
	}
	delete(n.entries, names[0])
	if flags&unix.RENAME_EXCHANGE != 0 {
		n.entries[names[0]] = old
	}
	to.entries[names[1]] = from
	n.changed()
	to.changed()
	from.changed()
	return nil, 0
}

func (n *node) setattr(body []byte) ([]byte, unix.Errno) {
	var in setattrIn
	if _, err := binary.Decode(body, binary.NativeEndian, &in); err != nil {
		return nil, unix.EINVAL
	}
	const mode, uid, gid = 1, 2, 4
	if in.Valid&mode != 0 {
		n.attr.Mode = n.attr.Mode&unix.S_IFMT | in.Mode&^unix.S_IFMT
	}
	if in.Valid&uid != 0 {
		n.attr.UID = in.UID
	}
	if in.Valid&gid != 0 {
		n.attr.GID = in.GID
	}
	n.changed()
	return encode(attrOut{Attr: n.attr}), 0
}

// list returns the answer to one readdir request. Offsets are node numbers, so that no entry is
// skipped if others are removed between two requests.
func (n *node) list(offset uint64, size int) []byte {
	var out []byte
	for _, name := range slices.SortedFunc(maps.Keys(n.entries), func(a, b string) int {
		return int(n.entries[a].attr.Ino) - int(n.entries[b].attr.Ino)
	}) {
		a := n.entries[name].attr
		if a.Ino <= offset {
			continue
		}
		e := binary.NativeEndian.AppendUint64(nil, a.Ino)
		e = binary.NativeEndian.AppendUint64(e, a.Ino) // offset of the next entry
		e = binary.NativeEndian.AppendUint32(e, uint32(len(name)))
		e = binary.NativeEndian.AppendUint32(e, a.Mode>>12)
		e = append(e, name...)
		e = append(e, make([]byte, -len(e)&7)...)
		if len(out)+len(e) > size {
			break
		}
		out = append(out, e...)
	}
	return out
}

func entry(n *node) ([]byte, unix.Errno) {
	if n == nil {
		return nil, unix.ENOENT
	}
	return encode(entryOut{Node: n.attr.Ino, Attr: n.attr}), 0
}
