package cluster

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiwatch "k8s.io/apimachinery/pkg/watch"

	"csi-registrar/internal/test/e2e/harness"
)

// csiNodeWrites counts the changes of the CSINode.
type csiNodeWrites struct {
	c       *cluster
	mu      sync.Mutex
	n       int
	version uint64        // the newest that was counted
	empty   time.Time     // since when the CSINode has no driver; zero: it has one
	without time.Duration // how long it had none before
}

// countCSINodeWrites counts until the test ends.
func (c *cluster) countCSINodeWrites() *csiNodeWrites {
	c.t.Helper()
	start := c.version()
	w := &csiNodeWrites{c: c, version: number(c.t, start)}
	api := c.watcher().StorageV1().CSINodes()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		c.watch(ctx, start, api.Watch, func(e apiwatch.Event) {
			object, ok := e.Object.(metav1.Object)
			if !ok {
				return
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			w.n++
			w.version = number(c.t, object.GetResourceVersion())
			node, ok := e.Object.(*storagev1.CSINode)
			switch gone := !ok || e.Type == apiwatch.Deleted || len(node.Spec.Drivers) == 0; {
			case gone && w.empty.IsZero():
				w.empty = time.Now()
			case !gone && !w.empty.IsZero():
				w.without += time.Since(w.empty)
				w.empty = time.Time{}
			}
		})
	})
	c.t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return w
}

// count waits until the watch has seen the CSINode as it is, and gives the number of writes so far.
func (w *csiNodeWrites) count() int {
	w.c.t.Helper()
	now := number(w.c.t, w.c.csiNode().ResourceVersion)
	n := 0
	harness.Eventually(w.c.t, time.Minute, "the watch has seen the CSINode", func() string {
		w.mu.Lock()
		defer w.mu.Unlock()
		n = w.n
		if w.version < now {
			return fmt.Sprintf("version %d, it is %d", w.version, now)
		}
		return ""
	})
	return n
}

// missing is for how long the CSINode had no driver, until it had one again.
func (w *csiNodeWrites) missing() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.without
}

func number(t *testing.T, version string) uint64 {
	n, err := strconv.ParseUint(version, 10, 64)
	if err != nil {
		t.Errorf("a resource version: %v", err)
	}
	return n
}
