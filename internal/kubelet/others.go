package kubelet

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/pluginreg"
	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
	"csi-registrar/internal/worker"
)

const (
	scanWait  = 300 * time.Millisecond // how long a publication waits for a scan
	scanPause = time.Second            // from a hint to its scan: what comes with it is seen too
	scanAgain = 30 * time.Second       // before what may change without a hint is looked at again
	askTime   = time.Second            // for one socket, as the kubelet has it for GetInfo (v1.36)
	maxAsked  = 64                     // sockets at a time
)

// others finds the sockets of other registrars in the plugins_registry. Two sockets of one name
// would make the kubelet refuse one of them, or (an older one) let the removal of one
// deregister the other. What a socket answered is remembered for as long as it is the same.
type others struct {
	r    *Registry
	wake chan struct{} // there are requests

	mu    sync.Mutex
	next  chan struct{}     // closed at the end of the next scan to begin
	known map[string]answer // by path; written by run and what it waits for
}

// answer is what is known of another socket since it was asked last.
type answer struct {
	path   string
	file   unixsock.File
	driver string    // which it serves; empty: none, or not known
	by     string    // who listens, for people
	mute   time.Time // when it was asked in vain; zero: it answered
}

// run scans until ctx is done: for a request at once, for a hint after a pause.
func (o *others) run(ctx context.Context) {
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-o.wake:
		case <-again:
		case <-o.r.entries.Hints():
			select {
			case <-ctx.Done():
				return
			case <-o.wake:
			case <-time.After(scanPause):
			}
		}
		o.scan(ctx)
		if again = nil; o.mayChange() {
			again = time.After(scanAgain)
		}
	}
}

// mayChange reports whether there is a socket of which a hint would not tell everything: one that
// did not answer, or one that serves a driver of ours and is left behind when its process is killed.
func (o *others) mayChange() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, a := range o.known {
		if !a.mute.IsZero() || o.r.of(a.driver) != nil {
			return true
		}
	}
	return false
}

// request asks for a scan, which closes the channel at its end.
func (o *others) request() <-chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	select {
	case o.wake <- struct{}{}:
	default:
	}
	return o.next
}

// scan asks what is in the directory.
func (o *others) scan(ctx context.Context) {
	o.mu.Lock()
	done, known := o.next, maps.Clone(o.known)
	o.next = make(chan struct{})
	o.mu.Unlock()
	defer close(done)
	slot := o.r.o.Pool.Slot(o.r.dir.path, o.r.entries.Hint)
	paths, err := worker.Do(ctx, slot, askTime, func() []string { return pluginreg.Sockets(o.r.dir.path) }, nil)
	if err != nil {
		return // what is known holds until the hint of the slot
	}
	paths = slices.DeleteFunc(paths, func(path string) bool { return o.r.at(path) != nil })
	for path, before := range known {
		if !slices.Contains(paths, path) {
			o.learn(before, answer{path: path})
		}
	}
	var asked sync.WaitGroup
	slots := make(chan struct{}, maxAsked)
	for _, path := range paths {
		before := known[path]
		before.path = path
		slots <- struct{}{}
		asked.Go(func() {
			defer func() { <-slots }()
			slot := o.r.o.Pool.Slot(path, o.r.entries.Hint) // when what was abandoned has returned
			if now, err := worker.Do(ctx, slot, askTime+scanWait, func() answer { return o.ask(ctx, before) }, nil); err == nil {
				o.learn(before, now)
			}
		})
	}
	asked.Wait()
}

// learn makes an answer visible, and tells whom it concerns.
func (o *others) learn(before, a answer) {
	o.mu.Lock()
	o.known[a.path] = a
	if a.file == (unixsock.File{}) {
		delete(o.known, a.path)
	}
	o.mu.Unlock()
	if before.driver == a.driver && before.file.FileID == a.file.FileID {
		return
	}
	for _, driver := range []string{before.driver, a.driver} {
		if s := o.r.of(driver); s != nil {
			s.watch.Hint()
		}
	}
}

// ask finds out what a socket serves; what it said before holds while it is the same.
func (o *others) ask(ctx context.Context, before answer) answer {
	a := answer{path: before.path}
	f, err := unixsock.Stat(a.path)
	if err != nil || !f.IsSocket() {
		return a
	}
	a.file = f
	holds := f == before.file && (before.mute.IsZero() || time.Since(before.mute) < scanAgain)
	if holds && o.r.of(before.driver) != nil { // one that is killed leaves its socket
		live, _, _ := unixsock.Probe(ctx, a.path)
		holds = live == unixsock.Live
	}
	if holds {
		return before
	}
	limited, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	info, who, err := pluginreg.GetInfo(limited, a.path)
	switch {
	case err != nil:
		a.mute = time.Now()
	case info.Type == registerapi.CSIPlugin && status.CheckName(info.Name) == nil:
		a.driver, a.by = info.Name, who.String()
	}
	return a
}

// of returns the other sockets that serve the driver.
func (o *others) of(driver string) (found []answer) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for path, a := range o.known {
		if a.driver == driver && o.r.at(path) == nil { // it may have become ours since
			found = append(found, a)
		}
	}
	sort.Slice(found, func(i, j int) bool { return found[i].path < found[j].path })
	return found
}

// check looks for another live socket than our own that serves the driver: a
// ConflictError. Our own file under another name, for somebody moved it, is removed. What has
// not answered within scanWait is found later, and told by Look.
func (o *others) check(ctx context.Context, driver string, own unixsock.FileID) error {
	select {
	case <-o.request():
	case <-time.After(scanWait):
	case <-ctx.Done():
	}
	for _, a := range o.of(driver) {
		if a.file.FileID != own {
			return ConflictError(fmt.Sprintf("%s is already served to the kubelet at %q by %s: stop that registrar (a node-driver-registrar sidecar of the driver?), or remove the driver here", driver, a.path, a.by))
		}
		if _, err := unixsock.Remove(a.path, own); err != nil { // a link to it is left
			return fmt.Errorf("cannot remove our moved registration socket: %w", err)
		}
		o.learn(a, answer{path: a.path})
	}
	return nil
}

// describe says who else serves the driver, for people; empty if nobody.
func (o *others) describe(driver string, own unixsock.FileID) string {
	var found []string
	for _, a := range o.of(driver) {
		if a.file.FileID != own {
			found = append(found, fmt.Sprintf("at %q by %s", a.path, a.by))
		}
	}
	if len(found) == 0 {
		return ""
	}
	return "the driver is also served to the kubelet " + strings.Join(found, " and ") +
		": stop that registrar (a node-driver-registrar sidecar of the driver?), or one of both is refused when the kubelet restarts"
}
