package kubelet

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
)

// With endpoint_link the announced endpoint is a symbolic link to the driver's socket.
// The kubelet (v1.36) resolves it for each call, so changing its target redirects the next call,
// and the registration stays as it is.

// linkQuiet is for how long the link must have been missing before it is restored: do not interfere
// with a recursive delete (rm -rf, kubeadm reset).
const linkQuiet = time.Second

// errLinkMissing is returned for a link that is missing and not to be made yet.
var errLinkMissing = errors.New("the endpoint link is missing")

// checkLink points the link of the published announcement to its target. It runs in the worker.
func (s *Socket) checkLink() {
	s.mu.Lock()
	lost := s.linkLost
	s.mu.Unlock()
	var err error
	if s.current.Load() != nil {
		err = s.pointLink(s.Look().Announced, !lost.IsZero() && time.Since(lost) >= linkQuiet)
	}
	var problem string
	switch {
	case err == nil:
		lost = time.Time{}
	case errors.Is(err, errLinkMissing):
		if lost.IsZero() {
			lost = time.Now()
		}
		s.checkAgain(linkQuiet)
	default:
		problem = err.Error()
		s.checkAgain(againAfter)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen.LinkError, s.linkLost = problem, lost
}

// pointLink points the link of an announcement, if it has one, to the recorder or to the driver. As
// with the driver's socket, only root may be able to put something else there. If the link is
// missing, it is only made if create is true.
func (s *Socket) pointLink(a status.Announcement, create bool) error {
	if a.LinkTarget == "" {
		return nil
	}
	if err := s.r.o.Host.Trust(a.Endpoint); err != nil {
		if e, ok := errors.AsType[*trust.Error](err); ok {
			return fmt.Errorf("the endpoint link is not kept: %w, so another user could pose as the driver: run %s", err, safetext.Quote(e.Command.String()))
		}
		return err
	}
	target := a.LinkTarget
	s.mu.Lock()
	if s.trace != nil && s.trace.linked {
		target = s.trace.path
	}
	s.mu.Unlock()
	return s.r.o.Host.pointLink(a.Endpoint, target, create)
}

// trace is a recorder that receives, or is about to receive, the calls to the driver.
type trace struct {
	path   string // where the recorder listens
	linked bool   // the link is to point to path; guarded by Socket.mu
}

// Record implements agent.Socket.
func (s *Socket) Record(ctx context.Context, listen func(ctx context.Context, path string) error, linked func()) error {
	look := s.Look()
	switch {
	case !look.Up:
		return fmt.Errorf("cannot trace %s: it is not published to the kubelet", s.name)
	case look.Announced.LinkTarget == "":
		return fmt.Errorf("cannot trace %s: write endpoint_link = true in its table, which re-registers the driver", s.name)
	}
	t := &trace{path: shortPath(look.Announced.Endpoint, recorderPrefix)}
	s.mu.Lock()
	busy := s.trace != nil
	if !busy {
		s.trace = t
	}
	s.mu.Unlock()
	if busy {
		return fmt.Errorf("cannot trace %s: it is traced already", s.name)
	}
	err := s.beginTrace(ctx, t, listen)
	if err == nil {
		linked()
		<-ctx.Done()
	}
	return errors.Join(err, s.endTrace(context.WithoutCancel(ctx), t))
}

// beginTrace has the recorder listen and points the link to it.
func (s *Socket) beginTrace(ctx context.Context, t *trace, listen func(context.Context, string) error) error {
	err := s.do(ctx, changeTime, func(context.Context) error { return s.r.o.Host.MkdirAll(filepath.Dir(t.path), 0o750) })
	if err == nil {
		err = listen(ctx, t.path)
	}
	if err != nil {
		return err
	}
	return s.do(ctx, changeTime, func(context.Context) error {
		err := s.redirect(t)
		// This call was abandoned, and endTrace could not change the link either.
		if s.traceEnded(t) {
			return errors.Join(err, s.restoreLink(t))
		}
		return err
	})
}

// redirect points the link to the recorder of t, unless t has ended.
func (s *Socket) redirect(t *trace) error {
	if f, err := s.r.o.Host.Lstat(t.path); err != nil || !f.IsSocket() || f.UID != uint32(os.Geteuid()) {
		return errors.Join(fmt.Errorf("no recorder listens at %s", t.path), err)
	}
	s.mu.Lock()
	t.linked = true // without effect if s.trace is no longer t
	s.mu.Unlock()
	return s.pointLink(s.Look().Announced, true)
}

// endTrace points the link to the driver again. If that fails, the next Check does.
func (s *Socket) endTrace(ctx context.Context, t *trace) error {
	s.mu.Lock()
	s.trace = nil
	s.mu.Unlock()
	s.watch.Hint() // where no link is moved, nothing else does
	return s.do(ctx, changeTime, func(context.Context) error { return s.restoreLink(t) })
}

func (s *Socket) traceEnded(t *trace) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.trace != t
}

// restoreLink points the link to where it belongs now and removes the socket of an ended trace.
func (s *Socket) restoreLink(t *trace) error {
	s.checkLink()
	return ignoreMissing(s.r.o.Host.Remove(t.path)) // nobody else has this name
}

// pointLink points the link at path to target, atomically: a call finds the old target or the new
// one. It does not replace anything but a symbolic link.
func (h *Host) pointLink(path, target string, create bool) error {
	switch now, err := h.Readlink(path); {
	case err == nil && now == target:
		return nil
	case errors.Is(err, os.ErrNotExist) && !create:
		return errLinkMissing
	case err == nil, errors.Is(err, os.ErrNotExist):
	default:
		return h.notALink(path, err)
	}
	// The mode is the kubelet's for its directories.
	if err := h.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return fmt.Errorf("cannot make the directory of the endpoint link: %w%s", err, unixsock.Hint(err))
	}
	temporary := shortPath(path, linkPrefix)
	err := h.Symlink(target, temporary)
	if err == nil {
		if err = h.Rename(temporary, path); err != nil {
			err = errors.Join(err, h.Remove(temporary))
		}
	}
	if err != nil {
		return fmt.Errorf("cannot make the endpoint link: %w%s", err, unixsock.Hint(err))
	}
	return nil
}

// removeLink removes the link of a record whose registration has ended. It removes no other path
// than that of this driver's link.
func (r record) removeLink(h *Host, driver string) error {
	link := rootdir.EndpointLink(filepath.Dir(filepath.Dir(r.Path)), driver)
	if r.Announced.LinkTarget == "" || r.Announced.Endpoint != link {
		return nil
	}
	return h.removeLink(link)
}

// removeLink removes the link at path, but nothing other than a symbolic link.
func (h *Host) removeLink(path string) error {
	switch _, err := h.Readlink(path); {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return h.notALink(path, err)
	}
	return ignoreMissing(h.Remove(path))
}

func (h *Host) notALink(path string, err error) error {
	if f, statErr := h.Lstat(path); statErr == nil && !f.IsLink() {
		return fmt.Errorf("the endpoint link cannot be made: %s is %s: move it away", path, f.Kind())
	}
	return fmt.Errorf("cannot look at the endpoint link: %w", err)
}

// Names beside a link are short, because the path of a Unix socket has at most 107 bytes.
const (
	linkPrefix     = ".l-"
	recorderPrefix = ".t-"
)

func shortPath(link, prefix string) string {
	return filepath.Join(filepath.Dir(link), prefix+rand.Text()[:6])
}
