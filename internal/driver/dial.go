package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
)

const (
	maxPath = 107 // bytes that a Unix socket's path may have (unix(7))

	// bind comes before listen: a socket that appeared within fresh and refuses is tried
	// again after retryFirst, then twice that, up to retryMost, for retryFor in all. Nothing
	// else tells when listen comes; a dial that is refused costs some microseconds.
	fresh      = 2 * time.Second
	retryFirst = 250 * time.Microsecond
	retryMost  = 4 * time.Millisecond
	retryFor   = time.Second

	// A driver may take longer: while its socket is young it is worth a look each second.
	young     = time.Minute
	lookAgain = time.Second
)

// place tells one file from another at the same path. While a connection to a socket
// lives its inode's number is not given away; the endpoint, to which none is kept, needs
// the time of birth too (ext4 gives the number to the next file at once). It is zero where
// the file system keeps none.
type place struct {
	major, minor uint32
	inode        uint64
	born         unix.StatxTimestamp
	uid          uint32
}

// look tells what is at path, links followed. The time is when it was made or last changed.
func look(path string) (place, os.FileMode, error) {
	at, mode, _, err := stat(path)
	return at, mode, err
}

func stat(path string) (place, os.FileMode, time.Time, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &st)
	if err != nil {
		return place{}, 0, time.Time{}, err
	}
	at := place{major: st.Dev_major, minor: st.Dev_minor, inode: st.Ino, uid: st.Uid}
	if st.Mask&unix.STATX_BTIME != 0 {
		at.born = st.Btime
	}
	var mode os.FileMode
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFSOCK:
		mode = os.ModeSocket
	case unix.S_IFDIR:
		mode = os.ModeDir
	case unix.S_IFREG:
	default:
		mode = os.ModeIrregular
	}
	return at, mode, time.Unix(st.Ctime.Sec, int64(st.Ctime.Nsec)), nil
}

// same tells that a and b are one file, whatever its owner is now.
func (a place) same(b place) bool {
	a.uid, b.uid = 0, 0
	return a == b && a != place{}
}

// dial connects to the socket at path, or tells why it cannot.
func dial(ctx context.Context, path string) (*link, verdict) {
	if len(path) > maxPath {
		return nil, verdict{status.Absent, fmt.Sprintf("the path %s has %d bytes, a Unix socket's path may have %d: move the driver's socket", path, len(path), maxPath)}
	}
	begun := time.Now()
	for delay := retryFirst; ; delay = min(2*delay, retryMost) {
		at, mode, changed, err := stat(path)
		if err != nil {
			return nil, missing(path, err)
		}
		raw, err := new(net.Dialer).DialContext(ctx, "unix", path)
		if err == nil {
			if now, _, err := look(path); err == nil && now == at {
				return newLink(raw.(*net.UnixConn), at)
			}
			raw.Close() // replaced meanwhile: which one we have, nobody knows
			if time.Since(begun) > retryFor {
				return nil, verdict{status.Absent, "the socket " + path + " is replaced again and again: do two drivers use the same path?"}
			}
		} else {
			young := time.Since(changed).Abs() < fresh
			if !errors.Is(err, unix.ECONNREFUSED) || mode != os.ModeSocket || !young || time.Since(begun) > retryFor {
				return nil, refused(path, mode, err)
			}
		}
		select {
		case <-ctx.Done():
			return nil, verdict{status.Absent, "asking was interrupted"}
		case <-time.After(delay):
		}
	}
}

func newLink(raw *net.UnixConn, at place) (*link, verdict) {
	peer, err := unixsock.PeerCred(raw)
	if err != nil {
		raw.Close()
		return nil, verdict{status.Starting, err.Error()}
	}
	return &link{raw: raw, at: at, peer: peer, out: frames{skip: prefaceSize}, onBreak: func() {}}, verdict{}
}

// missing says what is not there: the socket, or which folder on the way.
func missing(path string, err error) verdict {
	switch {
	case errors.Is(err, unix.ENOENT):
		what := "there is nothing at " + path + ": the driver does not run, or listens elsewhere"
		if _, err := os.Lstat(path); err == nil {
			what = path + " is a symbolic link that leads nowhere: the driver does not run, or listens elsewhere"
		}
		for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
			if _, err := os.Stat(dir); !errors.Is(err, unix.ENOENT) {
				return verdict{status.Absent, what}
			}
			what = "the folder " + dir + " does not exist: the driver does not run, or listens elsewhere"
		}
	case errors.Is(err, unix.EACCES):
		return verdict{status.Absent, fmt.Sprintf("no permission to look at %s: a folder on the way is closed to uid %d; see CAP_DAC_OVERRIDE in csi-registrar.service(8)", path, os.Geteuid())}
	case errors.Is(err, unix.ENOTDIR):
		return verdict{status.Absent, fmt.Sprintf("something on the way to %s is not a folder", path)}
	}
	if why := remedy(err); why != "" {
		return verdict{status.Starting, fmt.Sprintf("cannot look at %s: %v%s", path, err, why)}
	}
	return verdict{status.Absent, fmt.Sprintf("cannot look at %s: %v", path, err)}
}

// refused says why what is at path cannot be connected to.
func refused(path string, mode os.FileMode, err error) verdict {
	switch {
	case mode == os.ModeDir:
		return verdict{status.Absent, path + " is a folder, not a socket: mend the driver's socket path"}
	case mode != os.ModeSocket:
		return verdict{status.Absent, path + " is a file, not a socket: mend the driver's socket path, or remove the file"}
	case errors.Is(err, unix.ECONNREFUSED):
		return verdict{status.Absent, "the connection to " + path + " is refused: the socket is there, but nobody listens; the driver ended, or does not listen yet"}
	case errors.Is(err, unix.EACCES):
		return verdict{status.Absent, fmt.Sprintf("no permission to connect to %s as uid %d: its mode or a folder on the way forbids it; see CAP_DAC_OVERRIDE in csi-registrar.service(8)", path, os.Geteuid())}
	case errors.Is(err, unix.EPROTOTYPE):
		return verdict{status.Absent, path + " is a socket, but not a stream socket as gRPC needs"}
	case errors.Is(err, unix.EAGAIN):
		return verdict{status.Starting, "the driver does not accept connections: the queue of " + path + " is full"}
	}
	if why := remedy(err); why != "" {
		return verdict{status.Starting, fmt.Sprintf("cannot connect to the driver: %v%s", err, why)}
	}
	return verdict{status.Absent, fmt.Sprintf("cannot connect to %s: %v", path, err)}
}

// remedy tells what to do where an error says nothing of the driver, but that we, or the
// node, are out of something; empty for any other error. Such a driver is Starting, for it
// may well run: so it is asked again soon, and keeps its registration.
func remedy(err error) string {
	switch {
	case errors.Is(err, unix.EMFILE):
		return "; raise LimitNOFILE= of csi-registrar.service"
	case errors.Is(err, unix.ENFILE):
		return "; the node has no file descriptors left: raise the sysctl fs.file-max"
	case errors.Is(err, unix.ENOMEM), errors.Is(err, unix.ENOBUFS):
		return "; the node is short of memory"
	case errors.Is(err, unix.ENOSPC):
		return "; raise the sysctl fs.epoll.max_user_watches"
	}
	return ""
}
