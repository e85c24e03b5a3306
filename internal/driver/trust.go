package driver

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
)

const (
	maxLinks  = 40 // symbolic links in one path (path_resolution(7))
	anyOwner  = "any"
	writeBits = unix.S_IWGRP | unix.S_IWOTH // of an ACL, too: its mask is shown as the group's bits
)

// Trust decides who may stand between us and the driver, as sshd's StrictModes decides it
// for a key file: whoever can replace the socket can be the driver, and the kubelet would
// hand it every volume's secrets. Trusted are root, the owner and our own user.
type Trust struct {
	Owner string // name, number or "any"
}

// Distrust is the error for what is not trusted. Any other error means that it cannot be told.
type Distrust struct {
	Path    string // the directory, link or socket
	Problem string // what is wrong with it
	UID     uint32 // its owner, or the user of the process that listens there
	// Command is what root can run to fix it; empty: there is nothing to run.
	Command []string
	// SocketOwner is the value of socket_owner with which it would be trusted, besides "any";
	// empty: there is none.
	SocketOwner string
}

func (d *Distrust) Error() string {
	var fixes []string
	if len(d.Command) > 0 {
		fixes = append(fixes, fmt.Sprintf("run \"%s\"", safetext.Run(d.Command[0], d.Command[1:]...)))
	}
	if d.SocketOwner != "" {
		fixes = append(fixes, fmt.Sprintf("set socket_owner = %q if that user runs the driver", d.SocketOwner))
	}
	fixes = append(fixes, `set socket_owner = "any" to turn these checks off`)
	return d.Problem + ": " + strings.Join(fixes, ", or ")
}

// untrusted is the finding for an error of Trust. Where nothing can be told the driver is
// Starting: a mismatch would take its registration away.
func untrusted(err error) finding {
	if err == nil {
		return finding{}
	}
	if _, ok := errors.AsType[*Distrust](err); ok {
		return finding{status.Mismatch, err.Error()}
	}
	return finding{status.Starting, err.Error()}
}

// uids are the trusted users. The owner is looked up each time: packages make their users
// when they like.
func (t Trust) uids() ([]uint32, error) {
	trusted := []uint32{0, uint32(os.Geteuid())}
	if t.Owner == "root" {
		return trusted, nil
	}
	uid, err := t.uid(user.Lookup(t.Owner))
	return append(trusted, uid), err
}

// uid takes what looking up the owner gave. Also an unknown user says nothing of the driver:
// the file of users may be cut off while it is written.
func (t Trust) uid(u *user.User, lookup error) (uint32, error) {
	number := t.Owner
	if lookup == nil {
		number = u.Uid
	}
	uid, err := strconv.ParseUint(number, 10, 32)
	if err == nil {
		return uint32(uid), nil
	}
	if _, none := errors.AsType[user.UnknownUserError](lookup); none {
		return 0, fmt.Errorf("there is no user %q on this machine: fix socket_owner", t.Owner)
	}
	return 0, fmt.Errorf("cannot look up the user %q of socket_owner: %w%s", t.Owner, lookup, remedy(lookup))
}

// Listener checks who called listen() on the socket that was connected to. That is the proof;
// the path is only where we looked.
func (t Trust) Listener(path string, peer unixsock.Cred) error {
	if t.Owner == anyOwner {
		return nil
	}
	trusted, err := t.uids()
	if err != nil || slices.Contains(trusted, peer.UID) {
		return err
	}
	return &Distrust{Path: path, UID: peer.UID, SocketOwner: socketOwner(peer.UID),
		Problem: fmt.Sprintf("the process that listens at %s (pid %d) runs as %s, not as %s", path, peer.PID, userName(peer.UID), t.Owner)}
}

// Path checks every directory that is passed on the way to path, through symbolic links too:
// nobody but trusted users may be able to change what the next name points to. A link of
// another user than root is followed only to a directory of that user, so that it cannot
// lead us to a socket that only root can connect to. What does not exist is nobody's.
//
// It blocks for as long as a file system on the way does not answer.
func (t Trust) Path(path string) error {
	if t.Owner == anyOwner {
		return nil
	}
	trusted, err := t.uids()
	if err != nil {
		return err
	}
	var link Distrust // the last link of another user than root
	dir, rest, links := "/", path, 0
	for rest != "" {
		var name string
		name, rest, _ = strings.Cut(rest, "/")
		switch name {
		case "", ".":
			continue
		case "..":
			dir = filepath.Dir(dir) // dir is real, so its parent is its path's
			continue
		}
		next := filepath.Join(dir, name)
		parent, err := unixsock.Lstat(dir)
		if err != nil {
			return notThere(err)
		}
		entry, err := unixsock.Lstat(next)
		if err != nil {
			return notThere(err)
		}
		if d := t.directory(trusted, dir, parent, next, entry); d != nil {
			return d
		}
		switch entry.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			dir = next
		case unix.S_IFLNK:
			target, err := os.Readlink(next)
			if links++; err != nil || links > maxLinks {
				return notThere(err)
			}
			if !slices.Contains(trusted[:2], entry.UID) {
				link.Path, link.UID = next, entry.UID
			}
			if filepath.IsAbs(target) {
				dir = "/"
			}
			rest = target + "/" + rest
		default:
			if !slices.Contains(trusted, entry.UID) {
				return t.owned(next, entry, fmt.Sprintf("%s belongs to %s, not to %s", next, userName(entry.UID), t.Owner))
			}
			if link.Path != "" && parent.UID != link.UID {
				link.Problem = fmt.Sprintf("the symbolic link %s belongs to %s and points to %s, which is not in a directory of that user", link.Path, userName(link.UID), next)
				return &link
			}
			return nil
		}
	}
	return nil
}

// notThere returns nil for what does not exist.
func notThere(err error) error {
	if err == nil || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	return fmt.Errorf("cannot look who owns the way to the driver's socket: %w%s", err, remedy(err))
}

// directory checks one directory and the entry of it that is passed next. In a sticky
// directory, as /tmp, everybody may make files, but only the owner of one, or of the
// directory, may rename or remove it: so there it is enough that the entry is a trusted user's.
func (t Trust) directory(trusted []uint32, dir string, at unixsock.File, next string, entry unixsock.File) error {
	mode := at.Mode & 0o7777
	switch {
	case !slices.Contains(trusted, at.UID):
		return t.owned(dir, at, fmt.Sprintf("the directory %s belongs to %s, who could put another socket in the driver's place", dir, userName(at.UID)))
	case mode&writeBits == 0:
		return nil
	case mode&unix.S_ISVTX == 0:
		return &Distrust{Path: dir, UID: at.UID, Command: []string{"chmod", "go-w", dir},
			Problem: fmt.Sprintf("the directory %s (mode %04o, of %s) may be written by others, who could put another socket in the driver's place", dir, mode, userName(at.UID))}
	case !slices.Contains(trusted, entry.UID):
		return t.owned(next, entry, fmt.Sprintf("everybody may make files in the directory %s (mode %04o), and %s there belongs to %s, not to %s",
			dir, mode, filepath.Base(next), userName(entry.UID), t.Owner))
	}
	return nil
}

// owned is for what belongs to the wrong user. Nobody is told to chown a link, which anybody
// may have made.
func (t Trust) owned(path string, file unixsock.File, problem string) *Distrust {
	d := &Distrust{Path: path, UID: file.UID, SocketOwner: socketOwner(file.UID), Problem: problem}
	if file.Mode&unix.S_IFMT != unix.S_IFLNK {
		d.Command = []string{"chown", t.Owner, path}
	}
	return d
}

// socketOwner is what to write into the file.
func socketOwner(uid uint32) string {
	number := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(number); err == nil {
		return u.Username
	}
	return number
}

// userName is for people: name and number.
func userName(uid uint32) string {
	number := fmt.Sprint("uid ", uid)
	if name := socketOwner(uid); "uid "+name != number {
		return name + " (" + number + ")"
	}
	return number
}
