// Package fake has stand-ins for what the daemon works with: CSI drivers, the kubelet, the
// service manager, a file system that hangs. Tests, the demo and the bench use them; no
// shipped binary does.
package fake
