package cgroup

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"csi-registrar/internal/node/status"
)

const (
	pod       = "0d8e24c2-3f5c-4b1b-9d3c-2a6f0c8e7b11"
	podScope  = "0d8e24c2_3f5c_4b1b_9d3c_2a6f0c8e7b11"
	container = "4f5d1c2b3a49586776859493a2b1c0d9e8f7a6b5c4d3e2f1a0b9c8d7e6f5a4b3"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]Place{
		"0::/system.slice/csi-nfs.service\n":                         {Unit: "csi-nfs.service"},
		"0::/system.slice/csi-nfs.service/libpod-payload-4f5d1c\n":   {Unit: "csi-nfs.service"},
		"2:cpu:/x.service\n1:name=systemd:/system.slice/y.service\n": {Unit: "y.service"},
		"0::/init.scope\n": {Unit: "init.scope"},
		"0::/\n":           {},
		"":                 {},
		"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + podScope + ".slice/cri-containerd-" + container + ".scope\n": {Pod: pod, Container: container},
		"0::/kubepods.slice/kubepods-pod" + podScope + ".slice/crio-" + container + ".scope/container\n":                                    {Pod: pod, Container: container},
		"0::/kubepods/besteffort/pod" + pod + "/" + container + "\n":                                                                        {Pod: pod, Container: container},
		"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + podScope + ".slice\n":                                             {Pod: pod},
		"0::/system.slice/k3s.service/kubepods/pod" + pod + "/" + container + "\n":                                                          {Pod: pod, Container: container},
		"0::/kubepods/pod0123456789abcdef0123456789abcdef/" + container + "\n":                                                              {Pod: "0123456789abcdef0123456789abcdef", Container: container},
		"0::/user.slice/user-1000.slice/user@1000.service/app.slice/csi-nfs.service\n":                                                      {},
		"0::/user.slice/user-1000.slice/user@1000.service/kubepods/pod" + pod + "/" + container + "\n":                                      {},
		"0::/system.slice/-x.service/csi-nfs.service\n":                                                                                     {},
	} {
		if got := Parse(text); got != want {
			t.Errorf("%q: %+v, expected %+v", text, got, want)
		}
	}
}

func TestInPod(t *testing.T) {
	for text, want := range map[string]bool{
		"0::/kubepods/besteffort/x\n":                true,
		"0::/kubepods.slice/kubepods-x.slice\n":      true,
		"0::/system.slice/kubelet.service\n":         false,
		"1:name=systemd:/\n2:cpu:/kubepods/pod1/x\n": true,
	} {
		if InPod(text) != want {
			t.Errorf("%q: expected %v", text, want)
		}
	}
}

func TestServer(t *testing.T) {
	proc := t.TempDir()
	for pid, text := range map[string]string{"1": "0::/init.scope\n", "7": "0::/system.slice/a.service\n", "8": "0::/" + strings.Repeat("x", maxSize) + "/b.service\n"} {
		if err := os.Mkdir(filepath.Join(proc, pid), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(proc, pid, "cgroup"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for pid, want := range map[int]status.Server{0: {}, 1: {}, 7: {PID: 7, Unit: "a.service"}, 8: {PID: 8}, 9: {}} {
		if got := Server(proc, pid); got != want {
			t.Errorf("%d: %+v, expected %+v", pid, got, want)
		}
	}
}
