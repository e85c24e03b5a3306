package volumes

import (
	"io"
	"os"
	"path/filepath"
	"strings"
)

// Mount is a line of mountinfo (proc_pid_mountinfo(5)).
type Mount struct{ ID, Parent, Device, Root, Point, Type, Source string }

// Mounts returns the mounts that a process sees, in the order in which they were made. The process
// is "self" or a pid, and proc is the path of /proc.
func Mounts(proc, process string) ([]Mount, error) {
	f, err := os.Open(filepath.Join(proc, process, "mountinfo"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return ParseMounts(f)
}

// ParseMounts returns the mounts in a mountinfo file.
func ParseMounts(mountinfo io.Reader) ([]Mount, error) {
	text, err := io.ReadAll(io.LimitReader(mountinfo, maxMounts))
	var all []Mount
	for line := range strings.Lines(string(text)) {
		before, after, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
		fields, rest := strings.Fields(before), strings.Fields(after)
		if ok && len(fields) >= 6 && len(rest) >= 2 {
			all = append(all, Mount{fields[0], fields[1], fields[2], unescape.Replace(fields[3]), unescape.Replace(fields[4]), rest[0], unescape.Replace(rest[1])})
		}
	}
	return all, err
}

// unescape decodes the kernel's escapes of field separators.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`)
