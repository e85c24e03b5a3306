package sampledriver

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// A volume is a directory below <data>: volume.json beside the directory "data", which is
// what gets mounted. It is made and removed under a dot name and renamed, so that
// after a crash it is either whole or not there. The directory of a volume that CreateVolume made
// has the volume's id as its name; that of an ephemeral inline volume, whose id the kubelet chose,
// a name that is made from it.

const (
	idPrefix        = "vol-"
	ephemeralPrefix = "ephemeral-"
	idDigits        = 32
)

// volume is what volume.json keeps.
type volume struct {
	ID       string `json:"id"`
	Name     string `json:"name,omitempty"`
	Capacity int64  `json:"capacity_bytes"`
	// Where it is, or was about to be, mounted: staged or published.
	Targets []string `json:"targets,omitempty"`
}

// ephemeral reports whether the volume lives as long as it is published.
func (v volume) ephemeral() bool { return !validID(v.ID) }

// errNoVolume is the error of get for an id that no volume has.
var errNoVolume = errors.New("there is no such volume")

// volumeID derives the id from the name, so that creating is idempotent, and so that no
// character of the name ever reaches a path.
func volumeID(name string) string { return idPrefix + digits(name) }

func digits(name string) string {
	sum := sha256.Sum256([]byte(name))
	return hex.EncodeToString(sum[:])[:idDigits]
}

// validID reports whether id can be one that CreateVolume gave. No other id becomes part of a path.
func validID(id string) bool {
	digits, ok := strings.CutPrefix(id, idPrefix)
	return ok && len(digits) == idDigits && strings.Trim(digits, "0123456789abcdef") == ""
}

// directory is the name of a volume's directory.
func directory(id string) string {
	if validID(id) {
		return id
	}
	return ephemeralPrefix + digits(id)
}

func (d *Driver) dir(id string) string     { return filepath.Join(d.Data, directory(id)) }
func (d *Driver) content(id string) string { return filepath.Join(d.dir(id), "data") }

// created reads a volume that CreateVolume made; errNoVolume if there is none.
func (d *Driver) created(id string) (volume, error) {
	if !validID(id) {
		return volume{}, errNoVolume
	}
	return d.get(id)
}

// get reads a volume of either kind; errNoVolume if there is none.
func (d *Driver) get(id string) (volume, error) {
	var v volume
	text, err := os.ReadFile(filepath.Join(d.dir(id), "volume.json"))
	if errors.Is(err, os.ErrNotExist) {
		return v, errNoVolume
	}
	if err == nil {
		err = json.Unmarshal(text, &v)
	}
	if err != nil {
		return v, fmt.Errorf("cannot read volume %s: %w", id, err)
	}
	return v, nil
}

// add makes the directory of a new volume.
func (d *Driver) add(v volume) error {
	draft := filepath.Join(d.Data, ".new-"+directory(v.ID))
	if err := os.RemoveAll(draft); err != nil {
		return fmt.Errorf("cannot make volume %s: %w", v.ID, err)
	}
	if err := os.MkdirAll(filepath.Join(draft, "data"), 0o770); err != nil {
		return fmt.Errorf("cannot make volume %s: %w", v.ID, err)
	}
	if err := write(draft, v); err != nil {
		return err
	}
	if err := os.Rename(draft, d.dir(v.ID)); err != nil {
		return fmt.Errorf("cannot make volume %s: %w", v.ID, err)
	}
	return nil
}

// update replaces volume.json.
func (d *Driver) update(v volume) error { return write(d.dir(v.ID), v) }

func write(dir string, v volume) error {
	text, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("cannot write volume %s: %w", v.ID, err)
	}
	draft := filepath.Join(dir, ".volume.json")
	if err := os.WriteFile(draft, text, 0o640); err != nil {
		return fmt.Errorf("cannot write volume %s: %w", v.ID, err)
	}
	if err := os.Rename(draft, filepath.Join(dir, "volume.json")); err != nil {
		return fmt.Errorf("cannot write volume %s: %w", v.ID, err)
	}
	return nil
}

// remove takes the volume away with all that is in it.
func (d *Driver) remove(id string) error {
	grave := filepath.Join(d.Data, ".old-"+directory(id))
	err := os.Rename(d.dir(id), grave)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("cannot remove volume %s: %w", id, err)
	}
	if err := os.RemoveAll(grave); err != nil {
		return fmt.Errorf("cannot remove volume %s: %w", id, err)
	}
	return nil
}

// list returns all volumes that CreateVolume made with an id greater than after, in order of id.
func (d *Driver) list(after string) ([]volume, error) {
	entries, err := os.ReadDir(d.Data) // sorted by name
	if err != nil {
		return nil, fmt.Errorf("cannot list volumes: %w", err)
	}
	var volumes []volume
	for _, e := range entries {
		if !validID(e.Name()) || e.Name() <= after {
			continue
		}
		v, err := d.get(e.Name())
		if errors.Is(err, errNoVolume) {
			continue
		}
		if err != nil {
			return nil, err
		}
		volumes = append(volumes, v)
	}
	return volumes, nil
}

// mounted returns the targets at which the volume is really mounted now; a reboot
// takes mounts away, but not what volume.json says of them.
func (d *Driver) mounted(v volume) []string {
	return slices.DeleteFunc(slices.Clone(v.Targets), func(target string) bool {
		return !d.isMounted(v.ID, target)
	})
}

// isMounted reports whether the target is the volume: a bind mount shows the same
// device and inode at both ends.
func (d *Driver) isMounted(id, target string) bool {
	there, err := os.Lstat(target)
	if err != nil {
		return false
	}
	here, err := os.Lstat(d.content(id))
	return err == nil && os.SameFile(here, there)
}
