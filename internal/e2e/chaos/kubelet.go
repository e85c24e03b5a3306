package chaos

import "csi-registrar/internal/fake"

func (w *world) startKubelet() error {
	if w.kubelet != nil {
		return nil
	}
	// It may tell of what it does before it is made.
	w.mu.Unlock()
	defer w.mu.Lock()
	k, err := fake.StartKubelet(w.registry, w.cluster, w.happened)
	if err != nil {
		// The directory went while it started: the next one will do.
		w.say("the kubelet does not start: %v", err)
		return nil
	}
	w.kubelet = k
	w.count("kubelets")
	return nil
}

func (w *world) stopKubelet() error {
	k := w.kubelet
	if k == nil {
		return nil
	}
	w.kubelet = nil
	w.mu.Unlock()
	defer w.mu.Lock()
	return k.Stop()
}
