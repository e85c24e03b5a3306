package node

import (
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// Write is a change of the node's CSINode, or of the labels and annotations of its Node, which a
// registration writes. Other changes of the Node are ignored.
type Write struct {
	At        time.Time
	Kind      string // CSINode or Node
	HasDriver bool   // of a CSINode: the driver is in it
}

// Writes are all observed writes.
type Writes struct {
	driver string

	mu  sync.Mutex
	all []Write
}

// WatchWrites watches the sample driver, see WatchWritesOf.
func (c *Client) WatchWrites(t testing.TB) *Writes {
	t.Helper()
	return c.WatchWritesOf(t, Driver)
}

// WatchWritesOf watches until the test ends, even while the API server does not run.
func (c *Client) WatchWritesOf(t testing.TB, driver string) *Writes {
	t.Helper()
	w := &Writes{driver: driver}
	stop := make(chan struct{})
	var done sync.WaitGroup
	t.Cleanup(func() { close(stop); done.Wait() })
	options := metav1.ListOptions{FieldSelector: "metadata.name=" + c.node}
	informer := func(kind string, object runtime.Object, changed func(old, now any) bool, lw *cache.ListWatch) {
		_, controller := cache.NewInformerWithOptions(cache.InformerOptions{
			ListerWatcher: lw, ObjectType: object,
			Handler: cache.ResourceEventHandlerFuncs{
				AddFunc: func(now any) { w.add(kind, now) },
				UpdateFunc: func(old, now any) {
					if changed(old, now) {
						w.add(kind, now)
					}
				},
				DeleteFunc: func(any) { w.add(kind, nil) },
			},
		})
		done.Go(func() { controller.Run(stop) })
	}
	csiNodes := c.Cluster.API.StorageV1().CSINodes()
	informer("CSINode", &storagev1.CSINode{}, func(old, now any) bool {
		return old.(*storagev1.CSINode).ResourceVersion != now.(*storagev1.CSINode).ResourceVersion
	}, &cache.ListWatch{
		ListFunc: func(metav1.ListOptions) (runtime.Object, error) { return csiNodes.List(c.ctx(), options) },
		WatchFunc: func(o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = options.FieldSelector
			return csiNodes.Watch(c.ctx(), o)
		},
	})
	nodes := c.Cluster.API.CoreV1().Nodes()
	informer("Node", &corev1.Node{}, func(old, now any) bool {
		a, b := old.(*corev1.Node), now.(*corev1.Node)
		return !maps.Equal(a.Labels, b.Labels) || !maps.Equal(a.Annotations, b.Annotations) || !equality.Semantic.DeepEqual(a.Spec, b.Spec)
	}, &cache.ListWatch{
		ListFunc: func(metav1.ListOptions) (runtime.Object, error) { return nodes.List(c.ctx(), options) },
		WatchFunc: func(o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = options.FieldSelector
			return nodes.Watch(c.ctx(), o)
		},
	})
	return w
}

func (w *Writes) add(kind string, object any) {
	write := Write{Kind: kind}
	if csiNode, ok := object.(*storagev1.CSINode); ok {
		write.HasDriver = slices.ContainsFunc(csiNode.Spec.Drivers, func(d storagev1.CSINodeDriver) bool { return d.Name == w.driver })
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	write.At = time.Now()
	w.all = append(w.all, write)
}

// Since returns the writes after a time.
func (w *Writes) Since(mark time.Time) []Write {
	w.mu.Lock()
	defer w.mu.Unlock()
	i, _ := slices.BinarySearchFunc(w.all, mark, func(a Write, at time.Time) int { return a.At.Compare(at) })
	return slices.Clone(w.all[i:])
}

// Count counts the writes of a kind after a time.
func (w *Writes) Count(kind string, mark time.Time) int {
	count := 0
	for _, write := range w.Since(mark) {
		if write.Kind == kind {
			count++
		}
	}
	return count
}

// HasDriver reports whether the CSINode has the driver.
func (w *Writes) HasDriver() bool {
	_, has := w.Absent(time.Time{})
	return has
}

// Absent returns for how long, after a time, the driver was missing from the CSINode, and
// whether the CSINode has it now.
func (w *Writes) Absent(mark time.Time) (sum time.Duration, has bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := mark
	for _, write := range w.all {
		if write.Kind != "CSINode" {
			continue
		}
		if write.At.After(mark) {
			if !has {
				sum += write.At.Sub(last)
			}
			last = write.At
		}
		has = write.HasDriver
	}
	if !has {
		sum += time.Since(last)
	}
	return sum, has
}
