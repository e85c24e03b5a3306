// Package trust decides which files can be trusted: those that only trusted users can have put
// where they are. It reads and checks files; its callers decide what follows.
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

	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
)

const (
	maxLinks  = 40                          // symbolic links in one path (path_resolution(7))
	writeBits = unix.S_IWGRP | unix.S_IWOTH // an ACL's mask is shown as the group's bits
)

// Rule defines whose files are trusted. The zero Rule trusts every file.
type Rule struct {
	// Owners are the trusted users; messages name the first. Nil: everybody is trusted.
	Owners []uint32
	// Below limits the checks to names below this directory; empty: everything from / on.
	Below string
	// FollowLink makes ReadFile follow a symbolic link at the path. Links on the way to it are
	// always followed.
	FollowLink bool
}

// Error describes why a path is not trusted. Any other error means that the check failed.
type Error struct {
	Path    string // the file, or the directory or symbolic link on the way to it
	Problem string // the rest of a sentence that begins with Path
	// Command fixes it, if root runs it after checking the file. It is zero if no command can, or
	// if another user could make it change another file.
	Command safetext.Command
	Owner   string // the user to trust instead; empty: that would not help
	follows bool   // Command follows a symbolic link at Path
}

func (e *Error) Error() string { return safetext.Word(e.Path) + " " + e.Problem }

// Check checks path, and every directory and symbolic link on the way to it: only trusted users may
// be able to change what the next name refers to. A link of a trusted user other than root and our
// own is followed only to a directory of that user, so that it cannot point to what only root can
// reach. A path that does not exist passes.
//
// Only the mode of directories counts. In a sticky directory such as /tmp everybody can create
// files, but only their owner can rename or remove them, so one on the way passes.
//
// Check blocks for as long as a file system on the way does not answer.
func (r Rule) Check(path string) error {
	if r.Owners == nil {
		return nil
	}
	var (
		link       unixsock.File // the last symbolic link of a user other than root
		parent, at unixsock.File // the last two names of the path
		linkPath   string
	)
	dir, rest, links := "/", path, 0
	// Only root and our own user can change what dir, or linkPath, refers to.
	rootOnly, linkRootOnly := true, true
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
		ours := file.UID == 0 || file.UID == uint32(os.Geteuid()) || !r.covers(next)
		if e := r.checkFile(next, file, file.IsDir() && !(more && file.Mode&unix.S_ISVTX != 0)); e != nil {
			if !rootOnly || !ours && e.follows {
				e.Command = safetext.Command{} // another user may replace the file before it runs
			}
			return e
		}
		if !file.IsLink() {
			dir, parent, at = next, at, file
			rootOnly = rootOnly && ours
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
			link, linkPath, linkRootOnly = file, next, rootOnly
		}
		rootOnly = rootOnly && ours
		if filepath.IsAbs(target) {
			dir = "/"
		}
		if more {
			target += "/" + rest
		}
		rest, more = target, true
	}
	if linkPath != "" && !at.IsDir() && parent.UID != link.UID {
		e := &Error{Path: linkPath,
			Problem: fmt.Sprintf("is a symbolic link of %s and points to %s, which is not in a directory of that user", Who(link.UID), safetext.Word(dir))}
		if linkRootOnly {
			e.Command = safetext.Run("rm", linkPath)
		}
		return e
	}
	return nil
}

// covers reports whether a path is one of those that are checked.
func (r Rule) covers(path string) bool {
	inside, below := strings.CutPrefix(path, strings.TrimSuffix(r.Below, "/")+"/")
	return r.Below == "" || below && inside != ""
}

// checkFile returns why one file is not trusted; nil: it is. A file that is neither opened nor
// connected to, such as a device, passes.
func (r Rule) checkFile(path string, file unixsock.File, modeCounts bool) *Error {
	used := file.IsRegular() || file.IsDir() || file.IsLink() || file.IsSocket()
	switch {
	case r.Owners == nil || !used || !r.covers(path):
		return nil
	case !slices.Contains(r.Owners, file.UID):
		e := &Error{Path: path, Owner: User(file.UID), Command: safetext.Run("chown", "-h", User(r.Owners[0]), path),
			Problem: fmt.Sprintf("belongs to %s, not to %s", Who(file.UID), User(r.Owners[0]))}
		// any user can have created it, so it must not be given to a trusted user
		if file.IsLink() {
			e.Command = safetext.Run("rm", path)
		}
		return e
	case modeCounts && file.Mode&writeBits != 0:
		return &Error{Path: path, Command: safetext.Run("chmod", "go-w", path), follows: true,
			Problem: fmt.Sprintf("may be written by its group or others (mode %04o)", file.Mode&0o7777)}
	}
	return nil
}

// ReadFile reads a file of at most limit bytes that others may have put there. It also returns the
// data with an *Error if the file can be read but is not trusted. It does not check the way to the
// file.
//
// Only a regular file is opened: opening a FIFO blocks, and opening a device can do anything. So
// the file is examined through a descriptor that does not open it (O_PATH), and opened through
// that.
func (r Rule) ReadFile(path string, limit int64) ([]byte, error) {
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
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		return nil, &Error{Path: path, Problem: fmt.Sprintf("is larger than %d MiB", limit>>20)}
	}
	if e := r.checkFile(path, file, true); err == nil && e != nil {
		return data, e
	}
	return data, err
}

// User returns the name of a user, or the number if there is no name.
func User(uid uint32) string {
	number := fmt.Sprint(uid)
	if u, err := user.LookupId(number); err == nil {
		return u.Username
	}
	return number
}

// Who returns a description of a user for people: name and number.
func Who(uid uint32) string {
	number := fmt.Sprint(uid)
	if name := User(uid); name != number {
		return name + " (uid " + number + ")"
	}
	return "uid " + number
}
