package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestEveryChangeCounts checks that a change is one, and is saved, whatever it is and however
// little it changes the file.
func TestEveryChangeCounts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last-good.json")
	configured := func(change func(*Config)) *InForce {
		c := Default()
		c.Drivers = []Driver{DefaultDriver("a", "/run/a")}
		change(c)
		return &InForce{Config: c, Files: []string{"main"}}
	}
	before := configured(func(*Config) {})
	for what, change := range map[string]func(*Config){
		"a socket of the same length": func(c *Config) { c.Drivers[0] = DefaultDriver("a", "/run/b") },
		"the level of the log":        func(c *Config) { c.Log.Level = "warn" },
		"the root directory":          func(c *Config) { c.Kubelet.RootDir = "/k" },
		"one driver less":             func(c *Config) { c.Drivers = nil },
	} {
		after := configured(change)
		if before.Equal(after) {
			t.Errorf("%s is no change", what)
		}
		for _, c := range []*InForce{before, after} {
			if err := SaveLastGood(path, c); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := LoadLastGood(path); err != nil || !got.Equal(after) {
			t.Errorf("%s is not saved: %v", what, err)
		}
	}
}

// TestKubeletLeavesOutTables checks that an error in [kubelet] is that of each driver's table, and
// of no file: the file's other tables are valid.
func TestKubeletLeavesOutTables(t *testing.T) {
	tables, files := one("[kubelet]\nroot_dir = \"k\"\n" + goodTable).LeftOut()
	if errs := tables["good"]; len(errs) != 1 || !strings.Contains(errs[0].Key, "root_dir") || len(files) > 0 {
		t.Errorf("%v, files %v", tables, files)
	}
}

// TestLinksToWatch checks that a link to /dev/null, which hides a file, is not watched.
func TestLinksToWatch(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "etc/csi-registrar/conf.d")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	file, link := filepath.Join(root, "a"), filepath.Join(dir, "a.toml")
	if err := os.WriteFile(file, []byte(goodTable), 0o600); err != nil {
		t.Fatal(err)
	}
	for at, target := range map[string]string{link: file, filepath.Join(dir, "b.toml"): os.DevNull} {
		if err := os.Symlink(target, at); err != nil {
			t.Fatal(err)
		}
	}
	if r := Load(Source{Root: root}); len(r.Links) != 1 || r.Links[0] != link || len(r.Errors) > 0 {
		t.Errorf("links %v, errors %v", r.Links, r.Errors)
	}
}
