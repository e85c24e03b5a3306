package sampledriver

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"csi-registrar/internal/test/fake"
)

// noMount is what mounting is like without the right to do it.
type noMount struct{ bindMount }

func (noMount) bind(string, string, bool) error { return syscall.EPERM }
func (noMount) unmount(string) error            { return syscall.EPERM }

// start serves d at a new socket until the test ends, and gives the connection.
func start(t *testing.T, d *Driver) (conn grpc.ClientConnInterface, socket string) {
	t.Helper()
	socket = filepath.Join(fake.ShortDir(t), "csi.sock")
	return startAt(t, d, socket), socket
}

// rootDir returns a root directory of a kubelet.
func rootDir(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for _, dir := range []string{"pods", "plugins", "plugins_registry"} {
		if err := os.Mkdir(filepath.Join(root, dir), 0o750); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func startAt(t *testing.T, d *Driver, socket string) grpc.ClientConnInterface {
	t.Helper()
	if d.Data == "" {
		d.Data = filepath.Join(filepath.Dir(socket), "volumes")
	}
	if d.RootDir == "" {
		d.RootDir = rootDir(t)
	}
	d.Log = slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Serve(ctx, socket) }()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve = %v", err)
		}
		if _, err := os.Lstat(socket); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket is still there: %v", err)
		}
		_ = conn.Close()
	})
	_, err = csi.NewIdentityClient(conn).Probe(t.Context(), &csi.ProbeRequest{}, grpc.WaitForReady(true))
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

func mountCapability(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
	}
}

var writer = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER

func create(t *testing.T, c csi.ControllerClient, name string) *csi.Volume {
	t.Helper()
	created, err := c.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name:               name,
		VolumeCapabilities: []*csi.VolumeCapability{mountCapability(writer)},
	})
	if err != nil {
		t.Fatal(err)
	}
	return created.GetVolume()
}

func wantCode(t *testing.T, err error, want codes.Code) {
	t.Helper()
	if got := status.Code(err); got != want {
		t.Errorf("code = %v (%v), want %v", got, err, want)
	}
}

func TestIdentityAndNodeInfo(t *testing.T) {
	conn, socket := start(t, &Driver{
		Name: "a.example", Version: "7", NodeID: "n1", MaxVolumes: 5,
		Topology: map[string]string{"example/zone": "z1"},
	})
	info, err := csi.NewIdentityClient(conn).GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
	if err != nil || info.GetName() != "a.example" || info.GetVendorVersion() != "7" {
		t.Errorf("GetPluginInfo = %v, %v", info, err)
	}
	node, err := csi.NewNodeClient(conn).NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	if err != nil || node.GetNodeId() != "n1" || node.GetMaxVolumesPerNode() != 5 ||
		node.GetAccessibleTopology().GetSegments()["example/zone"] != "z1" {
		t.Errorf("NodeGetInfo = %v, %v", node, err)
	}
	stat, err := os.Lstat(socket)
	if err != nil || stat.Mode() != os.ModeSocket|0o600 {
		t.Errorf("the socket is %v, %v, want mode 0600", stat.Mode(), err)
	}
}

func TestVolumesSurviveTheDriver(t *testing.T) {
	data := t.TempDir()
	conn, _ := start(t, &Driver{Name: "a", Version: "1", NodeID: "n", Data: data})
	first := create(t, csi.NewControllerClient(conn), "pvc-1")

	conn, _ = start(t, &Driver{Name: "a", Version: "1", NodeID: "n", Data: data})
	c := csi.NewControllerClient(conn)
	if again := create(t, c, "pvc-1"); again.GetVolumeId() != first.GetVolumeId() {
		t.Errorf("second id = %s, want %s", again.GetVolumeId(), first.GetVolumeId())
	}
	_, err := c.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name:               "pvc-1",
		VolumeCapabilities: []*csi.VolumeCapability{mountCapability(writer)},
		CapacityRange:      &csi.CapacityRange{RequiredBytes: 5 << 30},
	})
	wantCode(t, err, codes.AlreadyExists)
	if _, err := c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: first.GetVolumeId()}); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(data); err != nil || len(left) != 0 {
		t.Errorf("left in the data directory: %v, %v", left, err)
	}
}

// No name and no id may reach a path outside the data directory.
func TestNoEscape(t *testing.T) {
	base := rootDir(t)
	data := filepath.Join(base, "plugins", "a", "volumes")
	victim := filepath.Join(base, "plugins", "victim")
	if err := os.MkdirAll(filepath.Join(victim, "data"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(victim, "volume.json"), []byte(`{"id":"../../victim"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	conn, _ := start(t, &Driver{Name: "a", Version: "1", NodeID: "n", Data: data, RootDir: base})
	c, n := csi.NewControllerClient(conn), csi.NewNodeClient(conn)

	if v := create(t, c, "../../victim"); !validID(v.GetVolumeId()) {
		t.Errorf("id = %q", v.GetVolumeId())
	}
	for _, id := range []string{"../../victim", "..", ".", "vol-" + strings.Repeat("/", 32), "vol-../../" + strings.Repeat("a", 26)} {
		if _, err := c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id}); err != nil {
			t.Errorf("DeleteVolume(%q) = %v", id, err)
		}
		_, err := n.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{
			VolumeId: id, TargetPath: filepath.Join(base, "pods", "target"), VolumeCapability: mountCapability(writer),
		})
		wantCode(t, err, codes.NotFound)
	}
	id := create(t, c, "pvc").GetVolumeId()
	for _, target := range []string{"relative", base + "/x/../../etc", data, filepath.Join(data, id), data + "//" + id} {
		_, err := n.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{
			VolumeId: id, TargetPath: target, VolumeCapability: mountCapability(writer),
		})
		wantCode(t, err, codes.InvalidArgument)
		_, err = n.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
		wantCode(t, err, codes.InvalidArgument)
	}
	if _, err := os.Stat(filepath.Join(victim, "data")); err != nil {
		t.Errorf("the directory outside was touched: %v", err)
	}
}

func TestCreateRefuses(t *testing.T) {
	conn, _ := start(t, &Driver{Name: "a", Version: "1", NodeID: "n", Topology: map[string]string{"zone": "z1"}})
	c := csi.NewControllerClient(conn)
	good := []*csi.VolumeCapability{mountCapability(writer)}
	for name, tt := range map[string]struct {
		request *csi.CreateVolumeRequest
		want    codes.Code
	}{
		"block": {&csi.CreateVolumeRequest{Name: "x", VolumeCapabilities: []*csi.VolumeCapability{{
			AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
			AccessMode: good[0].AccessMode,
		}}}, codes.InvalidArgument},
		"many nodes": {&csi.CreateVolumeRequest{Name: "x", VolumeCapabilities: []*csi.VolumeCapability{
			mountCapability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER),
		}}, codes.InvalidArgument},
		"newline":   {&csi.CreateVolumeRequest{Name: "x\ny", VolumeCapabilities: good}, codes.InvalidArgument},
		"long name": {&csi.CreateVolumeRequest{Name: strings.Repeat("x", 129), VolumeCapabilities: good}, codes.InvalidArgument},
		"range":     {&csi.CreateVolumeRequest{Name: "x", VolumeCapabilities: good, CapacityRange: &csi.CapacityRange{RequiredBytes: 2, LimitBytes: 1}}, codes.OutOfRange},
		"source":    {&csi.CreateVolumeRequest{Name: "x", VolumeCapabilities: good, VolumeContentSource: &csi.VolumeContentSource{}}, codes.InvalidArgument},
		"elsewhere": {&csi.CreateVolumeRequest{Name: "x", VolumeCapabilities: good, AccessibilityRequirements: &csi.TopologyRequirement{
			Requisite: []*csi.Topology{{Segments: map[string]string{"zone": "z2"}}},
		}}, codes.ResourceExhausted},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.CreateVolume(t.Context(), tt.request)
			wantCode(t, err, tt.want)
		})
	}
}

func TestListPages(t *testing.T) {
	conn, _ := start(t, &Driver{Name: "a", Version: "1", NodeID: "n"})
	c := csi.NewControllerClient(conn)
	var want []string
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		want = append(want, create(t, c, name).GetVolumeId())
	}
	slices.Sort(want)
	var got []string
	for token := ""; ; {
		page, err := c.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 2, StartingToken: token})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range page.GetEntries() {
			got = append(got, e.GetVolume().GetVolumeId())
		}
		if token = page.GetNextToken(); token == "" {
			break
		}
		// A token must stay good when its volume goes.
		if _, err := c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: token}); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("pages hold %v, want %v", got, want)
	}
}

// A caller cannot mount a volume over /etc, nor unmount one there.
func TestOnlyTheKubeletsPaths(t *testing.T) {
	// A driver with this defect would mount over / of the machine that runs the test.
	d := &Driver{Name: "a", Version: "1", NodeID: "n", mount: noMount{}}
	conn, _ := start(t, d)
	n := csi.NewNodeClient(conn)
	id, root := create(t, csi.NewControllerClient(conn), "pvc").GetVolumeId(), d.RootDir
	// as a pod can in its volume
	if err := os.Symlink("/etc", filepath.Join(root, "pods", "link")); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{
		"/etc/kubernetes", "/", root, filepath.Join(root, "x"), filepath.Join(root, "pods"), filepath.Join(root, "plugins_registry", "x"),
		root + "/pods-2/x", root + "/pods/link/x", "/var/lib/other/pods/x",
	} {
		for what, call := range map[string]func() error{
			"NodeStageVolume": func() error {
				_, err := n.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: path, VolumeCapability: mountCapability(writer)})
				return err
			},
			"NodeUnstageVolume": func() error {
				_, err := n.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: path})
				return err
			},
			"NodePublishVolume": func() error {
				_, err := n.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{
					VolumeId: "csi-1", TargetPath: path, VolumeCapability: mountCapability(writer), VolumeContext: ephemeral,
				})
				return err
			},
			"NodeUnpublishVolume": func() error {
				_, err := n.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: path})
				return err
			},
		} {
			if err := call(); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "--root-dir") {
				t.Errorf("%s at %s: %v", what, path, err)
			}
		}
	}
}

func TestMountWithoutRights(t *testing.T) {
	d := &Driver{Name: "a", Version: "1", NodeID: "n", mount: noMount{}}
	conn, _ := start(t, d)
	n := csi.NewNodeClient(conn)
	id := create(t, csi.NewControllerClient(conn), "pvc").GetVolumeId()
	target := filepath.Join(d.RootDir, "pods", "target")
	for what, call := range map[string]func() error{
		"NodeStageVolume": func() error {
			_, err := n.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
				VolumeId: id, StagingTargetPath: target, VolumeCapability: mountCapability(writer),
			})
			return err
		},
		"NodePublishVolume": func() error {
			_, err := n.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{
				VolumeId: "csi-1", TargetPath: target, VolumeCapability: mountCapability(writer), VolumeContext: ephemeral,
			})
			return err
		},
	} {
		err := call()
		wantCode(t, err, codes.PermissionDenied)
		if !strings.Contains(err.Error(), "CAP_SYS_ADMIN") {
			t.Errorf("%s: the error does not say what to do: %v", what, err)
		}
		if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: the target was left behind: %v", what, err)
		}
	}
	if left, err := os.ReadDir(d.Data); err != nil || len(left) != 1 || left[0].Name() != id {
		t.Errorf("in the data directory: %v, %v, want %s alone", left, err, id)
	}
}

var ephemeral = map[string]string{ephemeralKey: "true"}

// withMounts gives the test a mount namespace of its own, so that nothing leaks, and a driver for
// it.
func withMounts(t *testing.T) (*Driver, controller, node) {
	t.Helper()
	// The namespace belongs to this thread alone; as it is never unlocked, the thread
	// ends with the test. The handlers of a gRPC server would run on other threads, so
	// they are called directly.
	runtime.LockOSThread()
	if err := syscall.Unshare(syscall.CLONE_NEWNS); err != nil {
		reason := "real mounts: no mount namespace to be had (root with CAP_SYS_ADMIN can): " + err.Error()
		if os.Getenv("CI") == "true" {
			t.Fatal(reason)
		}
		t.Skip(reason)
	}
	if err := syscall.Mount("", "/", "", syscall.MS_PRIVATE|syscall.MS_REC, ""); err != nil {
		t.Fatal(err)
	}
	d := &Driver{Name: "a", Version: "1", NodeID: "n", Data: t.TempDir(), RootDir: rootDir(t), mount: bindMount{}}
	return d, controller{d: d}, node{d: d}
}

func TestStageAndPublish(t *testing.T) {
	d, c, n := withMounts(t)
	created, err := c.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "pvc", VolumeCapabilities: []*csi.VolumeCapability{mountCapability(writer)},
	})
	if err != nil {
		t.Fatal(err)
	}
	id := created.GetVolume().GetVolumeId()
	target, staging := filepath.Join(d.RootDir, "pods", "target"), filepath.Join(d.RootDir, "plugins", "staging")
	publish := &csi.NodePublishVolumeRequest{
		VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: mountCapability(writer), Readonly: true,
	}
	unpublish := &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target}
	stage := &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: mountCapability(writer)}
	unstage := &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging}
	_, err = n.NodePublishVolume(t.Context(), publish)
	wantCode(t, err, codes.FailedPrecondition)
	// Twice each: the calls are idempotent.
	for range 2 {
		if _, err := n.NodeStageVolume(t.Context(), stage); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if _, err := n.NodePublishVolume(t.Context(), publish); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(target, "x"), 0o700); !errors.Is(err, syscall.EROFS) {
		t.Errorf("writing to a read-only volume = %v, want EROFS", err)
	}
	publish.Readonly = false
	_, err = n.NodePublishVolume(t.Context(), publish)
	wantCode(t, err, codes.AlreadyExists)
	_, err = c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	wantCode(t, err, codes.FailedPrecondition)
	for range 2 {
		if _, err := n.NodeUnpublishVolume(t.Context(), unpublish); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the target is still there: %v", err)
	}

	if _, err := n.NodePublishVolume(t.Context(), publish); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(target, "file"), []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(filepath.Join(d.content(id), "file")); err != nil || string(text) != "kept" {
		t.Errorf("the volume holds %q, %v", text, err)
	}
	// As after a reboot: volume.json still tells of the mount.
	if err := syscall.Unmount(target, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := n.NodeUnpublishVolume(t.Context(), unpublish); err != nil {
		t.Fatal(err)
	}
	_, err = c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	wantCode(t, err, codes.FailedPrecondition) // it is still staged
	for range 2 {
		if _, err := n.NodeUnstageVolume(t.Context(), unstage); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Lstat(staging); err != nil {
		t.Errorf("the kubelet's staging directory: %v", err)
	}
	if _, err := c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id}); err != nil {
		t.Fatal(err)
	}
}

func TestHealth(t *testing.T) {
	d, c, n := withMounts(t)
	created, err := c.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "pvc", VolumeCapabilities: []*csi.VolumeCapability{mountCapability(writer)},
	})
	if err != nil {
		t.Fatal(err)
	}
	id, staging := created.GetVolume().GetVolumeId(), filepath.Join(d.RootDir, "plugins", "staging")
	volume := func(path string) string {
		r, err := n.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id, StagingTargetPath: path, VolumePublishPath: path})
		if err != nil || r.GetVolumeHealth().GetVolumeId() != id {
			t.Errorf("NodeGetVolumeHealth = %v, %v", r, err)
		}
		var all []string
		for _, s := range r.GetVolumeHealth().GetHealthStatuses() {
			all = append(all, s.GetStatus().String()+" "+s.GetReason())
		}
		return strings.Join(all, ", ")
	}
	storage := func() int {
		r, err := n.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{Secrets: map[string]string{"token": "secret"}})
		if err != nil {
			t.Error(err)
		}
		return len(r.GetBackendHealth())
	}
	if got := volume(staging); got != "INACCESSIBLE NotMounted" {
		t.Errorf("before it is staged: %q", got)
	}
	if err := os.Mkdir(staging, 0o750); err != nil {
		t.Fatal(err)
	}
	if _, err := n.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: id, StagingTargetPath: staging, VolumeCapability: mountCapability(writer),
	}); err != nil {
		t.Fatal(err)
	}
	if got := volume(staging) + volume(""); got != "" || storage() != 0 {
		t.Errorf("healthy: %q, %d", got, storage())
	}
	if _, err := n.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging}); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(d.content(id)); err != nil {
		t.Fatal(err)
	}
	if got := volume(""); got != "DATA_LOSS DirectoryMissing" {
		t.Errorf("without its directory: %q", got)
	}
	for _, id := range []string{"", "vol-none"} {
		want := codes.NotFound
		if id == "" {
			want = codes.InvalidArgument
		}
		_, err := n.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id})
		wantCode(t, err, want)
	}
	if err := os.RemoveAll(d.Data); err != nil || storage() != 1 {
		t.Errorf("without the directory of all volumes: %v, %d", err, storage())
	}
}

func TestEphemeralVolumeLivesWhileItIsPublished(t *testing.T) {
	d, c, n := withMounts(t)
	const id = "csi-../../0123"
	target := filepath.Join(d.RootDir, "pods", "target")
	publish := &csi.NodePublishVolumeRequest{VolumeId: id, TargetPath: target, VolumeCapability: mountCapability(writer)}
	_, err := n.NodePublishVolume(t.Context(), publish)
	wantCode(t, err, codes.NotFound)
	publish.VolumeContext = ephemeral
	for range 2 {
		if _, err := n.NodePublishVolume(t.Context(), publish); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(target, "file"), []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(filepath.Join(d.content(id), "file")); err != nil || string(text) != "kept" {
		t.Errorf("the volume holds %q, %v", text, err)
	}
	if _, err := n.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target}); err != nil {
		t.Error(err)
	}
	// The controller's calls know nothing of it.
	if list, err := c.ListVolumes(t.Context(), &csi.ListVolumesRequest{}); err != nil || len(list.GetEntries()) != 0 {
		t.Errorf("ListVolumes = %v, %v", list, err)
	}
	for _, id := range []string{id, directory(id)} {
		if _, err := c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id}); err != nil {
			t.Error(err)
		}
	}
	for range 2 {
		if _, err := n.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target}); err != nil {
			t.Fatal(err)
		}
		if left, err := os.ReadDir(d.Data); err != nil || len(left) != 0 {
			t.Errorf("left in the data directory: %v, %v", left, err)
		}
	}
	if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the target is still there: %v", err)
	}
	// The pod's author chooses neither the id nor what volumes there are.
	publish.VolumeId = volumeID("pvc")
	_, err = n.NodePublishVolume(t.Context(), publish)
	wantCode(t, err, codes.NotFound)
}

func TestExpand(t *testing.T) {
	d, c, n := withMounts(t)
	created, err := c.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "pvc", VolumeCapabilities: []*csi.VolumeCapability{mountCapability(writer)}, CapacityRange: &csi.CapacityRange{RequiredBytes: 5},
	})
	if err != nil {
		t.Fatal(err)
	}
	id, staging := created.GetVolume().GetVolumeId(), filepath.Join(d.RootDir, "plugins", "staging")
	if _, err := n.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: id, StagingTargetPath: staging, VolumeCapability: mountCapability(writer),
	}); err != nil {
		t.Fatal(err)
	}
	controllerTo := func(id string, r *csi.CapacityRange) (int64, error) {
		response, err := c.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: r})
		return response.GetCapacityBytes(), err
	}
	nodeTo := func(path string, required int64) (int64, error) {
		response, err := n.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
			VolumeId: id, VolumePath: path, CapacityRange: &csi.CapacityRange{RequiredBytes: required},
		})
		return response.GetCapacityBytes(), err
	}
	_, err = nodeTo(staging, 9)
	wantCode(t, err, codes.OutOfRange) // the controller comes first
	for _, required := range []int64{9, 9, 7} {
		if got, err := controllerTo(id, &csi.CapacityRange{RequiredBytes: required}); err != nil || got != 9 {
			t.Errorf("ControllerExpandVolume to %d = %d, %v, want 9", required, got, err)
		}
	}
	if got, err := nodeTo(staging, 9); err != nil || got != 9 {
		t.Errorf("NodeExpandVolume = %d, %v, want 9", got, err)
	}
	_, err = nodeTo(t.TempDir(), 9)
	wantCode(t, err, codes.NotFound)
	_, err = controllerTo(id, &csi.CapacityRange{LimitBytes: 8})
	wantCode(t, err, codes.OutOfRange)
	_, err = controllerTo(id, &csi.CapacityRange{RequiredBytes: 8, LimitBytes: 7})
	wantCode(t, err, codes.OutOfRange)
	_, err = controllerTo(id, nil)
	wantCode(t, err, codes.InvalidArgument)
	_, err = controllerTo(volumeID("other"), &csi.CapacityRange{RequiredBytes: 8})
	wantCode(t, err, codes.NotFound)
	if _, err := n.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging}); err != nil {
		t.Fatal(err)
	}
}

// Unpublishing removes a target that is an empty directory, and nothing else.
func TestUnpublishKeepsWhatIsNotOurs(t *testing.T) {
	d := &Driver{Name: "a", Version: "1", NodeID: "n"}
	conn, _ := start(t, d)
	id := create(t, csi.NewControllerClient(conn), "pvc").GetVolumeId()
	target := filepath.Join(d.RootDir, "pods", "target")
	if err := os.Mkdir(target, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(target, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := csi.NewNodeClient(conn).NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
	wantCode(t, err, codes.Internal)
	if _, err := os.Stat(filepath.Join(target, "file")); err != nil {
		t.Error(err)
	}
}

func TestSocketInTheWay(t *testing.T) {
	dir := fake.ShortDir(t)
	d := func() *Driver {
		return &Driver{Name: "a", Version: "1", NodeID: "n", Data: dir, Log: slog.New(slog.DiscardHandler)}
	}

	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d().Serve(t.Context(), file); err == nil || !strings.Contains(err.Error(), "held by a regular file") {
		t.Errorf("Serve on a file = %v", err)
	}

	socket := filepath.Join(dir, "socket")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	if err := d().Serve(t.Context(), socket); err == nil || !strings.Contains(err.Error(), "held by process") {
		t.Errorf("Serve on a live socket = %v", err)
	}

	listener.SetUnlinkOnClose(false)
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	startAt(t, d(), socket) // replaces the dead one, and answers
}
