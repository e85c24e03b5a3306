package config

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// BenchmarkLoad is a start or a reload with 20 drivers, each in its package's own file.
func BenchmarkLoad(b *testing.B) {
	root := b.TempDir()
	dir := filepath.Join(root, "usr/lib/csi-registrar/conf.d")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		b.Fatal(err)
	}
	for i := range 20 {
		text := fmt.Sprintf("[driver.\"d%d.example\"]\nsocket = \"/run/d%d/csi.sock\"\ntimeout = \"10s\"\nwhen_driver_is_gone = \"keep\"\n", i, i)
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("20-d%d.toml", i)), []byte(text), 0o644); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		if r := Load(Source{Root: root}); len(r.Errors) > 0 || len(r.Config.Drivers) != 20 {
			b.Fatalf("%d drivers, %v", len(r.Config.Drivers), r.Errors)
		}
	}
}
