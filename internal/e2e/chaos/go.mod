// A module of its own, so that nothing of it reaches the program's go.mod; it needs
// neither the kubelet's code nor a long build.
module csi-registrar/internal/e2e/chaos

go 1.26.0

require (
	csi-registrar v0.0.0
	github.com/container-storage-interface/spec v1.13.0
	github.com/fsnotify/fsnotify v1.10.1
	golang.org/x/sys v0.49.0
	google.golang.org/grpc v1.85.0
	google.golang.org/protobuf v1.36.12
	k8s.io/kubelet v0.36.3
)

require (
	golang.org/x/net v0.60.0 // indirect
	golang.org/x/text v0.42.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260817212433-ac3dfec99bb1 // indirect
)

replace csi-registrar => ../../..
