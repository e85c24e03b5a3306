package chaos

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/node/rootdir"
)

// foreign is a file that does not belong to the daemon: only the test may remove it.
type foreign struct {
	path   string
	kind   string
	id     fileID
	listen net.Listener // of a live socket
	serve  *grpc.Server // of a sidecar
	mayGo  bool         // a dead socket under a driver's name, which the daemon may sweep
}

// fileID distinguishes a file from an earlier one at the same path or with the same inode number.
type fileID struct {
	dev  uint64
	ino  uint64
	born unix.StatxTimestamp
}

func lookAt(path string) (fileID, uint16, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &st)
	if err != nil {
		return fileID{}, 0, &os.PathError{Op: "statx", Path: path, Err: err}
	}
	return fileID{unix.Mkdev(st.Dev_major, st.Dev_minor), st.Ino, st.Btime}, st.Mode & unix.S_IFMT, nil
}

// Kinds of foreign files.
const (
	aFile      = "file"
	aDirectory = "directory"
	aLink      = "link"
	aMute      = "mute socket"
	aSidecar   = "sidecar"
	aDead      = "dead socket"
)

// makeForeign makes a foreign file under a temporary name in scratch and moves it to path, where
// it may replace an existing file only if replace is true.
func makeForeign(scratch, path, kind string, driver *Driver, replace bool) (*foreign, error) {
	temporary := filepath.Join(scratch, "making")
	f := &foreign{path: path, kind: kind}
	var err error
	switch kind {
	case aFile:
		err = os.WriteFile(temporary, []byte("somebody's"), 0o644)
	case aDirectory:
		err = os.Mkdir(temporary, 0o755)
	case aLink:
		err = os.Symlink(driver.Socket, temporary)
	default:
		var l *net.UnixListener
		l, err = net.ListenUnix("unix", &net.UnixAddr{Name: temporary, Net: "unix"})
		if err == nil {
			l.SetUnlinkOnClose(false)
			f.listen = l
		}
	}
	if err != nil {
		return nil, err
	}
	switch kind {
	case aSidecar:
		f.serve = grpc.NewServer(grpc.ConnectionTimeout(maxSilence))
		registration.RegisterRegistrationServer(f.serve, sidecar{name: driver.name, endpoint: driver.Socket})
		go f.serve.Serve(f.listen) // ends with crash
	case aDead:
		err = f.crash()
	}
	if f.id, _, err = idOf(temporary, err); err == nil {
		flags := uint(unix.RENAME_NOREPLACE)
		if replace {
			flags = 0
			if _, mode, err := lookAt(path); err == nil && (mode == unix.S_IFDIR || kind == aDirectory) {
				flags = unix.RENAME_EXCHANGE // rename cannot replace a file by a directory
			}
		}
		err = unix.Renameat2(unix.AT_FDCWD, temporary, unix.AT_FDCWD, path, flags)
	}
	if rerr := gone(os.Remove(temporary)); rerr != nil || err != nil {
		return nil, errors.Join(err, rerr, f.crash())
	}
	return f, nil
}

func idOf(path string, err error) (fileID, uint16, error) {
	if err != nil {
		return fileID{}, 0, err
	}
	return lookAt(path)
}

// crash closes the listener of a socket, as the end of its process would, and leaves the file.
func (f *foreign) crash() error {
	if f.serve != nil {
		f.serve.Stop()
		f.serve, f.listen = nil, nil
	}
	if f.listen != nil {
		err := f.listen.Close()
		f.listen = nil
		return err
	}
	return nil
}

// missing returns an error text if the file is no longer at its path.
func (f *foreign) missing() string {
	id, _, err := lookAt(f.path)
	switch {
	case err != nil:
		return fmt.Sprintf("the %s of somebody else at %s is gone: %v", f.kind, f.path, err)
	case id != f.id:
		return fmt.Sprintf("the %s of somebody else at %s was replaced", f.kind, f.path)
	}
	return ""
}

// sidecar answers as node-driver-registrar does.
type sidecar struct {
	registration.UnimplementedRegistrationServer
	name, endpoint string
}

func (s sidecar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type: registration.CSIPlugin, Name: s.name, Endpoint: s.endpoint, SupportedVersions: []string{"1.0.0"},
	}, nil
}

func (s sidecar) NotifyRegistrationStatus(context.Context, *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	return &registration.RegistrationStatusResponse{}, nil
}

// foreignAt returns the foreign file at a path, or nil.
func (w *world) foreignAt(path string) *foreign {
	for _, f := range w.foreign {
		if f.path == path {
			return f
		}
	}
	return nil
}

// replace puts a foreign file at the path of a driver's registration socket.
func (w *world) replace(d *Driver, kind string, over bool) error {
	path := w.pathOf(d)
	if w.foreignAt(path) != nil {
		return nil
	}
	w.history.note(d.name, onPath, kind+" came")
	if !over {
		if err := gone(os.Remove(path)); err != nil {
			return err
		}
	}
	f, err := makeForeign(w.scratch, path, kind, d, over)
	if err != nil {
		return whileThere(err)
	}
	w.foreign = append(w.foreign, f)
	return nil
}

// leave removes a foreign file. The process of a socket may leave the dead socket behind.
func (w *world) leave(path string, d *Driver, tidy bool) error {
	f := w.foreignAt(path)
	if f == nil {
		return nil
	}
	w.history.note(d.name, onPath, f.kind+" leaves")
	socket := f.listen != nil
	if err := f.crash(); err != nil {
		return err
	}
	if socket && !tidy {
		f.mayGo = true
		return nil
	}
	why := f.missing()
	w.foreign = slices.DeleteFunc(w.foreign, func(o *foreign) bool { return o == f })
	if why == "" {
		return gone(os.Remove(path))
	}
	if !f.mayGo {
		w.violated("%s", why)
	}
	return nil
}

// bystander puts an unrelated file into one of the directories.
func (w *world) bystander(s Step, d *Driver) error {
	w.made++
	digits := fmt.Sprintf("%08x", w.made)
	places := []struct{ path, kind string }{
		{filepath.Join(w.registry, rootdir.SocketName("other-"+digits)), aDead},
		{filepath.Join(w.registry, "note-"+digits), aFile},
		{filepath.Join(w.registry, "."+digits), aFile},
		{filepath.Join(w.registry, "."+digits), aMute},
		{filepath.Join(w.registry, ".x"+digits), aDead},
		{filepath.Join(w.root, "."+digits), aDirectory},
		{filepath.Join(w.root, "."+digits), aMute},
		{filepath.Join(w.root, "socket-"+digits), aDead},
	}
	p := places[s.A%len(places)]
	f, err := makeForeign(w.scratch, p.path, p.kind, d, false)
	if err != nil {
		return whileThere(err)
	}
	w.foreign = append(w.foreign, f)
	return nil
}

// forgetForeign forgets the foreign files that were removed with the registry directory.
func (w *world) forgetForeign() {
	w.foreign = slices.DeleteFunc(w.foreign, func(f *foreign) bool {
		if !strings.HasPrefix(f.path, w.registry+"/") {
			return false
		}
		if err := f.crash(); err != nil {
			w.say("%v", err)
		}
		return true
	})
	clear(w.otherFrom)
}

// whileThere ignores the errors that the daemon was faster or the directory does not exist.
func whileThere(err error) error {
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	return gone(err)
}

func (w *world) otherPath(d *Driver) string {
	return filepath.Join(w.registry, "other-of-"+d.name+".sock")
}
