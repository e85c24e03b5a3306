package supervise

import (
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
)

// freeMemory returns to the kernel what a Probe used: the heap, which Go's collector would let grow
// to 4 MB, and the pages of the program, most of which only its start and its first connection
// used. A page that is needed again is mapped again from the page cache. The process stays for as
// long as the driver, for each driver of a node.
func freeMemory() error {
	debug.FreeOSMemory()
	maps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		return err
	}
	// proc(5): a line with address, permissions, offset, device, inode and path, then lines with
	// "Name: N kB". A private mapping of a file has what the file has, unless it has pages of its
	// own, as one has that the dynamic linker wrote before it was protected.
	var mapping []string
	clean := false
	for line := range strings.Lines(string(maps)) {
		f := strings.Fields(line)
		switch {
		case !strings.HasSuffix(f[0], ":"):
			mapping = f
			clean = false
		case f[0] == "Anonymous:":
			clean = f[1] == "0" && len(mapping) > 5 && mapping[4] != "0" && mapping[1][1] == '-' && mapping[1][3] == 'p'
		case f[0] == "Swap:" && f[1] == "0" && clean:
			if err := unmap(mapping[0]); err != nil {
				return fmt.Errorf("cannot unmap the pages of %s: %w", mapping[5], err)
			}
		}
	}
	return nil
}

// unmap unmaps the pages of a mapping whose address is "from-to".
func unmap(address string) error {
	from, to, _ := strings.Cut(address, "-")
	start, err := strconv.ParseUint(from, 16, 64)
	if err != nil {
		return err
	}
	end, err := strconv.ParseUint(to, 16, 64)
	if err != nil {
		return err
	}
	// If the page cache has the file in pages of 2 MiB, Linux maps all of one for one byte.
	// EINVAL: a kernel without huge pages.
	for _, advice := range []uintptr{syscall.MADV_NOHUGEPAGE, syscall.MADV_DONTNEED} {
		_, _, errno := syscall.Syscall(syscall.SYS_MADVISE, uintptr(start), uintptr(end-start), advice)
		if errno != 0 && (errno != syscall.EINVAL || advice != syscall.MADV_NOHUGEPAGE) {
			return errno
		}
	}
	return nil
}
