package driver

import (
	"cmp"
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
	maxLinks   = 40 // symbolic links in one path (path_resolution(7))
	anyOwner   = "any"
	turnItOff  = `, or set socket_owner = "any" to turn these checks off`
	writeBits  = unix.S_IWGRP | unix.S_IWOTH // of an ACL, too: its mask stands in the group's bits
	permission = 0o7777
)

// trust decides who may stand between us and the driver, as sshd's StrictModes decides it
// for a key file: whoever can replace the socket can be the driver, and the kubelet would
// hand it every volume's secrets. Trusted are root, the configured owner and our own user.
type trust struct {
	owner string // name, number or "any"
}

func (t trust) off() bool { return t.owner == anyOwner }

// uids are the trusted users. The owner is looked up each time: packages make their users
// when they like. Where that cannot be done now, the driver is Starting: a mismatch would
// take its registration away.
func (t trust) uids() ([]uint32, verdict) {
	trusted := []uint32{0, uint32(os.Geteuid())}
	if t.owner == "root" {
		return trusted, verdict{}
	}
	uid, v := t.uid(user.Lookup(t.owner))
	if v.driver != "" {
		return nil, v
	}
	return append(trusted, uid), verdict{}
}

// uid takes what looking up the owner gave.
func (t trust) uid(u *user.User, lookup error) (uint32, verdict) {
	number := t.owner
	if lookup == nil {
		number = u.Uid
	}
	uid, err := strconv.ParseUint(number, 10, 32)
	if err == nil {
		return uint32(uid), verdict{}
	}
	if _, none := errors.AsType[user.UnknownUserError](lookup); none {
		return 0, verdict{status.Mismatch, fmt.Sprintf("there is no user %q on this machine: mend socket_owner", t.owner)}
	}
	return 0, verdict{status.Starting, fmt.Sprintf("cannot look up the user %q of socket_owner: %v%s", t.owner, cmp.Or(lookup, err), remedy(lookup))}
}

func mistrust(why string) verdict { return verdict{status.Mismatch, why} }

// listener checks who called listen() on the socket that we are connected to. That is the
// proof; the path is only where we looked.
func (t trust) listener(path string, peer unixsock.Cred) verdict {
	if t.off() {
		return verdict{}
	}
	trusted, v := t.uids()
	if v.driver != "" || slices.Contains(trusted, peer.UID) {
		return v
	}
	return mistrust(fmt.Sprintf("the process that listens at %s (pid %d) runs as %s, not as %s: set socket_owner = %q if that is right%s",
		path, peer.PID, userName(peer.UID), t.owner, socketOwner(peer.UID), turnItOff))
}

// path checks every folder that is passed on the way to path, through symbolic links too:
// nobody but trusted users may be able to change what the next name leads to. It returns
// what is wrong and how to mend it. What does not exist is nobody's.
func (t trust) path(path string) verdict {
	if t.off() {
		return verdict{}
	}
	trusted, v := t.uids()
	if v.driver != "" {
		return v
	}
	dir, rest, links := "/", path, 0
	var folder unix.Stat_t // of known: each is looked at once
	known := ""
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
		var entry unix.Stat_t
		next := filepath.Join(dir, name)
		if known != dir && unix.Lstat(dir, &folder) != nil || unix.Lstat(next, &entry) != nil {
			return verdict{}
		}
		known = dir
		if why := t.folder(trusted, dir, &folder, next, &entry); why != "" {
			return mistrust(why)
		}
		switch entry.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			dir, known, folder = next, next, entry
		case unix.S_IFLNK:
			target, err := os.Readlink(next)
			if links++; err != nil || links > maxLinks {
				return verdict{}
			}
			if filepath.IsAbs(target) {
				dir = "/"
			}
			rest = target + "/" + rest
		default:
			if !slices.Contains(trusted, entry.Uid) {
				return mistrust(fmt.Sprintf("%s belongs to %s, not to %s: %s", next, userName(entry.Uid), t.owner, t.mend(next, entry.Uid)))
			}
			return verdict{}
		}
	}
	return verdict{}
}

// folder checks one folder and the entry of it that is passed next. In a sticky folder,
// as /tmp, everybody may make files, but only the owner of one, or of the folder, may
// rename or remove it: so there it is enough that the entry is a trusted user's.
func (t trust) folder(trusted []uint32, dir string, folder *unix.Stat_t, next string, entry *unix.Stat_t) string {
	switch {
	case !slices.Contains(trusted, folder.Uid):
		return fmt.Sprintf("the folder %s belongs to %s, who could put another socket in the driver's place: %s", dir, userName(folder.Uid), t.mend(dir, folder.Uid))
	case folder.Mode&writeBits == 0:
		return ""
	case folder.Mode&unix.S_ISVTX == 0:
		return fmt.Sprintf("the folder %s (mode %04o, of %s) may be written by others, who could put another socket in the driver's place: run \"chmod go-w %s\"%s",
			dir, folder.Mode&permission, userName(folder.Uid), quote(dir), turnItOff)
	case !slices.Contains(trusted, entry.Uid):
		return fmt.Sprintf("everybody may make files in the folder %s (mode %04o), and %s there belongs to %s, not to %s: %s",
			dir, folder.Mode&permission, filepath.Base(next), userName(entry.Uid), t.owner, t.mend(next, entry.Uid))
	}
	return ""
}

func (t trust) mend(path string, uid uint32) string {
	return fmt.Sprintf("run \"chown %s %s\", or set socket_owner = %q if that user runs the driver%s", t.owner, quote(path), socketOwner(uid), turnItOff)
}

// userName is for people: name and number.
func userName(uid uint32) string {
	number := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(number); err == nil {
		return fmt.Sprintf("%s (uid %d)", u.Username, uid)
	}
	return "uid " + number
}

// socketOwner is what to write into the file.
func socketOwner(uid uint32) string {
	number := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(number); err == nil {
		return u.Username
	}
	return number
}

// quote makes a path safe to paste into a shell.
func quote(path string) string { return safetext.ShellWord(path) }
