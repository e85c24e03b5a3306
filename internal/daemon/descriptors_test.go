package daemon

import (
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/core/regsocket"
	"csi-registrar/internal/sys/systemd"
	"csi-registrar/internal/test/fake"
)

// TestEachDescriptorIsUsedOrClosed checks that every descriptor that the service manager passed is
// in one place, and that what is not used is closed.
func TestEachDescriptorIsUsedOrClosed(t *testing.T) {
	dir := fake.ShortDir(t)
	listener := func(name string) *os.File {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		f, err := l.File()
		if err != nil {
			t.Fatal(err)
		}
		return os.NewFile(dup(t, f), regsocket.StorePrefix+name)
	}
	other := func(name string) *os.File {
		f, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		return os.NewFile(dup(t, f), name)
	}
	const prefix = regsocket.StorePrefix
	files := []*os.File{
		listener("a.example"), other(prefix + "a.example"), listener("b.example"), listener("b.example2"),
		other(prefix + "gone.example"), other("junk"), other("junk"), other("control"), other("http"),
	}
	named := func(listens, name string) *os.File { return os.NewFile(dup(t, listener(listens)), name) }
	files = append(files, named("c", prefix+"b.example")) // two of one name
	files = append(files, named("d", prefix+"no driver"), named("control.sock", controlName), named("e", controlName), named("f", httpName))
	d := sortDescriptors(files, filepath.Join(dir, "control.sock"))
	places := map[*os.File]int{}
	for _, stored := range d.stored {
		for _, f := range stored {
			places[f]++
		}
	}
	for _, u := range d.unused {
		places[u]++
	}
	for _, f := range files {
		if _, err := f.Stat(); err != nil { // a listener has a copy
			places[f]++
		}
		if places[f] != 1 {
			t.Errorf("%s is in %d places", f.Name(), places[f])
		}
	}
	if len(d.stored) != 4 || len(d.stored["a.example"]) != 2 || len(d.stored["gone.example"]) != 1 || len(d.control) != 1 || len(d.http) != 1 {
		t.Errorf("stored %v, %d control sockets, %d for health", d.stored, len(d.control), len(d.http))
	}
	var names []string
	for _, u := range d.unused {
		names = append(names, u.Name())
	}
	if want := []string{"junk", "junk", "control", "http", prefix + "no driver", "control"}; !slices.Equal(names, want) {
		t.Errorf("unused: %q, want %q", names, want)
	}
	unused := slices.Clone(d.unused)
	x := &daemon{handed: d, log: slog.New(slog.DiscardHandler), parts: &parts{store: systemd.NewStore(nil, systemd.StoreOptions{})}}
	x.forgetUnused()
	for _, u := range unused {
		if err := u.Close(); err == nil {
			t.Errorf("%s was left open", u.Name())
		}
	}
	for name, stored := range d.stored {
		for _, f := range stored {
			if err := f.Close(); err != nil {
				t.Errorf("%s was closed: %v", name, err)
			}
		}
	}
	for _, l := range slices.Concat(d.control, d.http) {
		if err := l.Close(); err != nil {
			t.Errorf("%s was closed: %v", l.Addr(), err)
		}
	}
}

// dup returns a copy of a descriptor, and closes the file.
func dup(t *testing.T, f *os.File) uintptr {
	t.Helper()
	defer f.Close()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return uintptr(fd)
}
