// Package fake has stand-ins for what csi-registrar talks to: CSI drivers and the kubelet.
// Tests, the demo and the benchmarks use them; no shipped binary does.
package fake
