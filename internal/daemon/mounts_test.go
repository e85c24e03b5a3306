package daemon

import (
	"strings"
	"testing"

	"csi-registrar/internal/sys/mountinfo"
)

func TestLocate(t *testing.T) {
	const (
		root     = "20 1 8:1 / / rw - ext4 /dev/sda1 rw\n21 20 0:5 / /proc rw - proc proc rw\n"
		sandbox  = "40 20 8:1 /var/lib/kubelet/plugins_registry /var/lib/kubelet/plugins_registry rw - ext4 /dev/sda1 rw\n"
		late     = "50 20 8:2 /k /var/lib/kubelet rw - ext4 /dev/sdb1 rw\n"
		path     = "/var/lib/kubelet/plugins_registry"
		onRoot   = "8:1 " + path
		onSecond = "8:2 /k/plugins_registry"
	)
	for what, c := range map[string]struct{ mounts, path, want string }{
		"no mount":                      {root, path, onRoot},
		"the sandbox's own":             {root + sandbox, path, onRoot},
		"a late mount":                  {root + late, path, onSecond},
		"a late mount over a sandbox":   {root + sandbox + late, path, onSecond},
		"a sandbox on a late mount":     {root + late + "60 50 8:2 /k/plugins_registry /var/lib/kubelet/plugins_registry rw - ext4 /dev/sdb1 rw\n", path, onSecond},
		"a mount below a sandbox's":     {root + "41 20 8:2 /r /var/lib/kubelet/plugins_registry rw - ext4 /dev/sdb1 rw\n40 41 8:1 " + path + " " + path + " rw - ext4 /dev/sda1 rw\n", path, onRoot},
		"one over another":              {root + late + "70 50 8:3 / /var/lib/kubelet rw - ext4 /dev/sdc1 rw\n", path, "8:3 /plugins_registry"},
		"a name that begins the same":   {root + "50 20 8:2 /k /var/lib/kube rw - ext4 /dev/sdb1 rw\n", path, onRoot},
		"a name with a blank":           {root + "50 20 8:2 / /var/lib/my\\040kubelet rw - ext4 /dev/sdb1 rw\n", "/var/lib/my kubelet/x", "8:2 /x"},
		"a root that is its own parent": {"20 20 8:1 / / rw - ext4 /dev/sda1 rw\n", path, onRoot},
	} {
		all, err := mountinfo.Parse(strings.NewReader(c.mounts))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := locate(all, c.path); got != c.want || err != nil {
			t.Errorf("%s: %q, %v, want %q", what, got, err, c.want)
		}
	}
}
