package doctor

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/mountinfo"
	"csi-registrar/internal/test/fake"
)

// TestDirectoryAtTheSocket checks that the command that root pastes removes an empty directory and
// nothing in it.
func TestDirectoryAtTheSocket(t *testing.T) {
	n := newNode(t)
	n.driver.stop()
	n.remove(n.socket())
	n.mkdir(n.socket(), 0o755)
	n.restartDaemon()
	fixes := ""
	for _, f := range n.examine().Findings {
		fixes += lines(f.Fix) + "\n"
	}
	if !strings.Contains(fixes, "rmdir "+n.socket()) || strings.Contains(fixes, "rm -") {
		t.Error(fixes)
	}
}

// TestLongProcFile checks that a file in /proc that a process made long is read up to the limit.
func TestLongProcFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cmdline")
	if err := os.WriteFile(file, make([]byte, 2*maxProcFile), 0o600); err != nil {
		t.Fatal(err)
	}
	if data, err := readSome(file, maxProcFile); len(data) != maxProcFile || err != nil {
		t.Errorf("%d bytes, %v", len(data), err)
	}
}

// TestPlacesInTheStore checks that the store needs as many places as there are drivers.
func TestPlacesInTheStore(t *testing.T) {
	for places, small := range map[string]bool{"0": true, "1": false} { // there is one driver
		n := newNode(t)
		n.units[serviceUnit]["FileDescriptorStoreMax"] = places
		found := false
		for _, f := range n.examine().Findings {
			found = found || f.ID == "store-too-small"
		}
		if found != small {
			t.Errorf("%s places: too small: %v", places, found)
		}
	}
}

// TestYoungRegistration checks that the kubelet has a moment to call a new socket, and to answer
// for one.
func TestYoungRegistration(t *testing.T) {
	for age, want := range map[time.Duration]bool{time.Second: false, 10 * time.Second: true, -time.Hour: true} {
		n := newNode(t)
		d := &n.status.Drivers[0]
		d.State, d.Registration, d.Since = string(status.Published), status.Published, time.Now().Add(-age)
		d.LastGetInfoAt, d.RegisteredAt = time.Time{}, time.Time{}
		found := false
		for _, f := range n.examine().Findings {
			found = found || f.ID == "kubelet-not-asking"
		}
		if found != want {
			t.Errorf("published for %s: a finding: %v, want %v", age, found, want)
		}
	}
}

// TestYoungSocketOfOthers checks that a socket without a listener is stale only after a moment:
// bind comes before listen.
func TestYoungSocketOfOthers(t *testing.T) {
	n := newNode(t)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: filepath.Join(n.registry(), "other.example-reg.sock")}); err != nil {
		t.Fatal(err)
	}
	if findings := n.examine().Findings; len(findings) > 0 {
		t.Errorf("%+v", findings)
	}
}

// TestFilesFromBeforeTheClockWasSetBack checks that files with a time in the future are not young.
func TestFilesFromBeforeTheClockWasSetBack(t *testing.T) {
	n := newNode(t)
	n.volume(volumeOfPod, volData, -time.Hour)
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: filepath.Join(n.registry(), "other.example-reg.sock")})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	stale.Close()
	made := time.Now().Add(time.Hour)
	if err := os.Chtimes(filepath.Join(n.registry(), "other.example-reg.sock"), made, made); err != nil {
		t.Fatal(err)
	}
	found := map[ID]bool{}
	for _, f := range n.examine().Findings {
		found[f.ID] = true
	}
	if !found["volume-not-mounted"] || !found["plugin-socket-stale"] {
		t.Errorf("found %v", found)
	}
}

// TestMountOverAMount checks that of two mounts at one point the later one counts, which covers the
// other.
func TestMountOverAMount(t *testing.T) {
	n := newNode(t)
	n.write("proc/self/mountinfo", "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 0:40 / /mnt/a rw - nfs4 first:/ rw\n23 22 0:41 / /mnt/a rw - nfs4 second:/ rw\n")
	x := newDiagnosis(Options{Root: n.root})
	if m := x.mountOf(t.Context(), "/mnt/a/b"); m.Source != "second:/" {
		t.Errorf("%+v", m)
	}
	var none mountinfo.Mount
	if m := x.mountOf(t.Context(), "/mnt/ab"); m != none {
		t.Errorf("%+v", m)
	}
}

// TestSocketsNear checks that only sockets are asked whether they are the driver's, and not too
// many.
func TestSocketsNear(t *testing.T) {
	dir := fake.ShortDir(t)
	if err := os.WriteFile(filepath.Join(dir, "a-file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range maxNearby + 1 {
		l, err := net.Listen("unix", filepath.Join(dir, fmt.Sprintf("%03d.sock", i)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
	}
	found := socketsNear(filepath.Join(dir, "csi.sock"))
	if len(found) != maxNearby || slices.Contains(found, filepath.Join(dir, "a-file")) {
		t.Errorf("%d: %q", len(found), found)
	}
}
