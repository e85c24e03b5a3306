package trust

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
)

// TestLongestChainOfLinks checks that 40 symbolic links are followed, as by the kernel, and no
// more.
func TestLongestChainOfLinks(t *testing.T) {
	dir := tempDir(t)
	must(t, os.Symlink("a/b/f", dir+"/l1"))
	for i := 2; i <= 41; i++ {
		must(t, os.Symlink(fmt.Sprintf("l%d", i-1), fmt.Sprintf("%s/l%d", dir, i)))
	}
	if err := mine(dir).Check(dir + "/l40"); err != nil {
		t.Errorf("40 links: %v", err)
	}
	if err := mine(dir).Check(dir + "/l41"); err == nil || !strings.Contains(err.Error(), "too many levels") {
		t.Errorf("41 links: %v", err)
	}
}

// TestHighestUID checks that 4294967294 is a uid, and the next number, which means "no user", is
// not.
func TestHighestUID(t *testing.T) {
	if o, err := ParseOwner("4294967294"); o != "4294967294" || err != nil {
		t.Errorf("%q, %v", o, err)
	}
	for _, s := range []string{"4294967295", "4294967296", ""} {
		if _, err := ParseOwner(s); err == nil {
			t.Errorf("%q is accepted", s)
		}
	}
}

// TestLastOfTwoLinks checks that of two links of a trusted user the last one counts, and that a
// link of root may point into a directory of any trusted user.
func TestLastOfTwoLinks(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("other users' files need root")
	}
	dir := tempDir(t)
	rule := Rule{Owners: []uint32{stranger, 0}, Below: dir}
	must(t, os.Mkdir(dir+"/theirs", 0o755))
	must(t, os.Lchown(dir+"/theirs", stranger, 0))
	for name, target := range map[string]string{"first": "theirs/second", "theirs/second": "../a/b/f"} {
		must(t, os.Symlink(target, dir+"/"+name))
		must(t, os.Lchown(dir+"/"+name, stranger, 0))
	}
	e, ok := errors.AsType[*Error](rule.Check(dir + "/first"))
	if !ok || e.Path != dir+"/theirs/second" {
		t.Errorf("%+v", e)
	}
	must(t, os.WriteFile(dir+"/theirs/f", nil, 0o600))
	must(t, os.Lchown(dir+"/theirs/f", stranger, 0))
	must(t, os.Symlink("theirs/f", dir+"/roots"))
	if err := rule.Check(dir + "/roots"); err != nil {
		t.Error(err)
	}
}
