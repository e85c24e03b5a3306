package unixsock

import (
	"os"
	"path/filepath"
	"testing"
)

// A new file may have the inode number of one that was removed: its time of birth is another.
func TestRemoveLeavesAnotherFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	other := f.FileID
	other.Born--
	if removed, err := Remove(path, other); removed || err != nil {
		t.Errorf("the file of an earlier birth is removed: %v, %v", removed, err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Error(err)
	}
	if removed, err := Remove(path, f.FileID); !removed || err != nil {
		t.Errorf("removed: %v, %v", removed, err)
	}
	if removed, err := Remove(path, f.FileID); removed || err != nil {
		t.Errorf("a file that does not exist is removed: %v, %v", removed, err)
	}
}

func TestOwnerAndGroup(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	uid, gid := os.Geteuid(), os.Getegid()
	if uid == 0 {
		uid, gid = 65533, 65532
		if err := os.Chown(path, uid, gid); err != nil {
			t.Fatal(err)
		}
	}
	if f, err := Lstat(path); err != nil || f.UID != uint32(uid) || f.GID != uint32(gid) {
		t.Errorf("%+v, %v, want %d:%d", f, err, uid, gid)
	}
}
