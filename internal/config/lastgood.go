package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
)

// lastGoodFormat begins the first line of the file; a new form of it gets a new number.
// The checksum of the rest follows.
const lastGoodFormat = "csi-registrar last good configuration, format 2, crc32 "

// SaveLastGood keeps what is in force for a start at which the files have an error, or at
// which something has disappeared from them. The file is put in place at once as a whole,
// mode 0600, in a directory that must exist, and left alone if it says the same already.
func SaveLastGood(path string, c *InForce) error {
	body, err := json.MarshalIndent(c, "", "  ")
	if err == nil {
		body = append(body, '\n')
		data := fmt.Appendf(nil, "%s%08x\n%s", lastGoodFormat, crc32.ChecksumIEEE(body), body)
		if old, readErr := os.ReadFile(path); readErr == nil && bytes.Equal(old, data) {
			return nil
		}
		err = writeWhole(path, data)
	}
	if err != nil {
		return fmt.Errorf("cannot keep the last good configuration: %w", err)
	}
	return nil
}

// writeWhole puts a file in place so that there is the old one or the new one, never
// half of one.
func writeWhole(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-") // mode 0600
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// LoadLastGood reads what SaveLastGood kept; errors.Is(err, fs.ErrNotExist) if there is
// nothing. A file that is damaged, of another format or not to be trusted is an error.
func LoadLastGood(path string) (*InForce, error) {
	if _, err := os.Lstat(path); err != nil {
		return nil, fmt.Errorf("cannot read the last good configuration: %w", err)
	}
	t := &trust{root: path, owners: []uint32{0, uint32(os.Geteuid())}}
	text, bad := t.read(path, 16*maxFile)
	if bad != nil {
		return nil, fmt.Errorf("cannot use the last good configuration: %w", bad)
	}
	head, body, _ := strings.Cut(text, "\n")
	c := &InForce{}
	if head != fmt.Sprintf("%s%08x", lastGoodFormat, crc32.ChecksumIEEE([]byte(body))) || json.Unmarshal([]byte(body), c) != nil {
		return nil, fmt.Errorf("cannot use the last good configuration: %s is damaged, or of a format that this version does not know", printable(path))
	}
	return c, nil
}
