package config

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func sampleConfig() *InForce {
	c := Default()
	c.Kubelet.RootDir = "/var/lib/\"k\u202eubelet"
	c.Log.Level = "debug"
	a := DefaultDriver("Foo.Example", "/run/a b.sock")
	a.Endpoint, a.Enabled, a.SocketOwner = "/e", false, "no-such-user-any-more"
	a.Timeout, a.SupportedVersions, a.WhenGone = 1500*time.Millisecond, []string{"1.0.0", "1.9.0"}, Withdraw
	c.Drivers = []Driver{a, DefaultDriver("nfs.csi.k8s.io", "/run/nfs.sock")}
	return &InForce{c, []string{"/etc/a.toml", "/etc/b\n.toml"}, "/etc/a.toml"}
}

func TestLastGood(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last-good.toml")
	if _, err := LoadLastGood(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("none: %v", err)
	}
	want := sampleConfig()
	if err := SaveLastGood(path, want); err != nil {
		t.Fatal(err)
	}
	got, err := LoadLastGood(path)
	if err != nil || !got.Equal(want) {
		t.Fatalf("got %+v, want %+v: %v", got, want, err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info.Mode(), err)
	}

	// Saving the same again does not touch the file, so that watchers get no event.
	if err := SaveLastGood(path, want); err != nil {
		t.Fatal(err)
	}
	if again, err := os.Stat(path); err != nil || !os.SameFile(info, again) || !again.ModTime().Equal(info.ModTime()) {
		t.Errorf("written again: %v", err)
	}
	defaults := &InForce{Config: Default()}
	if err := SaveLastGood(path, defaults); err != nil {
		t.Fatal(err)
	}
	if got, err := LoadLastGood(path); err != nil || !got.Equal(defaults) {
		t.Errorf("the second: %+v %v", got, err)
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v %v", entries, err)
	}
}

// A key that the version which wrote the file did not know has its default.
func TestLastGoodOfAnEarlierVersion(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last-good.toml")
	if err := os.WriteFile(path, []byte(`{"Format": 3, "Kubelet": {"RootDir": "/k"}, "Drivers": [{"Name": "a", "Socket": "/a", "Endpoint": "/a", "Enabled": true, "Timeout": 1000000000}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	want := DefaultDriver("a", "/a")
	want.Timeout = time.Second
	if got, err := LoadLastGood(path); err != nil || len(got.Drivers) != 1 || !got.Drivers[0].Equal(want) {
		t.Errorf("got %+v, want %+v: %v", got, want, err)
	}
}

// TestLastGoodDamaged cuts the file at each byte.
func TestLastGoodDamaged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last-good.toml")
	if err := SaveLastGood(path, sampleConfig()); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(what string, data []byte) {
		t.Helper()
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := LoadLastGood(path)
		if err == nil || c != nil || !strings.HasPrefix(err.Error(), "cannot use the last good configuration: ") {
			t.Errorf("%s: %+v %v", what, c, err)
		}
	}
	for n := range whole {
		refused("cut", whole[:n])
	}
	refused("another format", []byte(strings.Replace(string(whole), `"Format": 3`, `"Format": 2`, 1)))
	refused("no configuration", []byte(`{"Format": 3}`))
	refused("no configuration", []byte(`{"Format": 3, "Files": []}`))
	refused("longer", append(whole, "{}"...))

	if err := os.WriteFile(path, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o622); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadLastGood(path); err == nil || !strings.Contains(err.Error(), "may be written by") {
		t.Errorf("writable by others: %v", err)
	}
}

func TestLastGoodCannotBeWritten(t *testing.T) {
	dir := t.TempDir()
	if err := SaveLastGood(filepath.Join(dir, "none", "x"), &InForce{Config: Default()}); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	// In the place of the file there is a directory that is not empty.
	path := filepath.Join(dir, "x")
	if err := os.MkdirAll(filepath.Join(path, "y"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := SaveLastGood(path, &InForce{Config: Default()}); err == nil {
		t.Error("no error")
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v %v", entries, err)
	}
}
