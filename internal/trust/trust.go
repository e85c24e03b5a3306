// Package trust decides which files are believed: those that nobody but trusted users can have
// put where they are. It reads and checks files; what follows from that is for its callers to say.
package trust

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/unixsock"
)

const (
	maxLinks  = 40                          // symbolic links in one path (path_resolution(7))
	writeBits = unix.S_IWGRP | unix.S_IWOTH // of an ACL, too: its mask is shown as the group's bits
)

// Rule says whose files are believed. The zero Rule believes every file.
type Rule struct {
	// Owners are the trusted users; messages name the first. Nil: everybody is trusted.
	Owners []uint32
	// Below: only what is below this directory is checked; empty: everything from / on.
	Below string
	// FollowLink: a symbolic link at the path of a file to read is followed, as those on the
	// way to it always are.
	FollowLink bool
}

// Error is what speaks against a path. Any other error means that it could not be found out.
type Error struct {
	Path    string           // the file, or the directory or symbolic link on the way to it
	Problem string           // what is wrong with it, as the rest of a sentence that begins with Path
	Command safetext.Command // what root can run to fix it, after a look at it; the zero Command: nothing
	Owner   string           // the user, by name or number, who would have to be trusted; empty: that would not help
}

func (e *Error) Error() string { return safetext.Word(e.Path) + " " + e.Problem }

// Check checks path, and every directory and symbolic link on the way to it: nobody but trusted
// users may be able to change what the next name points to. A link of a trusted user other than
// root and our own is followed only to a directory of that user, so that it cannot lead us to what
// only root can reach. What does not exist is nobody's.
//
// The mode counts only of directories. In a sticky one, as /tmp, everybody may make files, but only
// the owner of one may rename or remove it, so on the way that is good enough.
//
// It blocks for as long as a file system on the way does not answer.
func (r Rule) Check(path string) error {
	if r.Owners == nil {
		return nil
	}
	var (
		link, parent, at unixsock.File // the last link of another user than root; the last two names of the way
		linkPath         string
	)
	dir, rest, links := "/", path, 0
	if inside, ok := strings.CutPrefix(path, r.Below+"/"); ok && r.Below != "" {
		dir, rest = r.Below, inside
	}
	for more := true; more; {
		var name string
		name, rest, more = strings.Cut(rest, "/")
		next := filepath.Join(dir, name) // dir is real, so its parent is its path's
		file, err := unixsock.Lstat(next)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
			return nil
		}
		if err != nil {
			return err
		}
		if e := r.judge(next, file, file.IsDir() && !(more && file.Mode&unix.S_ISVTX != 0)); e != nil {
			return e
		}
		if !file.IsLink() {
			dir, parent, at = next, at, file
			continue
		}
		target, err := os.Readlink(next)
		if links++; links > maxLinks {
			err = &fs.PathError{Op: "readlink", Path: next, Err: unix.ELOOP}
		}
		if err != nil {
			return err
		}
		if file.UID != 0 && file.UID != uint32(os.Geteuid()) {
			link, linkPath = file, next
		}
		if filepath.IsAbs(target) {
			dir = "/"
		}
		if more {
			target += "/" + rest
		}
		rest, more = target, true
	}
	if linkPath != "" && !at.IsDir() && parent.UID != link.UID {
		return &Error{Path: linkPath, Command: safetext.Run("rm", linkPath),
			Problem: fmt.Sprintf("is a symbolic link of %s and points to %s, which is not in a directory of that user", Who(link.UID), safetext.Word(dir))}
	}
	return nil
}

// judge returns what speaks against one file, nil if nothing does. What nobody opens or connects
// to, as a device, is let pass.
func (r Rule) judge(path string, file unixsock.File, modeCounts bool) *Error {
	inside, below := strings.CutPrefix(path, strings.TrimSuffix(r.Below, "/")+"/")
	used := file.IsRegular() || file.IsDir() || file.IsLink() || file.IsSocket()
	switch {
	case r.Owners == nil || !used || r.Below != "" && (!below || inside == ""):
		return nil
	case !slices.Contains(r.Owners, file.UID):
		e := &Error{Path: path, Owner: User(file.UID), Command: safetext.Run("chown", User(r.Owners[0]), path),
			Problem: fmt.Sprintf("belongs to %s, not to %s", Who(file.UID), User(r.Owners[0]))}
		if file.IsLink() { // anybody may have made it, so nobody is to give it to a trusted user
			e.Command = safetext.Run("rm", path)
		}
		return e
	case modeCounts && file.Mode&writeBits != 0:
		return &Error{Path: path, Command: safetext.Run("chmod", "go-w", path),
			Problem: fmt.Sprintf("may be written by its group or others (mode %04o)", file.Mode&0o7777)}
	}
	return nil
}

// ReadFile reads a file of at most most bytes that others may have put there. The data is given
// with an *Error, too, if the file could be read and is not to be trusted. The way to it is not
// checked.
//
// Only a regular file is opened: opening a FIFO waits, and opening a device can do anything. So it
// is looked at through a descriptor that does not open it (O_PATH), and opened through that.
func (r Rule) ReadFile(path string, most int64) ([]byte, error) {
	flags := unix.O_PATH
	if !r.FollowLink {
		flags |= unix.O_NOFOLLOW
	}
	held, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return nil, err
	}
	defer held.Close()
	itself := fmt.Sprintf("/proc/self/fd/%d", held.Fd())
	file, err := unixsock.Stat(itself)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errors.New("/proc is not mounted")
	case err != nil:
		return nil, err
	case !file.IsRegular():
		return nil, &Error{Path: path, Problem: "is not a regular file"}
	}
	f, err := os.Open(itself)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(data)) > most {
		return nil, &Error{Path: path, Problem: fmt.Sprintf("is larger than %d MiB", most>>20)}
	}
	if e := r.judge(path, file, true); err == nil && e != nil {
		return data, e
	}
	return data, err
}

// User is the name of a user, or the number where there is no name.
func User(uid uint32) string {
	number := fmt.Sprint(uid)
	if u, err := user.LookupId(number); err == nil {
		return u.Username
	}
	return number
}

// Who names a user for people: name and number.
func Who(uid uint32) string {
	number := fmt.Sprint(uid)
	if name := User(uid); name != number {
		return name + " (uid " + number + ")"
	}
	return "uid " + number
}
