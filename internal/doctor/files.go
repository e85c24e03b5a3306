package doctor

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
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

// readTrusted reads a file that another program named. Only a regular file of root (or of the
// user who asks) that nobody else may write is opened: opening a FIFO waits, and opening a
// device can do anything. So the file is looked at through a descriptor that does not open it
// (O_PATH), and then opened through that.
func readTrusted(file string) ([]byte, error) {
	fd, err := unix.Open(file, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, errors.New("it is not a regular file")
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return nil, fmt.Errorf("it belongs to uid %d, not to root", st.Uid)
	case st.Mode&0o022 != 0:
		return nil, fmt.Errorf("others than its owner may write it (mode %04o)", st.Mode&0o7777)
	case st.Size > maxConfigFile:
		return nil, fmt.Errorf("it has more than %d bytes", maxConfigFile)
	}
	return readSome(fmt.Sprintf("/proc/self/fd/%d", fd), maxConfigFile)
}
