package config

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestSample holds the sample configuration: as shipped it changes nothing, and with
// each setting taken in it names every key at its default.
func TestSample(t *testing.T) {
	data, err := os.ReadFile("../../../packaging/config.toml")
	if err != nil {
		t.Fatal(err)
	}
	load := func(text string) *Result {
		t.Helper()
		file := filepath.Join(t.TempDir(), "config.toml")
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		r := Load(Source{File: file})
		if len(r.Errors) > 0 {
			t.Fatal(r.Errors)
		}
		return r
	}
	if got := load(string(data)).Config; !got.Equal(Default()) {
		t.Errorf("as shipped it is not the default: %+v", got)
	}

	setting := regexp.MustCompile(`(?m)^#([a-z\[])`)
	r := load(setting.ReplaceAllString(string(data), "$1"))
	want := Default()
	want.Drivers = []Driver{DefaultDriver("nfs.csi.k8s.io", "/var/lib/kubelet/plugins/csi-nfsplugin/csi.sock")}
	if !r.Config.Equal(want) {
		t.Errorf("with all settings:\ngot  %+v\nwant %+v", r.Config, want)
	}
	var all []string
	for _, k := range keys(kubeletFields()) {
		all = append(all, keyString("kubelet", k))
	}
	for _, k := range keys(logFields()) {
		all = append(all, keyString("log", k))
	}
	for _, k := range keys(driverFields()) {
		all = append(all, keyString("driver", "nfs.csi.k8s.io", k))
	}
	for _, key := range all {
		if r.Origin(key) == "default" {
			t.Errorf("%s is missing", key)
		}
	}

	lines := strings.Split(string(data), "\n")
	for i, line := range lines {
		if setting.MatchString(line) && strings.Contains(line, "=") && !strings.HasPrefix(lines[i-1], "# ") {
			t.Errorf("line %d has no reason above it: %s", i+1, line)
		}
		if len(line) > 92 {
			t.Errorf("line %d is longer than 92 characters", i+1)
		}
	}
}
