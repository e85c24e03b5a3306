package regsocket

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/unixsock"
)

// record is what the next process needs to know of a published socket. It is valid only for the
// listener that it describes.
type record struct {
	Path   string `json:"path"`
	Cookie uint64 `json:"cookie"` // of the listener (unixsock.Cookie)
	// FileID is that of the path; zero until the listener is bound. The listener holds the inode,
	// so no other file can get it.
	unixsock.FileID
	status.Publication
}

const recordSuffix = ".json"

// maxRecord is the maximum size of a record in bytes.
const maxRecord = 1 << 20

func recordsIn(runDir string) string { return filepath.Join(runDir, "registrations") }

func (r *Registry) recordOf(name string) string {
	return filepath.Join(recordsIn(r.o.RunDir), name+recordSuffix)
}

// save writes the record of p, if p is still current. Without a record, as while /run is full, the
// next process does not recognize the socket as ours, and publishes again.
func (s *Socket) save(p *listener) error {
	s.saving.Lock()
	defer s.saving.Unlock()
	if s.current.Load() != p {
		return nil
	}
	return s.write(p)
}

// write is the part of save that writes, also for a listener that is not current yet. The caller
// holds s.saving.
func (s *Socket) write(p *listener) error {
	if s.r.o.RunDir == "" {
		return nil
	}
	p.unsaved.Store(false) // before p.record is read: the kubelet may call during the write
	s.mu.Lock()
	rec := p.record
	s.mu.Unlock()
	if err := s.r.o.Host.writeJSON(s.r.recordOf(s.name), rec); err != nil {
		p.unsaved.Store(true)
		s.checkAgain()
		return fmt.Errorf("cannot write the record of %s: %w", s.name, err)
	}
	return nil
}

// saveAgain writes the record if it is not complete.
func (s *Socket) saveAgain() {
	if p := s.current.Load(); p != nil && p.unsaved.Load() {
		_ = s.save(p) // the first error was logged as a warning
	}
}

// writeJSON writes a record. Each path has one writer at a time, so one temporary name is enough;
// /run is memory, so nothing has to be synced.
func (h *Host) writeJSON(path string, record any) error {
	b, err := json.Marshal(record)
	if err != nil {
		return err
	}
	if err := h.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	temporary := path + ".new"
	if err := h.WriteFile(temporary, b, 0o600); err != nil {
		return errors.Join(err, ignoreMissing(h.Remove(temporary)))
	}
	return h.Rename(temporary, path)
}

func (s *Socket) removeRecord() {
	if s.r.o.RunDir == "" {
		return
	}
	s.saving.Lock()
	defer s.saving.Unlock()
	if err := ignoreMissing(s.r.o.Host.Remove(s.r.recordOf(s.name))); err != nil {
		s.log.Warn("cannot remove the record of the registration", "error", err)
	}
}

// readRecord reads a file that only the daemon can have written; but that may have been another
// version, or a compromised one. So no link is followed, and only a small regular file is read.
func (h *Host) readRecord(path string) (rec record, err error) {
	b, err := h.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &rec)
	}
	if err != nil {
		return record{}, fmt.Errorf("cannot read the record %s: %w", path, err)
	}
	toAges(&rec.PublishedAt, &rec.GetInfoAt, &rec.Notification.At, &rec.FirstAcceptedAt)
	return rec, nil
}

// toAges gives the times of a record a monotonic part: when the wall clock is set again, only their
// age counts. A time in the future was written while the wall clock was ahead.
func toAges(times ...*time.Time) {
	now := time.Now()
	for _, at := range times {
		if !at.IsZero() {
			*at = now.Add(-max(0, now.Sub(*at)))
		}
	}
}

// Leftovers are the registration sockets that a daemon left when it ended, by the file of their
// record.
type Leftovers map[string]record

// Recorded reads the records in a RunDir (Options.RunDir). The error names those that cannot be
// used; all others are in the Leftovers.
func Recorded(runDir string) (Leftovers, error) { return newHost().readRecords(runDir) }

func (h *Host) readRecords(runDir string) (Leftovers, error) {
	dir := recordsIn(runDir)
	entries, err := h.ReadDir(dir)
	errs := []error{ignoreMissing(err)}
	left := make(Leftovers)
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), recordSuffix)
		if !ok {
			continue
		}
		file := filepath.Join(dir, e.Name())
		rec, err := h.readRecord(file)
		if err == nil && !isRegistration(rec.Path, name) {
			err = fmt.Errorf("%s names %q, which is not the socket of %s: remove the file", file, rec.Path, name)
		}
		if err == nil {
			left[file] = rec
		}
		errs = append(errs, err)
	}
	return left, errors.Join(errs...)
}

// isRegistration reports whether path can be the registration socket of that name: nothing outside
// of a plugins_registry is removed because of a record.
func isRegistration(path, name string) bool {
	return filepath.IsAbs(path) && filepath.Clean(path) == path &&
		filepath.Base(filepath.Dir(path)) == rootdir.PluginsRegistryName && filepath.Base(path) == rootdir.SocketName(name)
}

// Remove removes the sockets and the records, and returns the paths of the removed sockets. Do not
// call it while the daemon runs; a daemon that started after Recorded loses nothing that it created
// itself.
func (l Leftovers) Remove(ctx context.Context) (removed []string, err error) {
	var errs []error
	host := newHost()
	for file, rec := range l {
		path, err := host.removeLeftover(ctx, file, rec.Path, rec)
		if path != "" {
			removed = append(removed, path)
		}
		errs = append(errs, err)
	}
	slices.Sort(removed)
	return removed, errors.Join(errs...)
}

func ignoreMissing(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
