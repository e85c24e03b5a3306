// Package fake has fakes of the daemon's peers for tests, the demo and the benchmark: CSI drivers,
// the kubelet, the service manager, a file system that hangs. No shipped binary contains them.
package fake
