package kubelet

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/status"
	"csi-registrar/internal/trust"
	"csi-registrar/internal/unixsock"
)

// A driver with endpoint_link has a symbolic link of ours that the kubelet is told in place of
// the driver's socket. The kubelet resolves it for each call (kubelet v1.36), so pointing it
// elsewhere sends the next call there, and the registration stays as it is.

// linksIn is the directory of the links below a root directory.
func linksIn(root string) string { return filepath.Join(root, "plugins/csi-registrar") }

// linkOf is the path of a driver's link: config.Kubelet.EndpointLink.
func linkOf(root, driver string) string {
	return filepath.Join(linksIn(root), driver+".sock")
}

// checkLink points the link of what is published where it belongs. It is for the worker.
func (s *Socket) checkLink() {
	var problem string
	if p := s.current.Load(); p != nil {
		if err := s.pointLink(s.Look().Announced); err != nil {
			problem = err.Error()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen.LinkError = problem
}

// pointLink points the link of an announcement, if it has one, at the recorder, or at the driver.
// As with the driver's socket, nobody but root may be able to put something else there.
func (s *Socket) pointLink(a status.Announcement) error {
	if a.LinkTarget == "" {
		return nil
	}
	if err := trust.SocketOwner("root").Path(a.Endpoint); err != nil {
		if e, ok := errors.AsType[*trust.Error](err); ok {
			return fmt.Errorf("the endpoint link is not kept: %w, so another user could pose as the driver: run %s", err, safetext.Quote(e.Command.String()))
		}
		return err
	}
	s.mu.Lock()
	target := cmp.Or(s.recorder, a.LinkTarget)
	s.mu.Unlock()
	return pointLink(a.Endpoint, target)
}

// Record sends the calls to the driver to a recorder until ctx is done, and points the link back
// at the driver before it returns. listen is called with the path that the recorder is to listen
// on; linked when the calls arrive there. An error says why they do not.
func (s *Socket) Record(ctx context.Context, listen func(ctx context.Context, path string) error, linked func()) error {
	look := s.Look()
	switch {
	case !look.Up:
		return fmt.Errorf("cannot trace %s: it is not published to the kubelet", s.name)
	case look.Announced.LinkTarget == "":
		return fmt.Errorf("cannot trace %s: write endpoint_link = true in its table; that registers the driver once more", s.name)
	}
	s.mu.Lock()
	busy := s.recording
	s.recording = true
	s.mu.Unlock()
	if busy {
		return fmt.Errorf("cannot trace %s: it is traced already", s.name)
	}
	path := shortPath(look.Announced.Endpoint, recorderPrefix)
	err := s.send(ctx, path, listen)
	if err == nil {
		linked()
		<-ctx.Done()
	}
	return errors.Join(err, s.sendBack(context.WithoutCancel(ctx), path))
}

// send has a recorder listen at path, and points the link there.
func (s *Socket) send(ctx context.Context, path string, listen func(context.Context, string) error) error {
	err := s.do(ctx, changeTime, func(context.Context) error { return os.MkdirAll(filepath.Dir(path), 0o750) })
	if err == nil {
		err = listen(ctx, path)
	}
	if err != nil {
		return err
	}
	return s.do(ctx, changeTime, func(context.Context) error {
		if f, err := unixsock.Lstat(path); err != nil || !f.IsSocket() || f.UID != uint32(os.Geteuid()) {
			return errors.Join(fmt.Errorf("no recorder listens at %s", path), err)
		}
		s.setRecorder(path, true)
		return s.pointLink(s.Look().Announced)
	})
}

// sendBack points the link at the driver again. If that fails the next Check does it.
func (s *Socket) sendBack(ctx context.Context, recorder string) error {
	s.setRecorder("", false)
	return s.do(ctx, changeTime, func(context.Context) error {
		s.checkLink()
		return ignoreMissing(os.Remove(recorder)) // nobody else has this name
	})
}

func (s *Socket) setRecorder(path string, recording bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recorder, s.recording = path, recording
}

// pointLink makes the link at path point to target, in one step: a call finds the old or the
// new one. Whatever else is at path is left alone.
func pointLink(path, target string) error {
	switch now, err := os.Readlink(path); {
	case err == nil && now == target:
		return nil
	case err == nil, errors.Is(err, os.ErrNotExist):
	default:
		return notALink(path, err)
	}
	// The kubelet's own mode for its directories.
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return fmt.Errorf("cannot make the directory of the endpoint link: %w%s", err, unixsock.Hint(err))
	}
	temporary := shortPath(path, linkPrefix)
	err := os.Symlink(target, temporary)
	if err == nil {
		if err = os.Rename(temporary, path); err != nil {
			err = errors.Join(err, os.Remove(temporary))
		}
	}
	if err != nil {
		return fmt.Errorf("cannot make the endpoint link: %w%s", err, unixsock.Hint(err))
	}
	return nil
}

// removeLink removes the link of a record whose registration has ended: of the path that it has
// for this driver, and no other.
func (r record) removeLink(driver string) error {
	link := linkOf(filepath.Dir(filepath.Dir(r.Path)), driver)
	if r.Announced.LinkTarget == "" || r.Announced.Endpoint != link {
		return nil
	}
	return removeLink(link)
}

// removeLink removes the link at path. Something else stays.
func removeLink(path string) error {
	switch _, err := os.Readlink(path); {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return notALink(path, err)
	}
	return ignoreMissing(os.Remove(path))
}

func notALink(path string, err error) error {
	if f, statErr := unixsock.Lstat(path); statErr == nil && !f.IsLink() {
		return fmt.Errorf("the endpoint link cannot be made: %s is %s: move it away", path, f.Kind())
	}
	return fmt.Errorf("cannot look at the endpoint link: %w", err)
}

// Names beside a link are short, for a Unix socket's path has 107 bytes.
const (
	linkPrefix     = ".l-"
	recorderPrefix = ".t-"
)

func shortPath(link, prefix string) string {
	return filepath.Join(filepath.Dir(link), prefix+rand.Text()[:6])
}
