package importer

import "errors"

// hintError is an error with what to do about it.
type hintError struct {
	error
	hint string
}

func (e *hintError) Unwrap() error { return e.error }

func withHint(hint string, err error) error { return &hintError{err, hint} }

// hintFor returns the hint of an error.
func hintFor(err error) string {
	if h, ok := errors.AsType[*hintError](err); ok {
		return h.hint
	}
	return hintByHand
}

const (
	hintByHand = "correct the manifest, or write the table by hand: see csi-registrar.toml(5)"
	// hintFlag is for a flag that a patch does not have, but the manifest that it changes.
	hintFlag   = "if this is a patch, render its kustomization: kubectl kustomize DIR | csi-registrar import -; otherwise " + hintByHand
	hintValue  = "write the value into a copy of the manifest, and import that"
	hintVolume = "the driver's socket must be on the node: change the volume to a hostPath, also for the driver's container, and import again"
	hintOne    = "import only the one for this kind of node, from a separate file"
	// hintCluster finds the driver however it was installed.
	hintCluster = "read the DaemonSet from the cluster: kubectl get ds,csidriver -A -o yaml | csi-registrar import -"
)
