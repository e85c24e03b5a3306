package doctor

import (
	"errors"
	"io"
	"os"

	"csi-registrar/internal/trust"
)

// What is read at most: of a file in /proc, which can be as long as a stranger likes, and of
// a configuration file.
const (
	maxProcFile   = 64 << 10
	maxConfigFile = 1 << 20
)

// readSome reads the first bytes of a file.
func readSome(file string, limit int64) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, limit))
}

// readTrusted reads a file that another program named, if it is a regular file of root (or of
// the user who asks) that nobody else may write.
func readTrusted(file string) ([]byte, error) {
	data, err := trust.Rule{Owners: []uint32{0, uint32(os.Geteuid())}}.ReadFile(file, maxConfigFile)
	if e, distrusted := errors.AsType[*trust.Error](err); distrusted {
		return nil, errors.New("it " + e.Problem) // without the path, which is a stranger's
	}
	return data, err
}
