package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"csi-registrar/internal/safetext"
	"csi-registrar/internal/trust"
)

// lastGoodFormat is the Format of the file; a new form of it gets a new number.
const lastGoodFormat = 3

type lastGood struct {
	Format int
	*InForce
}

// SaveLastGood keeps what is in force for a start at which the files have an error, or at
// which something has disappeared from them. The file is put in place at once as a whole,
// mode 0600, in a directory that must exist, and left alone if it says the same already.
func SaveLastGood(path string, c *InForce) error {
	data, err := json.MarshalIndent(lastGood{lastGoodFormat, c}, "", "  ")
	if err != nil {
		return fmt.Errorf("cannot keep the last good configuration: %w", err)
	}
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return nil
	}
	temporary := path + ".new" // one name is enough for one writer; /run is memory: nothing to sync
	if err = os.WriteFile(temporary, data, 0o600); err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		return fmt.Errorf("cannot keep the last good configuration: %w", errors.Join(err, os.Remove(temporary)))
	}
	return nil
}

// LoadLastGood reads what SaveLastGood kept; errors.Is(err, fs.ErrNotExist) if there is
// nothing. A file that is damaged, of another format or not to be trusted is an error.
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
