// Package sockdiag counts the connections that a Unix socket has accepted, by asking the kernel
// (sock_diag(7)).
package sockdiag

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Constants of linux/unix_diag.h; golang.org/x/sys/unix does not have them.
const (
	sockDiagByFamily = 20   // SOCK_DIAG_BY_FAMILY
	showVFS          = 0x02 // UDIAG_SHOW_VFS
	showQueue        = 0x10 // UDIAG_SHOW_RQLEN
	attributeVFS     = 1    // UNIX_DIAG_VFS
	attributeQueue   = 4    // UNIX_DIAG_RQLEN
	established      = 1    // TCP_ESTABLISHED
	listening        = 10   // TCP_LISTEN
	requestBytes     = 24   // struct unix_diag_req
	answerBytes      = 16   // struct unix_diag_msg
	replyBuffer      = 64 << 10
)

// Connections counts the open connections that the socket at path has accepted, and those in its
// queue. It sees only connections that were made in the network namespace of this process; the
// kubelet is in that of the host.
func Connections(path string) (int, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return 0, &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return 0, fmt.Errorf("%s is not a socket", path)
	}
	// An accepted socket has its listener's file. The kernel reports the lower half of the inode
	// number, and its internal device number, with 20 bits for the minor number.
	inode := uint32(st.Ino)
	device := unix.Major(st.Dev)<<20 | unix.Minor(st.Dev)
	count := 0
	err := dump(func(s socket) {
		switch {
		case s.inode != inode || s.device != device:
		case s.state == listening:
			count += int(s.queue) // a connection in the queue is not in the list yet
		default:
			count++
		}
	})
	if err != nil {
		return 0, fmt.Errorf("cannot list the connections of %s: %w", path, err)
	}
	return count, nil
}

// socket is a Unix socket with a file that is connected or listens.
type socket struct {
	inode, device uint32
	state         byte
	queue         uint32 // of one that listens: connections that are not accepted
}

// dump calls found for each such socket.
func dump(found func(socket)) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	request := make([]byte, unix.NLMSG_HDRLEN+requestBytes)
	order := binary.NativeEndian
	order.PutUint32(request, uint32(len(request)))
	order.PutUint16(request[4:], sockDiagByFamily)
	order.PutUint16(request[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	body := request[unix.NLMSG_HDRLEN:]
	body[0] = unix.AF_UNIX
	order.PutUint32(body[4:], 1<<established|1<<listening)
	order.PutUint32(body[12:], showVFS|showQueue)
	if err := unix.Sendto(fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buffer := make([]byte, replyBuffer)
	for {
		n, _, err := unix.Recvfrom(fd, buffer, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		messages, err := syscall.ParseNetlinkMessage(buffer[:n])
		if err != nil {
			return err
		}
		for _, m := range messages {
			switch m.Header.Type {
			case unix.NLMSG_DONE:
				return nil
			case unix.NLMSG_ERROR:
				return unix.Errno(-int32(order.Uint32(m.Data))) // struct nlmsgerr
			}
			if len(m.Data) > answerBytes {
				found(parse(m.Data))
			}
		}
	}
}

// parse reads a struct unix_diag_msg and its attributes.
func parse(data []byte) (s socket) {
	order := binary.NativeEndian
	s.state = data[2]
	for attributes := data[answerBytes:]; len(attributes) >= unix.SizeofRtAttr; {
		size, kind := int(order.Uint16(attributes)), order.Uint16(attributes[2:])
		if size < unix.SizeofRtAttr || size > len(attributes) {
			break
		}
		switch value := attributes[unix.SizeofRtAttr:size]; {
		case len(value) < 8:
		case kind == attributeVFS:
			s.inode, s.device = order.Uint32(value), order.Uint32(value[4:])
		case kind == attributeQueue:
			s.queue = order.Uint32(value)
		}
		aligned := (size + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1)
		attributes = attributes[min(aligned, len(attributes)):]
	}
	return s
}
