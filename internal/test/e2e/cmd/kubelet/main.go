// Command kubelet is only the part of a kubelet that registers CSI drivers: the plugin manager, CSI
// handler and node info manager of k8s.io/kubernetes, with a fake API server (see package kubelet).
// One process is one kubelet. Tests run it with csi-registrar, on this machine and in containers;
// built with CGO_ENABLED=0 it runs on any Linux.
//
//	kubelet --root DIR [--node NAME] [--handler csi|record] [--state FILE] [--until-eof] [--v LEVEL]
//
// It watches DIR/plugins_registry (which it creates, as the kubelet does) until SIGINT or SIGTERM,
// or, with --until-eof, until standard input ends. --handler=record accepts every plugin and has no
// API server. --state keeps the objects of the API server in a file, for the next kubelet of that
// node. klog's lines go to standard error.
//
// Output: one JSON object a line, each with "time" (RFC 3339 with fractions) and "event":
//
//	started     node, root                      about to watch
//	validate    driver, endpoint, versions, error        the handler was asked; no error: it said yes
//	register    driver, endpoint, versions, error, took_seconds   (NodeGetInfo and both objects are in that time)
//	deregister  driver, endpoint
//	csinode     drivers [{name, node_id, topology_keys, max_volumes}], csinode_writes, node_writes
//	node        labels, csinode_writes, node_writes
//	done        command, error, csinode_writes, node_writes
//
// csinode and node are printed after each successful write of the kubelet and on request; an empty
// field or a 0 is left out. csinode_writes and node_writes count those writes since the process
// started. The first csinode write, before any driver, creates the object; with an earlier state
// there is none. If the API server refuses a write, the error is in the register event.
//
// Commands on standard input, one a line, each answered by a done event:
//
//	csinode         print the CSINode
//	node            print the Node's labels
//	label KEY=VALUE give the Node a label; an empty value removes it
//	api down        the API server fails every call
//	api up          and works again
package main

import (
	"os"

	"csi-registrar/internal/test/e2e/kubelet"
)

func main() {
	os.Exit(kubelet.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
