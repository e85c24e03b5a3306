package cgroup

import (
	"testing"

	"csi-registrar/internal/sys/safetext"
)

// FuzzParse checks that what is found is the name of a unit that can be an argument, or a pod, and
// no container without a pod: a process may choose a part of the text.
func FuzzParse(f *testing.F) {
	f.Add("0::/system.slice/csi-nfs.service\n")
	f.Add("1:name=systemd:/kubepods/pod" + pod + "/" + container + "\n0::/x\n")
	f.Add("0::/kubepods.slice/kubepods-pod" + podScope + ".slice/crio-" + container + ".scope/x.service\n")
	f.Fuzz(func(t *testing.T, text string) {
		p := Parse(text)
		if p.Unit != "" && (!safetext.UnitName(p.Unit) || p.Pod != "") || p.Container != "" && p.Pod == "" || p.Pod != "" && !InPod(text) {
			t.Errorf("%+v", p)
		}
		if len(p.Pod) != 0 && len(p.Pod) != 36 && len(p.Pod) != 32 || len(p.Container) != 0 && len(p.Container) != 64 {
			t.Errorf("pod %q, container %q", p.Pod, p.Container)
		}
	})
}
