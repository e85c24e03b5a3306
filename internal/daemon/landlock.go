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
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

// landlockVariable is set to 1 in the unit. Landlock cannot be lifted, and a directory that is
// recreated is outside of it: only another process, which the service manager starts, can write
// there.
const landlockVariable = "CSI_REGISTRAR_LANDLOCK"

// PrepareWritable returns the directories in which the daemon changes files, below runDir and the
// kubelet's root directories. It creates the former. It blocks for as long as the file system does
// not answer.
func PrepareWritable(runDir string, rootDirs ...string) []string {
	dirs := []string{stateDir(runDir), filepath.Join(runDir, "registrations")}
	for _, dir := range dirs { // a unit that was edited may lack RuntimeDirectory=
		_ = os.MkdirAll(dir, 0o700)
	}
	for _, root := range rootDirs {
		dirs = append(dirs, rootdir.PluginsRegistry(root))
	}
	return slices.DeleteFunc(dirs, func(dir string) bool { _, err := os.Stat(dir); return err != nil })
}

// Confine lets this process, for as long as it runs, change files only in dirs, whatever is mounted
// where, and on Linux 6.12 signal no other process. It returns the version of the kernel's
// Landlock; zero: nothing was restricted. Reading and connecting are not restricted: drivers'
// sockets may be anywhere. Landlock always refuses to move files between directories.
//
// All threads have to take part, so it never returns while one waits for a file system that does
// not answer.
func Confine(dirs ...string) (abi int, err error) {
	if abi, err = ll.LandlockGetABIVersion(); err != nil {
		return 0, err
	}
	const writing = ll.AccessFSWriteFile | ll.AccessFSTruncate | ll.AccessFSRemoveDir | ll.AccessFSRemoveFile | ll.AccessFSMakeChar |
		ll.AccessFSMakeDir | ll.AccessFSMakeReg | ll.AccessFSMakeSock | ll.AccessFSMakeFifo | ll.AccessFSMakeBlock | ll.AccessFSMakeSym
	// BestEffort leaves out what the ABI lacks.
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
	type prepared struct {
		dirs     []string
		registry unixsock.File
	}
	registry := rootdir.PluginsRegistry(rootDirs[0])
	p, err := worker.Do(ctx, d.pool.Slot(registry, nil), time.Second, func() (p prepared) {
		p.registry, _ = unixsock.Stat(registry) // zero if there is none
		p.dirs = PrepareWritable(d.options.runDir(), rootDirs...)
		return p
	}, nil)
	if stuck := d.pool.Stuck(); err == nil && len(stuck) > 0 {
		err = &worker.NotAnswering{Path: stuck[0].Path}
	}
	if len(d.handed.control) == 0 { // it is created there
		p.dirs = append(p.dirs, d.options.runDir())
	}
	if err == nil {
		d.landlock, err = Confine(p.dirs...)
		d.writable = p.registry.FileID
	}
	if d.landlock == 0 {
		d.log.Debug("Landlock is not in force: what is mounted over root_dir later can be written until this process ends", "error", err)
	}
}

// asksForLandlock reports whether the process runs in a unit that wants it to be confined.
func (d *daemon) asksForLandlock() bool {
	return d.notifier != nil && d.options.KeepSockets && d.options.Getenv(landlockVariable) == "1"
}
