package kubelet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/kubernetes/pkg/apis/storage"
	storageconv "k8s.io/kubernetes/pkg/apis/storage/v1"
	"k8s.io/kubernetes/pkg/registry/storage/csinode"
)

// apiServer is a fake clientset with the rules that matter here: it validates CSINode objects with
// the real API server's strategy, counts writes, and can be down.
type apiServer struct {
	client *fake.Clientset
	node   string
	state  string
	events *events

	mu            sync.Mutex
	down          bool
	csiNodeWrites int
	nodeWrites    int
}

// saved is the content of the state file.
type saved struct {
	Node    *corev1.Node       `json:"node"`
	CSINode *storagev1.CSINode `json:"csinode,omitempty"`
}

func newAPIServer(node, state string, events *events) (*apiServer, error) {
	s := saved{Node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node, UID: "7b9a8c5e-0000-4000-8000-000000000001"}}}
	if state != "" {
		b, err := os.ReadFile(state)
		if err == nil {
			err = json.Unmarshal(b, &s)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("cannot read the API server's state: %w", err)
		}
	}
	objects := []runtime.Object{s.Node}
	if s.CSINode != nil {
		objects = append(objects, s.CSINode)
	}
	a := &apiServer{client: fake.NewClientset(objects...), node: node, state: state, events: events}
	a.client.PrependReactor("*", "csinodes", a.react)
	a.client.PrependReactor("*", "nodes", a.react)
	return a, nil
}

var errDown = apierrors.NewServiceUnavailable("the API server is down, as it was told")

func (a *apiServer) react(action clienttesting.Action) (bool, runtime.Object, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.down {
		return true, nil, errDown
	}
	switch action.GetVerb() {
	case "get", "list", "watch":
		return false, nil, nil
	}
	if err := a.check(action); err != nil {
		return true, nil, err
	}
	handled, obj, err := clienttesting.ObjectReaction(a.client.Tracker())(action)
	if err != nil || !handled {
		return handled, obj, err
	}
	if action.GetResource().Resource == "csinodes" {
		a.csiNodeWrites++
		err = a.printCSINode()
	} else {
		a.nodeWrites++
		err = a.printNode()
	}
	return true, obj, errors.Join(err, a.save())
}

// check returns the error of the real API server for a write that it would refuse.
func (a *apiServer) check(action clienttesting.Action) error {
	var given runtime.Object
	switch w := action.(type) {
	case clienttesting.UpdateAction: // a create has the same methods
		given = w.GetObject()
	default:
		return nil
	}
	n, ok := given.(*storagev1.CSINode)
	if !ok {
		return nil
	}
	var after storage.CSINode
	if err := storageconv.Convert_v1_CSINode_To_storage_CSINode(n.DeepCopy(), &after, nil); err != nil {
		return err
	}
	ctx := context.Background()
	errs := csinode.Strategy.Validate(ctx, &after)
	if action.GetVerb() == "update" {
		stored, err := a.csiNode()
		if err != nil {
			return err
		}
		var before storage.CSINode
		if err := storageconv.Convert_v1_CSINode_To_storage_CSINode(stored.DeepCopy(), &before, nil); err != nil {
			return err
		}
		errs = csinode.Strategy.ValidateUpdate(ctx, &after, &before)
	}
	if len(errs) == 0 {
		return nil
	}
	return apierrors.NewInvalid(storagev1.SchemeGroupVersion.WithKind("CSINode").GroupKind(), n.Name, errs)
}

// Read from the tracker: the client would call react again.
func (a *apiServer) csiNode() (*storagev1.CSINode, error) {
	obj, err := a.client.Tracker().Get(storagev1.SchemeGroupVersion.WithResource("csinodes"), "", a.node)
	if err != nil {
		return nil, err
	}
	return obj.(*storagev1.CSINode), nil
}

func (a *apiServer) theNode() (*corev1.Node, error) {
	obj, err := a.client.Tracker().Get(corev1.SchemeGroupVersion.WithResource("nodes"), "", a.node)
	if err != nil {
		return nil, err
	}
	return obj.(*corev1.Node), nil
}

func (a *apiServer) printCSINode() error {
	n, err := a.csiNode()
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	e := event{Event: "csinode", CSINodeWrites: a.csiNodeWrites, NodeWrites: a.nodeWrites}
	if err == nil {
		e.Drivers = driversOf(n)
	}
	a.events.print(e)
	return nil
}

func (a *apiServer) printNode() error {
	n, err := a.theNode()
	if err != nil {
		return err
	}
	a.events.print(event{Event: "node", Labels: n.Labels, CSINodeWrites: a.csiNodeWrites, NodeWrites: a.nodeWrites})
	return nil
}

func (a *apiServer) save() error {
	if a.state == "" {
		return nil
	}
	var s saved
	var err error
	if s.Node, err = a.theNode(); err != nil {
		return err
	}
	if s.CSINode, err = a.csiNode(); err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	b, err := json.Marshal(s)
	if err != nil {
		return err
	}
	tmp := a.state + ".new" // if the process is killed meanwhile, no partial file is left
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return fmt.Errorf("cannot keep the API server's state: %w", err)
	}
	return os.Rename(tmp, a.state)
}
