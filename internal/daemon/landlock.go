package daemon

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/landlock-lsm/go-landlock/landlock"
	ll "github.com/landlock-lsm/go-landlock/landlock/syscall"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/worker"
)

// landlockVariable is set to 1 in the unit. Landlock cannot be lifted, and a directory that is
// recreated is outside of it: only another process, which the service manager starts, can write
// there.
const landlockVariable = "CSI_REGISTRAR_LANDLOCK"

// minLandlock is the first ABI with which files can be renamed between directories.
const minLandlock = 2

// Writable returns the directories in which the daemon changes files, below runDir and the
// kubelet's root directories. It creates the directory of the endpoint links in the first one, for
// a daemon outside of the unit's sandbox. It blocks for as long as the file system does not answer.
func Writable(runDir string, rootDirs ...string) []string {
	dirs := []string{stateDir(runDir), filepath.Join(runDir, "registrations")}
	for _, dir := range dirs { // a unit that was edited may lack RuntimeDirectory=
		_ = os.MkdirAll(dir, 0o700)
	}
	for i, root := range rootDirs {
		links := rootdir.EndpointLinks(root)
		if i == 0 {
			_ = os.Mkdir(filepath.Dir(links), 0o750)
			_ = os.Mkdir(links, 0o750)
		}
		dirs = append(dirs, rootdir.PluginsRegistry(root), links)
	}
	return slices.DeleteFunc(dirs, func(dir string) bool { _, err := os.Stat(dir); return err != nil })
}

// Confine lets this process, for as long as it runs, change files only in dirs, whatever is mounted
// where, and on Linux 6.12 signal no other process. It returns the version of the kernel's
// Landlock; less than minLandlock: nothing was restricted. Reading and connecting are not
// restricted: drivers' sockets may be anywhere.
//
// All threads have to take part, so it never returns while one waits for a file system that does
// not answer.
func Confine(dirs ...string) (abi int, err error) {
	if abi, err = ll.LandlockGetABIVersion(); err != nil || abi < minLandlock {
		return 0, err
	}
	const writing = ll.AccessFSWriteFile | ll.AccessFSTruncate | ll.AccessFSRemoveDir | ll.AccessFSRemoveFile | ll.AccessFSMakeChar |
		ll.AccessFSMakeDir | ll.AccessFSMakeReg | ll.AccessFSMakeSock | ll.AccessFSMakeFifo | ll.AccessFSMakeBlock | ll.AccessFSMakeSym | ll.AccessFSRefer
	// BestEffort leaves out what the ABI lacks; where it lacks AccessFSRefer, everything.
	config := landlock.Config{HandledAccessFS: writing, Scoped: ll.ScopeSignal | ll.ScopeAbstractUnixSocket}.BestEffort()
	if err := config.Restrict(landlock.PathAccess(writing, dirs...)); err != nil {
		return 0, err
	}
	return abi, nil
}

// confine restricts the process where the unit asks for it, before anything can hang.
func (d *daemon) confine(ctx context.Context, rootDirs ...string) {
	if !d.asksForLandlock() {
		return
	}
	slot := d.pool.Slot(rootdir.PluginsRegistry(rootDirs[0]), nil)
	dirs, err := worker.Do(ctx, slot, time.Second, func() []string { return Writable(d.options.runDir(), rootDirs...) }, nil)
	if stuck := d.pool.Stuck(); err == nil && len(stuck) > 0 {
		err = &worker.NotAnswering{Path: stuck[0].Path}
	}
	if len(d.handed.control) == 0 { // it is created there
		dirs = append(dirs, d.options.runDir())
	}
	if err == nil {
		d.landlock, err = Confine(dirs...)
	}
	if d.landlock == 0 {
		d.log.Info("Landlock is not in force: what is mounted over root_dir later can be written until this process ends", "error", err)
		return
	}
	d.log.Info("Landlock is in force", "abi", d.landlock)
}

// asksForLandlock reports whether the process runs in a unit that wants it to be confined.
func (d *daemon) asksForLandlock() bool {
	return d.notifier != nil && d.options.KeepSockets && d.options.Getenv(landlockVariable) == "1"
}
