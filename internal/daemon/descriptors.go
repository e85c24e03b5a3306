package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"csi-registrar/internal/core/regsocket"
	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/sys/systemd"
)

// Names of descriptors: FileDescriptorName= of the socket units.
const (
	controlName = "control"
	httpName    = "http"
)

// descriptors are the descriptors that the service manager passed: its sockets, and the contents of
// the descriptor store. The previous process could store anything under any name, so a descriptor
// is used only if it matches its name. The others do not prevent a start, and are removed from the
// store with those of the same name that are used (regsocket.Socket.Adopt), or by forgetUnused.
type descriptors struct {
	control []*os.File // Unix sockets that listen at the path of the control socket
	http    []*os.File // sockets that listen
	// by driver; several if a process died while it replaced one
	stored map[string][]*os.File
	// the names of all descriptors that can be in the store, each as often as it was passed
	held   []string
	unused []unusedFile // all other descriptors
}

type unusedFile struct {
	*os.File
	reason error
}

// sortDescriptors takes over the files. control is the path of the control socket.
func sortDescriptors(files []*os.File, control string) *descriptors {
	d := &descriptors{stored: map[string][]*os.File{}}
	for _, f := range files {
		if err := d.add(f, control); err != nil {
			d.unused = append(d.unused, unusedFile{f, err})
		}
	}
	return d
}

func (d *descriptors) add(f *os.File, control string) error {
	driver, isRegistration := strings.CutPrefix(f.Name(), regsocket.StorePrefix)
	if f.Name() != controlName && f.Name() != httpName {
		d.held = append(d.held, f.Name())
		if !isRegistration || csiname.CheckName(driver) != nil {
			return errors.New("the name is unknown")
		}
		d.stored[driver] = append(d.stored[driver], f)
		return nil
	}
	network, address, err := systemd.ListenAddress(f)
	switch {
	case err != nil:
		return err
	case f.Name() == httpName:
		d.http = append(d.http, f)
	case network != "unix":
		return errors.New("not a Unix socket")
	case address != control:
		return fmt.Errorf("it listens on %q", address)
	default:
		d.control = append(d.control, f)
	}
	return nil
}

// forgetUnused closes the unused descriptors and removes them from the descriptor store. It does
// not wait for the service manager: there can be thousands.
func (d *daemon) forgetUnused() {
	done, cancel := context.WithCancel(context.Background())
	cancel()
	for _, u := range d.handed.unused {
		d.note("close a descriptor", u.Close())
		d.note("remove a descriptor from the store", d.parts.store.Forget(done, u.Name()))
	}
	if unused := d.handed.unused; len(unused) > 0 {
		d.log.Warn("closed descriptors of the service manager that are not used",
			"count", len(unused), "first", unused[0].Name(), "reason", unused[0].reason)
	}
	d.handed.unused = nil
}

// listener returns the listener of a descriptor. The service manager owns its path, so Close does
// not remove it.
func listener(f *os.File) (net.Listener, error) {
	ln, err := net.FileListener(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("cannot use the socket %s from the service manager: %w", f.Name(), err)
	}
	return ln, nil
}
