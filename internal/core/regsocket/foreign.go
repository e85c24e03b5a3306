package kubelet

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

const (
	scanWait   = 300 * time.Millisecond // how long a publication waits for a scan
	scanDelay  = time.Second            // from a hint to its scan, which then covers later hints
	scanAgain  = 30 * time.Second       // until a scan for changes that cause no hint
	askTime    = time.Second            // for one socket: the kubelet's own for GetInfo (v1.36)
	maxQueries = 64                     // sockets that are asked at a time
)

// foreignSockets are the sockets of other registrars in the plugins_registry. Of two sockets with
// the same driver the kubelet refuses one; with older kubelets the removal of one deregisters the
// other. The answer of a socket is remembered for as long as the socket is the same.
type foreignSockets struct {
	r    *Registry
	wake chan struct{} // there are requests

	mu    sync.Mutex
	next  chan struct{}            // closed at the end of the next scan that begins
	found map[string]foreignSocket // by path; changed by update
}

// foreignSocket is what a socket of another registrar answered.
type foreignSocket struct {
	path        string
	file        unixsock.File
	driver      string    // the driver that it serves; empty: none, or not known
	server      string    // the process that listens, for messages
	silentSince time.Time // when it did not answer; zero: it did
}

// run scans until ctx is done: at once for a request, after a delay for a hint.
func (fs *foreignSockets) run(ctx context.Context) {
	var again <-chan time.Time
	var names temporaryNames
	for {
		select {
		case <-ctx.Done():
			return
		case <-fs.wake:
		case <-again:
		case <-fs.r.entries.Hints():
			select {
			case <-ctx.Done():
				return
			case <-fs.wake:
			case <-time.After(scanDelay):
			}
		}
		fs.scan(ctx)
		names = fs.r.removeTemporary(ctx, names)
		switch again = nil; {
		case names.young():
			again = time.After(temporaryFor)
		case len(names) > 0, fs.mayChange():
			again = time.After(scanAgain)
		}
	}
}

// mayChange reports whether a socket may change without a hint: it did not answer, or it serves one
// of our drivers, and then its file stays when its process is killed.
func (fs *foreignSockets) mayChange() bool {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for _, f := range fs.found {
		if !f.silentSince.IsZero() || fs.r.driverSocket(f.driver) != nil {
			return true
		}
	}
	return false
}

// request starts a scan, and returns a channel that is closed when it has ended.
func (fs *foreignSockets) request() <-chan struct{} {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	select {
	case fs.wake <- struct{}{}:
	default:
	}
	return fs.next
}

// scan asks the sockets in the directory.
func (fs *foreignSockets) scan(ctx context.Context) {
	fs.mu.Lock()
	done, found := fs.next, maps.Clone(fs.found)
	fs.next = make(chan struct{})
	fs.mu.Unlock()
	defer close(done)
	host := fs.r.o.Host
	slot := fs.r.o.Pool.Slot(fs.r.dir.path, fs.r.entries.Hint)
	paths, err := worker.Do(ctx, slot, askTime, func() []string { return host.Sockets(fs.r.dir.path) }, nil)
	if err != nil {
		return // the slot gives a hint when the file system answers
	}
	paths = slices.DeleteFunc(paths, func(path string) bool { return fs.r.socketAt(path) != nil })
	for path, before := range found {
		if !slices.Contains(paths, path) {
			fs.update(before, foreignSocket{path: path})
		}
	}
	var queries sync.WaitGroup
	slots := make(chan struct{}, maxQueries)
	for _, path := range paths {
		before := found[path]
		before.path = path
		slots <- struct{}{}
		queries.Go(func() {
			defer func() { <-slots }()
			// The Slot gives a hint when an abandoned call has returned.
			slot := fs.r.o.Pool.Slot(path, fs.r.entries.Hint)
			if now, err := worker.Do(ctx, slot, askTime+scanWait, func() foreignSocket { return fs.ask(ctx, before) }, nil); err == nil {
				fs.update(before, now)
			}
		})
	}
	queries.Wait()
}

// update records an answer and gives a hint to the Sockets that it concerns.
func (fs *foreignSockets) update(before, now foreignSocket) {
	fs.mu.Lock()
	fs.found[now.path] = now
	if now.file == (unixsock.File{}) {
		delete(fs.found, now.path)
	}
	fs.mu.Unlock()
	if before.driver == now.driver && before.file.FileID == now.file.FileID {
		return
	}
	for _, driver := range []string{before.driver, now.driver} {
		if s := fs.r.driverSocket(driver); s != nil {
			s.watch.Hint()
		}
	}
}

// ask finds out which driver a socket serves. The answer before is valid while the socket is the
// same.
func (fs *foreignSockets) ask(ctx context.Context, before foreignSocket) foreignSocket {
	now, host := foreignSocket{path: before.path}, fs.r.o.Host
	file, err := host.Stat(now.path)
	if err != nil || !file.IsSocket() {
		return now
	}
	now.file = file
	valid := file == before.file && (before.silentSince.IsZero() || time.Since(before.silentSince) < scanAgain)
	// A registrar that is killed leaves its socket.
	if valid && fs.r.driverSocket(before.driver) != nil {
		live, _, _ := host.Probe(ctx, now.path)
		valid = live == unixsock.Live
	}
	if valid {
		return before
	}
	limited, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	info, server, err := host.GetInfo(limited, now.path)
	switch {
	case err != nil:
		now.silentSince = time.Now()
	case info.Type == registerapi.CSIPlugin && status.CheckName(info.Name) == nil:
		now.driver, now.server = info.Name, server.String()
	}
	return now
}

// serving returns the sockets that serve the driver.
func (fs *foreignSockets) serving(driver string) (found []foreignSocket) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for path, f := range fs.found {
		if f.driver == driver && fs.r.socketAt(path) == nil { // it may have become ours since
			found = append(found, f)
		}
	}
	slices.SortFunc(found, func(a, b foreignSocket) int { return cmp.Compare(a.path, b.path) })
	return found
}

// check returns a ConflictError if another live socket than our own serves the driver. Our own
// file under another name, to which somebody renamed it, is removed. A socket that answers
// later than scanWait is only shown in Look.
func (fs *foreignSockets) check(ctx context.Context, driver string, own unixsock.FileID) error {
	select {
	case <-fs.request():
	case <-time.After(scanWait):
	case <-ctx.Done():
	}
	for _, f := range fs.serving(driver) {
		if f.file.FileID != own {
			return ConflictError(fmt.Sprintf("%s is already served to the kubelet at %q by %s: stop that registrar (a node-driver-registrar sidecar of the driver?), or remove the driver here", driver, f.path, f.server))
		}
		if _, err := fs.r.o.Host.RemoveFile(f.path, own); err != nil { // a link to it stays
			return fmt.Errorf("cannot remove our renamed registration socket: %w", err)
		}
		fs.update(f, foreignSocket{path: f.path})
	}
	return nil
}

// describe returns a message about the other sockets that serve the driver, if there are any.
func (fs *foreignSockets) describe(driver string, own unixsock.FileID) string {
	var found []string
	for _, f := range fs.serving(driver) {
		if f.file.FileID != own {
			found = append(found, fmt.Sprintf("at %q by %s", f.path, f.server))
		}
	}
	if len(found) == 0 {
		return ""
	}
	return "the driver is also served to the kubelet " + strings.Join(found, " and ") +
		": stop that registrar (a node-driver-registrar sidecar of the driver?), or one of both is refused when the kubelet restarts"
}
