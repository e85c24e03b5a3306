package daemon

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// What is given back is the program's code and constants, and the program goes on.
func TestUnmapProgram(t *testing.T) {
	before := residentProgram(t)
	if err := unmapProgram(); err != nil {
		t.Fatal(err)
	}
	after := residentProgram(t)
	t.Logf("%d kB of the program were mapped, then %d kB", before, after)
	if after >= before {
		t.Errorf("%d kB of the program were mapped, then %d kB", before, after)
	}
}

// residentProgram is how much of this program's file is in memory, in kB.
func residentProgram(t *testing.T) (kB int) {
	t.Helper()
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	ours := false
	for line := range strings.Lines(string(smaps)) {
		var resident int
		if strings.Contains(line, "-") && strings.Contains(line, " r") {
			ours = strings.HasSuffix(line, " "+program+"\n")
		} else if n, _ := fmt.Sscanf(line, "Rss: %d kB", &resident); n == 1 && ours {
			kB += resident
		}
	}
	return kB
}

// A page that was changed is not the file's any more, and would come back as it was.
func TestOnlyUnchangedPagesAreUnmapped(t *testing.T) {
	const smaps = `00400000-00950000 r-xp 00000000 fe:00 17 /usr/bin/csi-registrar
Rss:                5296 kB
Anonymous:             0 kB
00950000-00ed6000 r--p 00550000 fe:00 17 /usr/bin/csi-registrar
Anonymous:             4 kB
00ed6000-00f43000 rw-p 00ad6000 fe:00 17 /usr/bin/csi-registrar
Anonymous:             0 kB
00f50000-00f60000 r--s 00ad6000 fe:00 17 /usr/bin/csi-registrar
Anonymous:             0 kB
7f0000000000-7f0000010000 r-xp 00000000 fe:00 18 /usr/lib/other
Anonymous:             0 kB
7f0000010000-7f0000020000 r--p 00000000 00:00 0 
Anonymous:             0 kB
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
`
	var got []string
	for from, to := range unchanged(smaps, "/usr/bin/csi-registrar") {
		got = append(got, fmt.Sprintf("%x-%x", from, to))
	}
	if s := fmt.Sprint(got); s != "[400000-950000]" {
		t.Errorf("would unmap %s", s)
	}
}
