package systemd

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// firstHanded is the number of the first descriptor handed over (sd_listen_fds(3)).
const firstHanded = 3

// mostHanded bounds LISTEN_FDS, so that a wrong number does not make us close
// descriptors by the million. A process has rarely more than this open.
const mostHanded = 1 << 16

// Handed holds the descriptors that the service manager handed over, of its sockets and
// of the descriptor store, by name. Their order means nothing: systemd changes it from
// one start to the next. Not for use by several goroutines at once.
type Handed struct {
	files map[string][]*os.File
}

// Receive takes over the descriptors that LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES
// tell of, and sets close-on-exec on each. Without these variables, or when they are
// for another process, there are none and no error. getenv is os.Getenv. To be called
// once, early; the caller calls Unset afterwards, lest a child believes them its own.
func Receive(getenv func(string) string) (*Handed, error) {
	return receive(getenv, firstHanded)
}

func receive(getenv func(string) string, first int) (*Handed, error) {
	h := &Handed{files: map[string][]*os.File{}}
	if getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) || getenv("LISTEN_FDS") == "" {
		return h, nil
	}
	n, err := strconv.Atoi(getenv("LISTEN_FDS"))
	if err != nil || n < 0 || n > mostHanded {
		return h, fmt.Errorf("cannot take over descriptors: LISTEN_FDS=%q is not a sensible number", getenv("LISTEN_FDS"))
	}
	names := strings.Split(getenv("LISTEN_FDNAMES"), ":")
	for i := range n {
		fd := first + i
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
			h.closeAll()
			return h, fmt.Errorf("cannot take over descriptor %d of LISTEN_FDS=%d: %w", fd, n, err)
		}
		name := "unknown" // what sd_listen_fds_with_names(3) calls it
		if i < len(names) && names[i] != "" {
			name = names[i]
		}
		h.files[name] = append(h.files[name], os.NewFile(uintptr(fd), name))
	}
	return h, nil
}

// Unset removes the variables that Receive reads from the environment.
func Unset() error {
	for _, name := range []string{"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"} {
		if err := os.Unsetenv(name); err != nil {
			return fmt.Errorf("cannot remove %s from the environment: %w", name, err)
		}
	}
	return nil
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

// Rest takes everything that nobody took: the caller logs (Name tells its name) and
// closes it.
func (h *Handed) Rest() []*os.File {
	var rest []*os.File
	for _, name := range h.Names() {
		rest = append(rest, h.Take(name)...)
	}
	return rest
}

func (h *Handed) closeAll() {
	for _, f := range h.Rest() {
		_ = f.Close() // nobody used it, and there is another error to tell
	}
}
