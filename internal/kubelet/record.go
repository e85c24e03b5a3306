package kubelet

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"csi-registrar/internal/pluginreg"
	"csi-registrar/internal/status"
	"csi-registrar/internal/trust"
	"csi-registrar/internal/unixsock"
)

// record remembers beyond the process what a socket announced and what the kubelet said
// to it. It is believed only of the very listener it describes.
type record struct {
	Path  string `json:"path"`
	Bound string `json:"bound"` // the name that the listener was bound to
	// FileID is the file's. The listener holds the inode, so no other file can get it.
	unixsock.FileID
	PublishedAt  time.Time           `json:"published_at"`
	GetInfoAt    time.Time           `json:"get_info_at,omitzero"`
	Announced    status.Announcement `json:"announced"`
	Notification status.Notification `json:"notification,omitzero"`
	// FirstAcceptedAt is kept for how long the registration took: a kubelet that restarts
	// accepts again, and then Notification no longer has it.
	FirstAcceptedAt time.Time `json:"first_accepted_at,omitzero"`
}

const recordSuffix = ".json"

// maxRecord is the largest record in bytes that is read.
const maxRecord = 1 << 20

func recordsIn(runDir string) string { return filepath.Join(runDir, "registrations") }

func (r *Registry) recordOf(name string) string {
	return filepath.Join(recordsIn(r.o.RunDir), name+recordSuffix)
}

// save writes the record of p, if it is still what the Socket publishes. Otherwise, as while /run
// is full, the next process would not know the socket for its own, and publish again.
func (s *Socket) save(p *listener) error {
	if s.r.o.RunDir == "" {
		return nil
	}
	s.saving.Lock()
	defer s.saving.Unlock()
	p.unsaved.Store(false) // before the record is read: the kubelet may call while it is written
	s.mu.Lock()
	rec := p.record
	s.mu.Unlock()
	if s.current.Load() != p {
		return nil
	}
	if err := s.r.writeRecord(s.name, rec); err != nil {
		p.unsaved.Store(true)
		return fmt.Errorf("cannot write the record of %s: %w", s.name, err)
	}
	return nil
}

// saveAgain writes the record if it lacks something.
func (s *Socket) saveAgain() {
	if p := s.current.Load(); p != nil && p.unsaved.Load() {
		if err := s.save(p); err != nil { // a warning said so the first time
			s.log.Debug("the record of the registration is not complete", "error", err)
		}
	}
}

func (r *Registry) writeRecord(name string, rec record) error {
	b, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	path := r.recordOf(name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	// One writer for a driver at a time, so one temporary name is enough; /run is memory,
	// so nothing has to be synced.
	temporary := path + ".new"
	if err := os.WriteFile(temporary, b, 0o600); err != nil {
		return errors.Join(err, ignoreMissing(os.Remove(temporary)))
	}
	return os.Rename(temporary, path)
}

func (s *Socket) removeRecord() {
	if s.r.o.RunDir == "" {
		return
	}
	s.saving.Lock()
	defer s.saving.Unlock()
	if err := ignoreMissing(os.Remove(s.r.recordOf(s.name))); err != nil {
		s.log.Warn("cannot remove the record of the registration", "error", err)
	}
}

// readRecord reads a file that only the daemon can have written; but perhaps that was another
// version, or one that is no longer its own master. So no link is followed, and nothing but a
// small regular file is read.
func readRecord(path string) (rec record, err error) {
	b, err := trust.Rule{}.ReadFile(path, maxRecord)
	if err == nil {
		err = json.Unmarshal(b, &rec)
	}
	if err != nil {
		return record{}, fmt.Errorf("cannot read the record %s: %w", path, err)
	}
	// A time yet to come was written under a wall clock that was ahead; nobody could count from it.
	now := time.Now()
	for _, at := range []*time.Time{&rec.PublishedAt, &rec.GetInfoAt, &rec.Notification.At, &rec.FirstAcceptedAt} {
		if at.After(now) {
			*at = now
		}
	}
	return rec, nil
}

// Leftovers are the registration sockets that a daemon which has ended left behind, by the file
// of their record.
type Leftovers map[string]record

// Recorded returns what the records in a RunDir (Options.RunDir) say. An error names those
// that cannot be used; the others are in the Leftovers.
func Recorded(runDir string) (Leftovers, error) {
	dir := recordsIn(runDir)
	entries, err := os.ReadDir(dir)
	errs := []error{ignoreMissing(err)}
	left := make(Leftovers)
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), recordSuffix)
		if !ok {
			continue
		}
		file := filepath.Join(dir, e.Name())
		rec, err := readRecord(file)
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

// isRegistration reports whether path can be the registration socket of that name: nothing
// outside of a plugins_registry is ever removed because of a record.
func isRegistration(path, name string) bool {
	return filepath.IsAbs(path) && filepath.Clean(path) == path &&
		filepath.Base(filepath.Dir(path)) == pluginreg.DirName && pluginreg.IsSocketOf(path, name)
}

// Remove takes them away: each path is removed if it still is the very file of the record,
// and the record with it. It returns the removed paths. Never to be called while the daemon
// runs; if one started after Recorded it loses nothing that it made itself.
func (l Leftovers) Remove() (removed []string, err error) {
	var errs []error
	for file, rec := range l {
		did, err := unixsock.Remove(rec.Path, rec.FileID)
		if did {
			removed = append(removed, rec.Path)
		}
		if err == nil {
			driver := strings.TrimSuffix(filepath.Base(file), recordSuffix)
			err = errors.Join(rec.removeLink(driver), ignoreMissing(os.Remove(file)))
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
