package simulation

import (
	"errors"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"csi-registrar/internal/node/status"
)

// kubeletModel is the plugin manager of the kubelet, for k8s.io/kubernetes v1.35.4 and v1.37.2:
// pkg/kubelet/pluginmanager (pluginwatcher/plugin_watcher.go, reconciler/reconciler.go,
// operationexecutor/operation_generator.go), k8s.io/kubernetes/pkg/util/goroutinemap (backoff), and
// pkg/volume/csi/csi_plugin.go with nodeinfomanager (csiDrivers, CSINode).
type kubeletModel struct {
	w       *world
	root    string // --root-dir
	old     bool   // 1.35: a plugin that was refused stays in the cache and is not tried again
	version int    // counts incarnations
	running bool
	watched uint64          // the inode of the directory that it watches
	knew    map[uint64]bool // those that it watched
	desired map[string]uint64
	actual  map[string]*plugin
	backoff map[string]*backoff
	pending map[string]bool
	drivers map[string]bool // csiDrivers: their endpoints are known
	kick    chan struct{}
	ended   chan struct{}
	uuid    uint64

	// The API server's state, which outlives the kubelet.
	csiNode map[string]status.Identity
	labels  map[string]string
	owner   map[string]string // the path of a registered driver
	robbed  map[string]bool   // unregistered because another path of that name went
	apiErr  string
	writes  int
}

type plugin struct {
	uuid           uint64
	name, endpoint string
}

type backoff struct {
	since time.Time
	pause time.Duration
}

func newKubelet(w *world, old bool) *kubeletModel {
	return &kubeletModel{w: w, root: rootDirs[0], old: old, csiNode: map[string]status.Identity{}, labels: map[string]string{}, owner: map[string]string{}, robbed: map[string]bool{}, knew: map[uint64]bool{}}
}

// registry is the directory that it watches.
func (k *kubeletModel) registry() string { return registries[k.root] }

// start begins an incarnation: it makes the directory, watches it, and finds what is in it.
func (k *kubeletModel) start() {
	k.version++
	k.running = true
	k.desired, k.actual, k.backoff = map[string]uint64{}, map[string]*plugin{}, map[string]*backoff{}
	k.pending, k.drivers = map[string]bool{}, map[string]bool{}
	k.kick, k.ended = make(chan struct{}, 1), make(chan struct{})
	f := k.w.files
	if f.nodes[k.registry()] == nil {
		f.put(k.registry(), &node{mode: syscall.S_IFDIR | 0o750, maker: "kubelet"})
	}
	k.watched = f.nodes[k.registry()].Ino
	k.knew[k.watched] = true
	for _, name := range f.sockets(k.registry()) {
		k.add(name)
	}
	go k.loop(k.version, k.kick, k.ended)
}

func (k *kubeletModel) stop() {
	if k.running {
		k.running = false
		k.version++
		close(k.ended)
	}
}

func (k *kubeletModel) add(name string) {
	k.uuid++
	k.desired[name] = k.uuid
	k.wake()
}

func (k *kubeletModel) wake() {
	select {
	case k.kick <- struct{}{}:
	default:
	}
}

// created and removed are its inotify watch.
func (k *kubeletModel) created(name string) {
	if k == nil || !k.running || path.Dir(name) != k.registry() || strings.HasPrefix(path.Base(name), ".") {
		return
	}
	f := k.w.files
	if d := f.nodes[k.registry()]; d == nil || d.Ino != k.watched {
		return
	}
	if n, err := f.resolve(name); err == nil && n.mode&syscall.S_IFMT == syscall.S_IFSOCK {
		k.add(name)
	}
}

func (k *kubeletModel) removed(name string, n *node) {
	if k == nil || !k.running || path.Dir(name) != k.registry() {
		return
	}
	if d := k.w.files.nodes[k.registry()]; d == nil || d.Ino != k.watched {
		return
	}
	delete(k.desired, name)
	k.wake()
}

// loop reconciles once a second, but sleeps while there is nothing to do.
func (k *kubeletModel) loop(version int, kick, ended chan struct{}) {
	var next <-chan time.Time
	for {
		if next == nil {
			select {
			case <-kick:
			case <-ended:
				return
			}
		}
		now := time.Now()
		select {
		case <-time.After(now.Truncate(time.Second).Add(time.Second).Sub(now)):
		case <-ended:
			return
		}
		k.w.mu.Lock()
		if k.version != version {
			k.w.mu.Unlock()
			return
		}
		again := k.reconcile()
		k.w.mu.Unlock()
		if next = nil; again > 0 {
			next = time.After(0)
			if again > time.Second {
				select {
				case <-time.After(again):
				case <-kick:
				case <-ended:
					return
				}
			}
		}
	}
}

// reconcile starts what is due, and returns after how long the next thing is, 0 for never.
func (k *kubeletModel) reconcile() (again time.Duration) {
	soon := func(d time.Duration) {
		if again == 0 || d < again {
			again = d
		}
	}
	safe := func(name string) bool {
		if k.pending[name] {
			return false // its end wakes the loop
		}
		if b := k.backoff[name]; b != nil {
			if left := b.pause - time.Since(b.since); left >= 0 {
				soon(left + 1)
				return false
			}
		}
		return true
	}
	for _, name := range sortedKeys(k.actual) {
		if p := k.actual[name]; k.desired[name] != p.uuid && safe(name) {
			k.run(name, func(version int) error { k.unregister(version, name, p); return nil })
		}
	}
	for _, name := range sortedKeys(k.desired) {
		if p := k.actual[name]; (p == nil || p.uuid != k.desired[name]) && safe(name) {
			uuid := k.desired[name]
			k.run(name, func(version int) error { return k.register(version, name, uuid) })
		}
	}
	return again
}

// run is goroutinemap: one operation for a path at a time, with a backoff after an error.
func (k *kubeletModel) run(name string, operation func(version int) error) {
	k.pending[name] = true
	version := k.version
	go func() {
		err := operation(version)
		k.w.mu.Lock()
		defer k.w.mu.Unlock()
		if k.version != version {
			return
		}
		delete(k.pending, name)
		switch b := k.backoff[name]; {
		case err == nil:
			delete(k.backoff, name)
		case b == nil:
			k.backoff[name] = &backoff{time.Now(), 500 * time.Millisecond}
		default:
			b.since, b.pause = time.Now(), min(2*b.pause, 122*time.Second)
		}
		k.wake()
	}()
}

func (k *kubeletModel) unregister(version int, name string, p *plugin) {
	k.w.mu.Lock()
	defer k.w.mu.Unlock()
	if k.version == version && k.actual[name] == p {
		delete(k.actual, name)
		k.robbed[p.name] = k.owner[p.name] != name
		for _, o := range k.actual {
			k.robbed[p.name] = k.robbed[p.name] || o.name == p.name
		}
		k.unregisterDriver(p.name)
	}
}

func (k *kubeletModel) unregisterDriver(driver string) {
	delete(k.drivers, driver)
	switch _, ok := k.csiNode[driver]; {
	case !ok:
	case k.apiErr != "":
		// It is not tried again.
	default:
		delete(k.csiNode, driver)
		k.writes++
	}
}

var errGone = errors.New("the kubelet has ended")

// register is GenerateRegisterPluginFunc.
func (k *kubeletModel) register(version int, name string, uuid uint64) error {
	w := k.w
	time.Sleep(time.Millisecond) // its calls take longer than an unregistration that began before
	w.mu.Lock()
	c, err := w.files.dial(name)
	w.mu.Unlock()
	if err != nil {
		return err
	}
	defer func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		c.close()
	}()
	info := w.call(c, nil, time.Second)
	if info.err != nil {
		return info.err
	}
	w.mu.Lock()
	gone, exists := k.version != version, k.drivers[info.name]
	if !gone && !exists {
		k.actual[name] = &plugin{uuid, info.name, info.endpoint}
		k.drivers[info.name] = true
	}
	w.mu.Unlock()
	if gone {
		return errGone
	}
	notify := func(registered bool, text string) error {
		n := &status.Notification{Registered: registered, Error: text}
		r := w.call(c, n, 5*time.Second)
		if errors.Is(r.err, errReset) { // gRPC connects again
			w.mu.Lock()
			again, err := w.files.dial(name)
			if err == nil {
				c = again
			}
			w.mu.Unlock()
			if err != nil {
				return err
			}
			r = w.call(c, n, 5*time.Second)
		}
		if r.err == nil && text != "" {
			return errors.New(text)
		}
		if r.err != nil {
			w.mu.Lock()
			defer w.mu.Unlock()
			p := w.process // it could not answer
			opens := !w.noSockets && time.Since(w.opensAt) > recovery/2
			c.sock.forgotten = c.sock.forgotten || p == nil || w.disturbed(p) || time.Since(p.started) < recovery || !opens
		}
		return r.err
	}
	if exists {
		if err := notify(false, "another driver with the same name is already registered"); err != nil {
			return err
		}
	}
	id, err := w.nodeGetInfo(info.endpoint, version)
	w.mu.Lock()
	if k.version != version {
		w.mu.Unlock()
		return errGone
	}
	if err == nil {
		err = k.install(info.name, id)
	}
	if err != nil {
		k.unregisterDriver(info.name)
		if !k.old {
			delete(k.actual, name)
		}
	}
	w.mu.Unlock()
	if err != nil {
		return notify(false, err.Error())
	}
	err = notify(true, "")
	w.mu.Lock()
	defer w.mu.Unlock()
	if k.version == version {
		k.owner[info.name], k.robbed[info.name] = name, false
	}
	if err != nil {
		if k.version == version && !k.old {
			delete(k.actual, name)
			k.unregisterDriver(info.name)
		}
		return err
	}
	return nil
}

// install is nodeinfomanager.InstallCSIDriver: a topology label never changes, nor a node id.
func (k *kubeletModel) install(driver string, id status.Identity) error {
	if k.apiErr != "" {
		return errors.New(k.apiErr)
	}
	for _, key := range sortedKeys(id.Topology) {
		if have, ok := k.labels[key]; ok && have != id.Topology[key] {
			return errors.New("detected topology value collision")
		}
	}
	have, ok := k.csiNode[driver]
	if ok && have.NodeID != id.NodeID {
		return errors.New("node id is immutable")
	}
	for key, value := range id.Topology {
		k.labels[key] = value
	}
	same := ok && have.MaxVolumes == id.MaxVolumes && slices.Equal(sortedKeys(have.Topology), sortedKeys(id.Topology))
	if !same {
		k.csiNode[driver] = id
		k.writes++
		k.w.of(driver).learnedAt = time.Now()
		if p := k.w.process; p == nil || k.w.disturbed(p) { // see README.md, "Open"
			k.w.of(driver).unseen = true
		}
	}
	return nil
}

// call makes a call, with the kubelet's time limit.
func (w *world) call(c *conn, n *status.Notification, limit time.Duration) callReply {
	w.mu.Lock()
	s := c.sock
	if s.queue == nil { // another program's
		w.mu.Unlock()
		return callReply{name: s.driver, endpoint: "/r/" + s.driver + ".sock", versions: []string{"1.0.0"}}
	}
	w.mu.Unlock()
	request := call{n, make(chan callReply, 1)}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case c.calls <- request:
	case <-c.closed:
		return callReply{err: errReset}
	}
	select {
	case r := <-request.reply:
		return r
	case <-c.closed:
		return callReply{err: errReset}
	case <-timer.C:
		return callReply{err: errors.New("deadline exceeded")}
	}
}

// nodeGetInfo asks the driver behind an endpoint, as the kubelet's CSI client does: for 2 minutes.
func (w *world) nodeGetInfo(endpoint string, version int) (status.Identity, error) {
	deadline := time.Now().Add(120 * time.Second)
	for {
		w.mu.Lock()
		d := w.driverAt(endpoint)
		if d == nil || d.state == "down" {
			w.mu.Unlock()
			return status.Identity{}, errors.New("connection refused")
		}
		state, id, changed := d.state, d.identity(), d.changed
		w.mu.Unlock()
		switch state {
		case "starting":
			return status.Identity{}, errors.New("not ready")
		case "up", "other":
			return id, nil
		}
		wait := time.Until(deadline)
		if state == "slow" {
			wait = min(wait, slowBy)
		}
		select {
		case <-changed:
			return status.Identity{}, errors.New("connection reset")
		case <-time.After(wait):
			if state == "slow" {
				return id, nil
			}
			return status.Identity{}, errors.New("deadline exceeded")
		}
	}
}
