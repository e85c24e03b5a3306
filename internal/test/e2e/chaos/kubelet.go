package chaos

import "csi-registrar/internal/test/fake"

func (w *world) startKubelet() error {
	if w.kubelet != nil {
		return nil
	}
	// The kubelet may report events before StartKubelet returns.
	w.mu.Unlock()
	defer w.mu.Lock()
	k, err := fake.StartKubelet(w.registry, w.cluster, w.happened)
	if err != nil {
		// The directory was removed while it started. The next kubelet will start.
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
