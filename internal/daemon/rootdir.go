package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/landlock-lsm/go-landlock/landlock"
	ll "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

// ErrRootDir ends the process so that the service manager starts another one for the root_dir in
// the files. The registration sockets below the earlier one are removed.
var ErrRootDir = errors.New("root_dir was changed: the service manager starts another process for it")

// checkRootDir makes a root_dir that cannot replace the one in force an error in the files: it must
// exist and be writable, and the kubelet could not unmount volumes that are in use below the
// earlier one. It is checked again after a grace period.
func (r *configReloader) checkRootDir(ctx context.Context, res *config.Result, c, inForce *config.InForce, volumes *volumeCount) {
	if len(res.Errors) > 0 || c.Kubelet == inForce.Kubelet {
		return
	}
	root, was := c.Kubelet.RootDir, safetext.Word(inForce.Kubelet.RootDir)
	if err := worker.Run(ctx, r.pool.Slot(root, nil), readLimit, func() error { return writable(root) }); err != nil {
		res.RejectRootDir(inForce, fmt.Sprintf("%s cannot replace %s: %v", safetext.Word(root), was, err),
			"create it, and see csi-registrar config check for the drop-in of the unit")
	}
	for _, d := range inForce.Drivers {
		if inUse := volumes.inUse(d.Name); d.Enabled && inUse != "" && !volumes.ignored {
			res.RejectRootDir(inForce, fmt.Sprintf("%s cannot replace %s: %s has %s there, which the kubelet could not unmount", safetext.Word(root), was, d.Name, inUse),
				"it takes effect when they are unmounted, or by csi-registrar reload --force")
		}
	}
	if r.inForce != nil && (r.notifier == nil || !r.options.KeepSockets) && len(res.Errors) == 0 {
		res.RejectRootDir(inForce, fmt.Sprintf("%s cannot replace %s while the daemon runs", safetext.Word(root), was), "restart it")
	}
	if len(res.Errors) > 0 {
		r.next = rate.Earliest(r.next, time.Now().Add(r.grace.Period))
	}
}

// writable checks that the plugins_registry below rootDir can be written, or rootDir if the kubelet
// has not created it yet.
func writable(rootDir string) error {
	err := unix.Access(rootdir.PluginsRegistry(rootDir), unix.W_OK)
	if errors.Is(err, fs.ErrNotExist) {
		err = unix.Access(rootDir, unix.W_OK)
	}
	return err
}

// leaveRootDir withdraws all drivers, so that the process can end. The next one puts c in force.
func (r *configReloader) leaveRootDir(ctx context.Context, c *config.InForce) {
	r.log.Info("root_dir was changed", "from", r.inForce.Kubelet.RootDir, "to", c.Kubelet.RootDir)
	if err := r.agent.Leave(ctx, &config.Config{Kubelet: r.inForce.Kubelet, Log: r.inForce.Log, Drivers: c.Drivers}, ErrRootDir); err != nil {
		r.log.Warn("not all registration sockets below the earlier root_dir are removed", "error", err)
	}
	// so that it is not checked again
	r.note("keep the configuration for the next start", config.SaveLastGood(r.lastGood, c))
	r.left = true
}

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
	if d.notifier == nil || !d.options.KeepSockets || d.options.Getenv(landlockVariable) != "1" {
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
