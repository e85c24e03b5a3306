package importer

import (
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// listShapes are items of lists, complete, with errors, and all for one driver.
var listShapes = map[string]func(i int) string{
	"without a path": func(i int) string {
		return fmt.Sprintf("- {kind: DaemonSet, metadata: {name: a%d}, spec: {template: {spec: {containers: [{name: r, image: node-driver-registrar}]}}}}\n", i)
	},
	"complete": func(i int) string {
		return strings.ReplaceAll(`- apiVersion: apps/v1
  kind: DaemonSet
  metadata: {name: aNUM, namespace: kube-system}
  spec:
    template:
      spec:
        containers:
        - name: node-driver-registrar
          args: [--csi-address=/csi/csi.sock, --kubelet-registration-path=/var/lib/kubelet/plugins/dNUM.example/csi.sock]
          volumeMounts:
          - {name: s, mountPath: /csi}
          - {name: r, mountPath: /registration}
        - name: driver
          volumeMounts: [{name: s, mountPath: /csi}]
        volumes:
        - {name: s, hostPath: {path: /var/lib/kubelet/plugins/dNUM.example}}
        - {name: r, hostPath: {path: /var/lib/kubelet/plugins_registry}}
- apiVersion: storage.k8s.io/v1
  kind: CSIDriver
  metadata: {name: dNUM.example}
`, "NUM", fmt.Sprint(i))
	},
	"one driver": func(i int) string {
		return fmt.Sprintf(`- {kind: DaemonSet, metadata: {name: a%d}, spec: {template: {spec: {containers: [{name: r, image: node-driver-registrar, args: [--kubelet-registration-path=/x/a.example/csi.sock, --timeout=%ds],
    volumeMounts: [{name: s, mountPath: /csi}, {name: r, mountPath: /registration}]}, {name: d, args: [--drivername=a.example]}],
    volumes: [{name: s, hostPath: {path: /x}}, {name: r, hostPath: {path: /var/lib/kubelet/plugins_registry}}]}}}}
`, i, 20+i%9)
	},
	"unnamed": func(i int) string {
		return fmt.Sprintf(`- {kind: DaemonSet, metadata: {name: a%[1]d}, spec: {template: {spec: {containers: [{name: r, image: node-driver-registrar, args: [--kubelet-registration-path=/x/y%[1]d/csi.sock],
    volumeMounts: [{name: s, mountPath: /csi}, {name: r, mountPath: /registration}]}, {name: d}],
    volumes: [{name: s, hostPath: {path: /x/%[1]d}}, {name: r, hostPath: {path: /var/lib/kubelet/plugins_registry}}]}}}}
- {kind: CSIDriver, metadata: {name: d%[1]d.example}}
`, i)
	},
}

func listOf(n int, item func(int) string) []File {
	var b strings.Builder
	b.WriteString("apiVersion: v1\nitems:\n")
	for i := range n {
		b.WriteString(item(i))
	}
	b.WriteString("kind: List\nmetadata:\n  resourceVersion: \"\"\n")
	return []File{{Name: "x", Data: []byte(b.String())}}
}

// A list of all DaemonSets of a large cluster, or a hostile one, needs time in proportion to its
// length.
func TestLargeLists(t *testing.T) {
	// The time of the garbage collector, which has other threads, depends on the machine.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cpu := func() time.Duration {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_THREAD, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	for name, item := range listShapes {
		took := func(n int) time.Duration {
			began := cpu()
			if res := Import(listOf(n, item), nil); len(res.Registrars)+len(res.Refused) == 0 {
				t.Fatal("nothing was found")
			}
			return cpu() - began
		}
		took(100)
		few, many := took(300), took(300*8)
		t.Logf("%s: %s, 8 times as many %s", name, few, many)
		if many > 24*few {
			t.Errorf("%s: 300 items take %s, 8 times as many %s", name, few, many)
		}
	}
}

// A list is read item by item, with the same result as in one piece.
func TestListsAreReadByItem(t *testing.T) {
	for name, item := range listShapes {
		list := listOf(20, item)
		if _, ok := splitItems(list[0].Data); !ok {
			t.Errorf("%s: it is not read by item", name)
		}
		whole := []File{{Name: "x", Data: append([]byte("# read as a whole\n"), list[0].Data...)}}
		if _, ok := splitItems(whole[0].Data); ok {
			t.Errorf("%s: the comment is accepted", name)
		}
		if got, want := Import(list, nil), Import(whole, nil); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v\nin one piece %+v", name, got, want)
		}
	}
	for _, item := range []string{
		`{"kind": "DaemonSet", "metadata": {"name": "a\/\u0041\ud83d\ude00"}, "spec": {"template": {"spec": {"containers": [{"name": "r", "image": "node-driver-registrar"}]}}}}`,
		`{"kind": 1}`, `[]`, `{"kind": "x", "kind": "x"}`, `null`, `"x"`,
	} {
		list := fmt.Sprintf(`{"apiVersion": "v1", "items": [%s, {}], "kind": "List", "metadata": {"resourceVersion": ""}}`, item)
		if _, ok := splitItems([]byte(list)); !ok {
			t.Errorf("%s is not read by item", list)
		}
		got, want := Import([]File{{Name: "x", Data: []byte(list)}}, nil), Import([]File{{Name: "x", Data: []byte(list + "\n# whole")}}, nil)
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v\nin one piece %+v", item, got, want)
		}
	}
	for _, data := range []string{
		`{"kind": "List", "items": [{}]} {}`, `{"kind": "List", "items": [{}], "x": 1}`, `{"kind": "x", "items": [{}]}`, `{"kind": "List", "items": [{}]`,
		"items:\n- a: &x 1\n- b: *x\n", "kind: List\nitems:\n- a: *x\n", "kind: List\nitems:\n- a\nb: c\n", "kind: List\nitems:\n- a\n---\n- b\n", "kind: List\nitems: []\n",
	} {
		if _, ok := splitItems([]byte(data)); ok {
			t.Errorf("%q is read by item", data)
		}
	}
}

// No cluster has thousands of drivers: the rest of a longer list is not read.
func TestTooManyRegistrars(t *testing.T) {
	list := listOf(maxRegistrars+1, listShapes["without a path"])
	if res := Import(list, nil); len(res.Refused) != 1 || !strings.Contains(res.Refused[0].Reason, "more than 4096") {
		t.Errorf("%d refusals, the first: %+v", len(res.Refused), res.Refused[0])
	}
	large := []File{{Name: "x", Data: []byte("kind: Pod\n" + strings.Repeat("# x\n", maxWhole/4))}}
	if res := Import(large, nil); len(res.Refused) != 1 || !strings.Contains(res.Refused[0].Reason, "more than 8 MiB") {
		t.Errorf("%+v", res.Refused)
	}
}

// An error in an item of a list, which is then read as a whole, is reported once.
func TestErrorInAListIsReportedOnce(t *testing.T) {
	list := "apiVersion: v1\nitems:\n- kind: DaemonSet\n  metadata:\n    name: a\n  spec: wrong\nkind: List\n"
	if _, ok := splitItems([]byte(list)); !ok {
		t.Fatal("it is not read item by item")
	}
	if res := Import([]File{{Name: "x", Data: []byte(list)}}, nil); len(res.Refused) != 1 {
		t.Errorf("%+v", res.Refused)
	}
}
