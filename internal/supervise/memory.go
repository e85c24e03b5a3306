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
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(maps)) {
		// proc(5): address, permissions, offset, device, inode, path. A private mapping that cannot
		// be written has nothing that the file does not have.
		f := strings.Fields(line)
		if len(f) < 6 || f[1][1] != '-' || f[1][3] != 'p' || f[4] == "0" {
			continue
		}
		from, to, _ := strings.Cut(f[0], "-")
		start, startErr := strconv.ParseUint(from, 16, 64)
		end, endErr := strconv.ParseUint(to, 16, 64)
		if startErr != nil || endErr != nil {
			return fmt.Errorf("/proc/self/maps has the line %q", line)
		}
		// If the page cache has the file in pages of 2 MiB, Linux maps all of one for one byte.
		// EINVAL: a kernel without huge pages.
		for _, advice := range []uintptr{syscall.MADV_NOHUGEPAGE, syscall.MADV_DONTNEED} {
			_, _, errno := syscall.Syscall(syscall.SYS_MADVISE, uintptr(start), uintptr(end-start), advice)
			if errno != 0 && (errno != syscall.EINVAL || advice != syscall.MADV_NOHUGEPAGE) {
				return fmt.Errorf("cannot unmap the pages of %s: %w", f[5], errno)
			}
		}
	}
	return nil
}
