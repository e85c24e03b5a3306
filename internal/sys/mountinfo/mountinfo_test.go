package mountinfo

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"csi-registrar/internal/test/fake"
)

func TestMain(m *testing.M) { fake.Main(m) }

// TestRead checks the fields of lines with and without optional fields, and which lines are
// skipped.
func TestRead(t *testing.T) {
	proc := t.TempDir()
	const text = "21 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n" +
		"22 21 0:40 /a\\040b /mnt/c\\011d\\012e\\043f\\134040 rw shared:1 master:2 - nfs4 server:/x\\134y rw\n" +
		"nonsense\n23 22 0:41 / - ext4 x rw\n24 22 0:42 / /n rw - tmpfs\n"
	if err := os.MkdirAll(filepath.Join(proc, "self"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(proc, "self", "mountinfo"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	want := []Mount{
		{"21", "1", "8:1", "/", "/", "", "", "ext4", "/dev/sda1"},
		{"22", "21", "0:40", "/a b", "/mnt/c\td\ne#f\\040", "1", "2", "nfs4", `server:/x\y`},
	}
	if got, err := Read(proc, "self"); err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := Read(proc, "1"); err == nil {
		t.Error("no file is no error")
	}
}

// FuzzParse checks that a mount that can be read is read again from the line that the kernel would
// write for it.
func FuzzParse(f *testing.F) {
	f.Add("21 1 8:1 / / rw - ext4 /dev/sda1 rw\n22 21 0:40 / /mnt/a\\040b rw shared:1 - nfs4 server:/x\\134y rw\n")
	f.Add("1 2 3 4 5 6 7 - 8 9 10\n - \n")
	escape := strings.NewReplacer(`\`, `\134`, " ", `\040`, "\t", `\011`, "\n", `\012`, "#", `\043`)
	f.Fuzz(func(t *testing.T, text string) {
		all, err := Parse(strings.NewReader(text))
		if err != nil || len(all) > strings.Count(text, " - ") {
			t.Fatalf("%d mounts, %v", len(all), err)
		}
		for _, m := range all {
			line := strings.Join([]string{m.ID, m.Parent, m.Device, escape.Replace(m.Root), escape.Replace(m.Point), "rw", "shared:" + m.Shared, "master:" + m.Master,
				"-", m.Type, escape.Replace(m.Source), "rw"}, " ")
			if strings.ContainsAny(line, "\v\f\r\u0085\u00a0") || strings.TrimSpace(m.ID) == "-" || m.ID == "" {
				continue // white space that the kernel does not write
			}
			again, err := Parse(strings.NewReader(line + "\n"))
			if strings.Count(line, " - ") == 1 && (err != nil || len(again) != 1 || again[0] != m) {
				t.Errorf("%q is read from %q as %q, %v", m, line, again, err)
			}
		}
	})
}
