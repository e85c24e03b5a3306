package config

import (
	"bufio"
	"bytes"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
)

// lastGoodFormat begins the first line of the file; a new form of it gets a new number.
// The checksum of all other lines follows: a file that was cut off would still be TOML.
const lastGoodFormat = "# csi-registrar last good configuration, format 1, crc32 "

// SaveLastGood keeps a configuration, made of the files named, for a start at which the
// files have a mistake. The file is put in place at once as a whole, mode 0600, in a
// folder that must exist, and left alone if it says the same already.
func SaveLastGood(path string, c *Config, files []string) error {
	data := lastGood(c, files)
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return nil
	}
	if err := writeWhole(path, data); err != nil {
		return fmt.Errorf("cannot keep the last good configuration: %w", err)
	}
	return nil
}

func lastGood(c *Config, files []string) []byte {
	var body bytes.Buffer
	b := bufio.NewWriter(&body)
	b.WriteString("# Used at start when the files have a mistake. It may be deleted.\n")
	for _, f := range files {
		b.WriteString("# from " + printable(f) + "\n")
	}
	b.WriteByte('\n')
	writeTOML(b, c, nil)
	b.Flush() // a bytes.Buffer takes everything
	return fmt.Appendf(nil, "%s%08x\n%s", lastGoodFormat, crc32.ChecksumIEEE(body.Bytes()), body.Bytes())
}

// writeWhole puts a file in place so that there is the old one or the new one, never
// half of one.
func writeWhole(path string, data []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name()) // the first error tells more than a second
		}
	}()
	if _, err := f.Write(data); err != nil {
		f.Close()
		return err
	}
	if err := f.Sync(); err != nil {
		f.Close()
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// LoadLastGood reads what SaveLastGood kept; errors.Is(err, fs.ErrNotExist) if there is
// none. A file that is damaged, of another format or not to be trusted is an error. That
// a socket_owner still exists is not asked: it did when the file was written.
func LoadLastGood(path string) (*Config, error) {
	if _, err := os.Lstat(path); err != nil {
		return nil, fmt.Errorf("cannot read the last good configuration: %w", err)
	}
	data, wrong := readFile(path, 16*maxFile, []uint32{0, uint32(os.Geteuid())})
	if wrong != nil {
		return nil, fmt.Errorf("cannot use the last good configuration: %w", Mistakes{*wrong})
	}
	head, body, _ := strings.Cut(data, "\n")
	sum, ok := strings.CutPrefix(head, lastGoodFormat)
	if !ok {
		return nil, fmt.Errorf("cannot use the last good configuration: %s is not of a format that this version knows", printable(path))
	}
	if sum != fmt.Sprintf("%08x", crc32.ChecksumIEEE([]byte(body))) {
		return nil, fmt.Errorf("cannot use the last good configuration: %s is damaged", printable(path))
	}
	l := newLoader(func(string) error { return nil })
	l.apply(file{path: path}, body)
	r := l.result()
	if err := r.Mistakes.Err(); err != nil {
		return nil, fmt.Errorf("cannot use the last good configuration: %w", err)
	}
	return r.Config, nil
}
