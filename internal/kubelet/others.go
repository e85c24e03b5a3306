package kubelet

import (
	"context"
	"fmt"
	"maps"
	"slices"
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
	scanPause = time.Second            // between two scans because of a hint
	askTime   = time.Second            // for one socket, as the kubelet has it for GetInfo (v1.36)
	retryTime = 30 * time.Second       // before one that did not answer is asked again
	maxAsked  = 64                     // sockets at a time
)

// others finds the sockets of other registrars in the plugins_registry. Two sockets of one name
// would make the kubelet refuse one of them, or (an older one) let the removal of one
// deregister the other. What a socket answered is remembered for as long as it is the same.
type others struct {
	dir      string
	pool     *worker.Pool
	isOurs   func(path string) bool
	changed  func(driver string) // another socket serves the driver now, or none any more
	requests chan chan struct{}

	mu     sync.Mutex
	served map[string][]other // by driver
}

// other is a socket of another registrar, as it was when it was asked last.
type other struct {
	path   string
	file   unixsock.File
	driver string // which it serves; empty: none, or not known
	by     string // who listens, for people
	retry  time.Time
}

func newOthers(dir string, pool *worker.Pool, isOurs func(string) bool, changed func(string)) *others {
	return &others{dir: dir, pool: pool, isOurs: isOurs, changed: changed, requests: make(chan chan struct{})}
}

// run scans at each hint and request until ctx is done.
func (o *others) run(ctx context.Context, hints <-chan struct{}) {
	var (
		known   = map[string]other{}
		answers = make(chan other)
		asked   int             // sockets that have not answered yet
		current []chan struct{} // requests that the running scan answers
		queued  []chan struct{} // those that came since it began
		pause   = time.NewTimer(0)
		due     bool // a hint came
		rested  bool // the pause after a scan is over
	)
	defer pause.Stop()
	scan := func() {
		current, queued, due = append(current, queued...), nil, false
		rested = false
		paths, err := worker.Do(ctx, o.pool.Slot(o.dir, nil), askTime, func() []string { return pluginreg.Sockets(o.dir) }, nil)
		if err != nil {
			return
		}
		paths = slices.DeleteFunc(paths, o.isOurs)
		maps.DeleteFunc(known, func(path string, _ other) bool { return !slices.Contains(paths, path) })
		slots := make(chan struct{}, maxAsked)
		for _, path := range paths {
			asked++
			before := known[path]
			go func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				answers <- o.ask(ctx, path, before)
			}()
		}
		pause.Reset(scanPause)
	}
	for {
		select {
		case <-ctx.Done():
			for range asked {
				<-answers
			}
			return
		case <-hints:
			due = true
		case <-pause.C:
			rested = true
		case done := <-o.requests:
			queued = append(queued, done)
		case a := <-answers:
			asked--
			known[a.path] = a
		}
		if asked > 0 {
			continue
		}
		o.publish(known)
		for _, done := range current {
			close(done)
		}
		current = nil
		if len(queued) > 0 || due && rested {
			scan()
		}
	}
}

// ask finds out what the socket at path serves; what it said before holds while it is the same.
func (o *others) ask(ctx context.Context, path string, before other) other {
	a, err := worker.Do(ctx, o.pool.Slot(path, nil), askTime+scanWait, func() other {
		f, err := unixsock.Stat(path)
		if err != nil || !f.IsSocket() {
			return other{path: path}
		}
		if f == before.file && (before.retry.IsZero() || time.Now().Before(before.retry)) {
			return before
		}
		a := other{path: path, file: f}
		limited, cancel := context.WithTimeout(ctx, askTime)
		defer cancel()
		info, who, err := pluginreg.GetInfo(limited, path)
		switch {
		case err != nil:
			a.retry = time.Now().Add(retryTime)
		case info.Type == registerapi.CSIPlugin && status.CheckName(info.Name) == nil:
			a.driver, a.by = info.Name, process(who)
		}
		return a
	}, nil)
	if err != nil {
		return other{path: path}
	}
	return a
}

// publish makes what is known visible, and tells whom it concerns.
func (o *others) publish(known map[string]other) {
	served := map[string][]other{}
	for _, path := range slices.Sorted(maps.Keys(known)) {
		if a := known[path]; a.driver != "" {
			served[a.driver] = append(served[a.driver], a)
		}
	}
	o.mu.Lock()
	before := o.served
	o.served = served
	o.mu.Unlock()
	for _, m := range []map[string][]other{before, served} {
		for driver := range m {
			if !slices.Equal(before[driver], served[driver]) {
				o.changed(driver)
			}
		}
	}
}

// of returns the other sockets that serve the driver.
func (o *others) of(driver string) []other {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.served[driver]
}

// check looks for another live socket than our own that serves the driver: a
// *ConflictError. Our own file under another name, for somebody moved it, is removed. What has
// not answered within scanWait is found later, and told by Look.
func (o *others) check(ctx context.Context, driver string, own unixsock.FileID) error {
	done, late := make(chan struct{}), time.After(scanWait)
	select {
	case o.requests <- done:
		select {
		case <-done:
		case <-late:
		case <-ctx.Done():
		}
	case <-late:
	case <-ctx.Done():
	}
	for _, a := range o.of(driver) {
		if a.file.FileID == own {
			if _, err := unixsock.Remove(a.path, own); err != nil { // a link to it is left
				return fmt.Errorf("cannot remove our moved registration socket: %w", err)
			}
			continue
		}
		if live, who, err := unixsock.Probe(ctx, a.path); live == unixsock.Live && err == nil {
			return &ConflictError{Driver: driver, Path: a.path, Holder: process(who)}
		}
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
