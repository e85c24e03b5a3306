package regsocket

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/node/pluginreg"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/sys/worker"
)

const (
	askTime    = time.Second            // for GetInfo: the kubelet's own (v1.36)
	surveyWait = 300 * time.Millisecond // how long publications wait for a survey
	surveyFor  = time.Second            // how long its answers are shared
	maxQueries = 64                     // sockets that are asked at a time
)

// survey has the answers of the sockets of other registrars in the plugins_registry. Of two sockets
// with the same driver the kubelet refuses one; with older kubelets the removal of one deregisters
// the other.
type survey struct {
	began time.Time
	done  chan struct{} // closed when all have answered, or had the time to

	mu       sync.Mutex
	found    []foreignSocket
	complete bool // it is done, and all file systems have answered
}

// foreignSocket is a socket that serves a CSI driver.
type foreignSocket struct {
	path   string
	id     unixsock.FileID
	driver string // empty: none
	server string // the process that listens, for messages
}

// others asks all sockets in the directory that are not ours, unless that was begun within
// surveyFor, and waits until wait has passed since then. It returns those that serve a driver, and
// whether that is complete.
func (r *Registry) others(ctx context.Context, driver string, wait time.Duration) (found []foreignSocket, complete bool) {
	r.mu.Lock()
	sv := r.survey
	if sv == nil || time.Since(sv.began) >= surveyFor {
		sv = &survey{began: time.Now(), done: make(chan struct{})}
		r.survey = sv
		go r.askAll(sv)
	}
	r.mu.Unlock()
	select {
	case <-sv.done:
	case <-time.After(time.Until(sv.began.Add(wait))):
	case <-ctx.Done():
	}
	sv.mu.Lock()
	defer sv.mu.Unlock()
	for _, f := range sv.found {
		if f.driver == driver && r.socketAt(f.path) == nil { // it may have become ours since
			found = append(found, f)
		}
	}
	slices.SortFunc(found, func(a, b foreignSocket) int { return strings.Compare(a.path, b.path) })
	return found, sv.complete
}

// askAll makes a survey.
func (r *Registry) askAll(sv *survey) {
	defer close(sv.done)
	ctx, cancel := context.WithTimeout(context.Background(), 2*askTime)
	defer cancel()
	slot := r.o.Pool.Slot(r.dir.path, nil)
	paths, err := worker.Get(ctx, slot, surveyWait, func() ([]string, error) { return r.o.Host.Sockets(r.dir.path) }, nil)
	errs := append(make([]error, len(paths)), err)
	var queries sync.WaitGroup
	places := make(chan struct{}, maxQueries)
	for i, path := range paths {
		if r.socketAt(path) != nil {
			continue
		}
		places <- struct{}{}
		queries.Go(func() {
			defer func() { <-places }()
			// A process that does not answer ends ask; only a file system exceeds the limit.
			slot, limit := r.o.Pool.Slot(path, nil), askTime+surveyWait
			f, err := worker.Do(ctx, slot, limit, func() foreignSocket { return r.ask(ctx, path) }, nil)
			sv.mu.Lock()
			defer sv.mu.Unlock()
			sv.found, errs[i] = append(sv.found, f), err
		})
	}
	queries.Wait()
	sv.mu.Lock()
	defer sv.mu.Unlock()
	sv.complete = errors.Join(errs...) == nil
}

// ask finds out which driver a socket serves; none if it does not answer.
func (r *Registry) ask(ctx context.Context, path string) foreignSocket {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	file, err := r.o.Host.Stat(path)
	if err != nil || !file.IsSocket() {
		return foreignSocket{}
	}
	info, server, err := r.o.Host.GetInfo(ctx, path)
	if err != nil || info.Type != registerapi.CSIPlugin || csiname.CheckName(info.Name) != nil {
		return foreignSocket{}
	}
	return foreignSocket{path: path, id: file.FileID, driver: info.Name, server: server.String()}
}

// servedElsewhere describes the other sockets that serve the driver; empty: there are none. Our own
// file under another name, to which somebody renamed it, is removed; where that fails, nothing can
// be published either.
func (s *Socket) servedElsewhere(ctx context.Context, wait time.Duration) (text string, complete bool) {
	var own unixsock.FileID
	if p := s.current.Load(); p != nil {
		own = p.FileID
	}
	found, complete := s.r.others(ctx, s.name, wait)
	var places []string
	for _, f := range found {
		if f.id == own {
			_, _ = s.r.o.Host.RemoveFile(f.path, own)
		} else {
			places = append(places, fmt.Sprintf("%q by %s", f.path, f.server))
		}
	}
	if len(places) > 0 {
		text = fmt.Sprintf("%s is already served to the kubelet at %s: stop that registrar (a node-driver-registrar sidecar of the driver?), or remove the driver here",
			s.name, strings.Join(places, " and at "))
	}
	return text, complete
}

// explainRefusal looks for another registrar after each refusal of the kubelet, which does not say
// whose socket it prefers: once, or until all have answered or had the time to.
func (s *Socket) explainRefusal(ctx context.Context) {
	n := s.Look().Notification
	if n.Registered || n.At.IsZero() || n.At.Equal(s.explained) {
		return
	}
	text, complete := s.servedElsewhere(ctx, 2*askTime)
	if complete {
		s.explained = n.At
	} else {
		s.checkAgain()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen.AlsoServed = text
}

// servedFor is for how long the same process must have been found with the same socket before the
// driver counts as served by it: node-driver-registrar ends when the kubelet refuses it.
const servedFor = 15 * time.Second

// holder is the process that listens at the path of a registration socket in place of us.
type holder struct {
	pid   int             // 0: not visible
	file  unixsock.FileID // its socket
	since time.Time       // when it was found first
}

// askHolder asks the process that listens at the path which driver it serves. The result is a
// ConflictError, unless it is a csi-registrar that yields to us: then the path is free now.
func (s *Socket) askHolder(ctx context.Context, a status.Announcement, held *unixsock.InUse) error {
	host := s.r.o.Host
	file, err := host.Lstat(s.path)
	if err != nil {
		return fmt.Errorf("cannot look at the registration socket of another process: %w", err)
	}
	limited, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	info, cred, err := host.GetInfo(limited, s.path)
	ours := err == nil && cred.UID == 0 && info.Type == registerapi.CSIPlugin && info.Name == s.name
	if ours && info.Store == pluginreg.NoStore && s.r.o.KeepSockets {
		if _, err := host.RemoveFile(s.path, file.FileID); err != nil {
			return fmt.Errorf("cannot take the path of the registration socket: %w", err)
		}
		s.log.Info("registration taken over from a csi-registrar that cannot keep its socket", "path", s.path, "pid", cred.PID)
		s.held(holder{}, status.ServedBy{}, false)
		return nil
	}
	now := holder{pid: cred.PID, file: file.FileID, since: time.Now()}
	same := now.pid != 0 && now.pid == s.holder.pid && now.file == s.holder.file
	if same {
		now.since = s.holder.since
	}
	var by status.ServedBy
	if asked := time.Now(); ours && same && asked.Sub(now.since) >= servedFor && filepath.Clean(info.Endpoint) == filepath.Clean(a.Endpoint) {
		by = status.ServedBy{PID: cred.PID, Since: now.since, AskedAt: asked}
	}
	yields := !s.r.o.KeepSockets && (ours && info.Store == pluginreg.HasStore ||
		err != nil && s.seen.Yields && file.FileID == s.holder.file) // its process restarts
	s.held(now, by, yields)
	switch {
	case yields:
		return ConflictError(fmt.Sprintf("the csi-registrar that has a descriptor store serves the driver at %s: this one publishes when it is gone", s.path))
	case by.PID != 0:
		return ConflictError(fmt.Sprintf("%s serves the driver to the kubelet, at %s: when it ends (a node-driver-registrar sidecar of the driver?), csi-registrar does", held.Holder, s.path))
	}
	return s.heldBy(held.Holder)
}

// held records who holds the path; the zero holder: nobody.
func (s *Socket) held(h holder, by status.ServedBy, yields bool) {
	s.holder = h
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen.ServedBy, s.seen.Yields = by, yields
}
