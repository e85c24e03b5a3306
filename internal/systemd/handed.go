package systemd

import (
	"maps"
	"os"
	"slices"

	"github.com/coreos/go-systemd/v22/activation"
)

// Handed holds the descriptors that the service manager handed over, of its sockets and
// of the descriptor store, by name; several may have one name. Their order has no meaning:
// systemd changes it from one start to the next. Not for use by several goroutines at once.
type Handed struct {
	files map[string][]*os.File
}

// Receive takes over the descriptors that LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES
// describe, and removes these variables, lest a child believes them its own. Without them,
// or when they are for another process, there are none. To be called once, early.
func Receive() *Handed {
	h := &Handed{files: map[string][]*os.File{}}
	for _, f := range activation.Files(true) {
		h.files[f.Name()] = append(h.files[f.Name()], f)
	}
	return h
}

// Take returns the descriptors of that name; they are the caller's to close. A second
// call with the same name returns none. A listener is made of one with
// net.FileListener, which makes a copy: close the file afterwards. Never call Fd on a
// file of a listener that is in use: it makes the socket blocking for everybody who
// shares it.
func (h *Handed) Take(name string) []*os.File {
	files := h.files[name]
	delete(h.files, name)
	return files
}

// Names returns the names of what was not taken yet, sorted.
func (h *Handed) Names() []string {
	return slices.Sorted(maps.Keys(h.files))
}

// Rest takes everything that nobody took: the caller logs it by its Name and closes it.
func (h *Handed) Rest() []*os.File {
	var rest []*os.File
	for _, name := range h.Names() {
		rest = append(rest, h.Take(name)...)
	}
	return rest
}
