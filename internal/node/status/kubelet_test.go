package status

import (
	"testing"
	"time"
)

func TestKubeletEnded(t *testing.T) {
	now := time.Unix(1000, 0)
	ended := Kubelet{PID: 812, EndedAt: now.Add(-40 * time.Second)}
	for _, test := range []struct {
		name    string
		kubelet Kubelet
		driver  Driver
		want    string
	}{
		{"not known", Kubelet{}, Driver{Registration: Registered}, ""},
		{"running", Kubelet{PID: 812}, Driver{Registration: Registered}, ""},
		{"not confirmed", ended, Driver{Registration: Published}, ""},
		{"ended", ended, Driver{Registration: Registered, LastGetInfoAt: now.Add(-time.Hour)},
			"the kubelet (pid 812) that confirmed this ended 40s ago; none has asked since"},
		{"asked", ended, Driver{Registration: Registered, LastGetInfoAt: now},
			"the kubelet (pid 812) that confirmed this ended 40s ago; one has asked since, and has not confirmed"},
		{"pid not visible", Kubelet{EndedAt: now.Add(-time.Hour)}, Driver{Registration: Registered},
			"the kubelet that confirmed this ended 1h0m0s ago; none has asked since"},
	} {
		if got := (Document{Kubelet: test.kubelet}).KubeletEnded(test.driver, now); got != test.want {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
	}
}
