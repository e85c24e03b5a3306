package regsocket

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/node/status"
)

// A lack of descriptors or memory costs no registration: it is adopted when there are some.
func TestAdoptWithoutDescriptors(t *testing.T) {
	for _, errno := range []error{unix.EMFILE, unix.ENFILE, unix.ENOMEM} {
		for _, what := range []string{"record", "listener"} {
			w, m := left(t, "a")
			host, fail := newHost(), true
			read, listener := host.ReadFile, host.FileListener
			host.ReadFile = func(path string) ([]byte, error) {
				if fail && what == "record" {
					return nil, &os.PathError{Op: "open", Path: path, Err: errno}
				}
				return read(path)
			}
			host.FileListener = func(f *os.File) (Listener, error) {
				if fail && what == "listener" {
					return nil, os.NewSyscallError("dup", errno)
				}
				return listener(f)
			}
			r := w.open(with(m, true), func(o *Options) { o.Host = host })
			s := socket(t, r, "a")
			if err := s.Adopt(t.Context(), m.pass(t, "registration-a")); !isShortage(err) {
				t.Errorf("%s, %v: adopted: %v", what, errno, err)
			}
			if err := s.Publish(t.Context(), announcement("a")); !isShortage(err) {
				t.Errorf("%s, %v: published: %v", what, errno, err)
			}
			if m.count("registration-a") != 1 || isGone(s.path) || isGone(r.recordOf("a")) {
				t.Errorf("%s, %v: the registration is lost", what, errno)
			}
			fail = false
			if l := look(t, s); !l.Up || l.Place != status.Ours || m.count("registration-a") != 1 {
				t.Errorf("%s, %v: not adopted later: %+v", what, errno, l)
			}
			mustAnswer(t, s.path, announcement("a").Endpoint)
		}
	}
}

// Nor does it keep a registration that nobody wants any more: its record is read by a later call.
// The store lets go of its listener at once: the driver can be enabled before that.
func TestLeftoversWithoutDescriptors(t *testing.T) {
	w, m := left(t, "a", "b")
	host, fail := newHost(), true
	read := host.ReadFile
	host.ReadFile = func(path string) ([]byte, error) {
		if fail {
			return nil, &os.PathError{Op: "open", Path: path, Err: unix.EMFILE}
		}
		return read(path)
	}
	r := w.open(with(m, true), func(o *Options) { o.Host = host })
	if err := r.RemoveLeftovers(t.Context(), nil, []string{"b"}); !isShortage(err) || m.count("registration-b") != 0 {
		t.Errorf("%d in the store, %v", m.count("registration-b"), err)
	}
	if isGone(r.recordOf("b")) {
		t.Error("a record that was not read is gone: it can name a socket below an earlier root_dir")
	}
	publish(t, socket(t, r, "b"))
	fail = false
	if err := r.RemoveLeftovers(t.Context(), []string{"b"}, nil); err != nil || !isGone(pathOf(r, "a")) || !isGone(r.recordOf("a")) || isGone(pathOf(r, "b")) {
		t.Errorf("later: %v", err)
	}
}
