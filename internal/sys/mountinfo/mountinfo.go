// Package mountinfo reads the list of mounts of a process (proc_pid_mountinfo(5)).
package mountinfo

import (
	"io"
	"os"
	"path/filepath"
	"strings"
)

// maxSize limits how much of a file is read.
const maxSize = 64 << 20

// Mount is a line of mountinfo. Shared is the peer group of the mount, to whose members every mount
// and unmount below it propagates; Master is the group from which it receives them. They are empty
// if there is none.
type Mount struct{ ID, Parent, Device, Root, Point, Shared, Master, Type, Source string }

// Read returns the mounts that a process sees, in the order in which they were made. The process
// is "self" or a pid, and proc is the path of /proc.
func Read(proc, process string) ([]Mount, error) {
	f, err := os.Open(filepath.Join(proc, process, "mountinfo"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return Parse(f)
}

// Parse returns the mounts in a mountinfo file.
func Parse(mountinfo io.Reader) ([]Mount, error) {
	text, err := io.ReadAll(io.LimitReader(mountinfo, maxSize))
	var all []Mount
	for line := range strings.Lines(string(text)) {
		before, after, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
		fields, rest := strings.Fields(before), strings.Fields(after)
		if ok && len(fields) >= 6 && len(rest) >= 2 {
			m := Mount{ID: fields[0], Parent: fields[1], Device: fields[2], Root: unescape.Replace(fields[3]), Point: unescape.Replace(fields[4]),
				Type: rest[0], Source: unescape.Replace(rest[1])}
			for _, optional := range fields[6:] {
				switch tag, group, _ := strings.Cut(optional, ":"); tag {
				case "shared":
					m.Shared = group
				case "master":
					m.Master = group
				}
			}
			all = append(all, m)
		}
	}
	return all, err
}

// unescape decodes the kernel's escapes of field separators.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`)
