package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/trust"
)

// lastGoodFormat is the version of the file format.
const lastGoodFormat = 3

type lastGood struct {
	Format int
	*InForce
}

// SaveLastGood saves the configuration in force, for a start at which the files have an error or
// something disappeared from them. It replaces the file atomically, with mode 0600, unless it has
// the same content. The directory must exist.
func SaveLastGood(path string, c *InForce) error {
	data, err := json.MarshalIndent(lastGood{lastGoodFormat, c}, "", "  ")
	if err != nil {
		return fmt.Errorf("cannot keep the last good configuration: %w", err)
	}
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return nil
	}
	// there is one writer; /run is in memory, so there is nothing to sync
	temporary := path + ".new"
	if err = os.WriteFile(temporary, data, 0o600); err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		return fmt.Errorf("cannot keep the last good configuration: %w", errors.Join(err, os.Remove(temporary)))
	}
	return nil
}

// LoadLastGood returns the configuration saved by SaveLastGood. The error is fs.ErrNotExist if
// there is none. A file that is damaged, untrusted or has another format is an error.
func LoadLastGood(path string) (*InForce, error) {
	data, err := trust.Rule{Owners: []uint32{0, uint32(os.Geteuid())}}.ReadFile(path, 16*maxFile)
	if err != nil {
		return nil, fmt.Errorf("cannot use the last good configuration: %w", err)
	}
	var c lastGood
	if err := json.Unmarshal(data, &c); err != nil || c.Format != lastGoodFormat || c.InForce == nil || c.Config == nil {
		return nil, fmt.Errorf("cannot use the last good configuration: %s is damaged, or of a format that this version does not know", safetext.Word(path))
	}
	return c.InForce, nil
}
