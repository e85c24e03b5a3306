// Package fake has stand-ins for the peers of the daemon: CSI drivers, the kubelet, the
// service manager, a file system that hangs. Tests, the demo and the bench use them; no
// shipped binary does.
package fake
