package daemon

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"csi-registrar/internal/kubelet"
	"csi-registrar/internal/status"
	"csi-registrar/internal/systemd"
)

// Names of descriptors: FileDescriptorName= of the socket units.
const (
	controlName = "control"
	httpName    = "http"
)

// descriptors are what the service manager handed over, of its sockets and of the descriptor store.
// The process before this one could store anything under any name, so each descriptor is used only
// if it is what its name says. No start fails because of the others.
type descriptors struct {
	control []*os.File // Unix sockets that listen at the path of the control socket
	http    []*os.File // sockets that listen
	// Unix sockets that listen, by driver; several if a process died between two
	stored  map[string][]*os.File
	kubelet []*os.File // pidfds
	// the names of all that can be in the store, each as often as it was handed over
	held   []string
	unused []unusedFile // everything else
	forget []string     // the names of unused descriptors that no used one has
}

type unusedFile struct {
	*os.File
	reason error
}

// sortDescriptors takes over the files. runDir is where the control socket is.
func sortDescriptors(files []*os.File, runDir string) *descriptors {
	d := &descriptors{stored: map[string][]*os.File{}}
	for _, f := range files {
		if err := d.add(f, runDir); err != nil {
			d.unused = append(d.unused, unusedFile{f, err})
		}
	}
	// Who adopts a registration socket replaces all descriptors of its name in the store, if there
	// are several. So one of those that are not used goes with it.
	d.unused = slices.DeleteFunc(d.unused, func(u unusedFile) bool {
		driver := strings.TrimPrefix(u.Name(), kubelet.StorePrefix)
		beside := len(d.stored[driver]) == 1
		if beside {
			d.stored[driver] = append(d.stored[driver], u.File)
		}
		return beside
	})
	for _, u := range d.unused {
		if d.stored[strings.TrimPrefix(u.Name(), kubelet.StorePrefix)] == nil {
			d.forget = append(d.forget, u.Name())
		}
	}
	return d
}

func (d *descriptors) add(f *os.File, runDir string) error {
	driver, isRegistration := strings.CutPrefix(f.Name(), kubelet.StorePrefix)
	if f.Name() != controlName && f.Name() != httpName {
		d.held = append(d.held, f.Name())
		if f.Name() == kubelet.ProcessName {
			d.kubelet = append(d.kubelet, f) // checked by kubelet.Process.Adopt
			return nil
		}
		if !isRegistration || status.CheckName(driver) != nil {
			return errors.New("nothing of this name is used")
		}
	}
	network, address, err := systemd.ListenAddress(f)
	switch {
	case err != nil:
		return err
	case f.Name() == httpName:
		d.http = append(d.http, f)
	case network != "unix":
		return errors.New("not a Unix socket")
	case isRegistration:
		d.stored[driver] = append(d.stored[driver], f)
	case address != filepath.Join(runDir, controlSocket):
		return fmt.Errorf("it listens on %q", address)
	default:
		d.control = append(d.control, f)
	}
	return nil
}

// forgetUnused closes what is not used and has the descriptor store forget it. It does not wait for
// the service manager: there can be thousands.
func (d *daemon) forgetUnused() {
	const mostLogged = 5
	for i, u := range d.handed.unused {
		if i < mostLogged {
			d.log.Warn("closing a descriptor that was handed over", "name", u.Name(), "reason", u.reason)
		}
		d.note("closing a descriptor", u.Close())
	}
	if more := len(d.handed.unused) - mostLogged; more > 0 {
		d.log.Warn("closing more descriptors that were handed over", "count", more)
	}
	d.note("forgetting descriptors", d.parts.store.ForgetAll(d.handed.forget))
	d.handed.unused, d.handed.forget = nil, nil
}

// listener makes a listener of a descriptor that was handed over. Its path is the service
// manager's, so Close does not remove it.
func listener(f *os.File) (net.Listener, error) {
	ln, err := net.FileListener(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("cannot use the socket %s that the service manager handed over: %w", f.Name(), err)
	}
	return ln, nil
}
