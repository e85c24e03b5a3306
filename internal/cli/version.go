package cli

import (
	"context"
	"flag"
	"fmt"
	"runtime"
	"runtime/debug"
)

// buildVersion is set by the linker: -X csi-registrar/internal/cli.buildVersion=1.2.3.
var buildVersion string

// buildInfo describes the program. Its JSON form is the output of version --json.
type buildInfo struct {
	Version   string `json:"version"`
	GoVersion string `json:"go_version"`
	OS        string `json:"os"`
	Arch      string `json:"arch"`
	Revision  string `json:"revision,omitempty"` // of the source; absent if the build did not know it
	Modified  bool   `json:"modified,omitempty"` // the source had changes beyond the revision
}

// build reads what the linker and the go command stored in the binary.
func build() buildInfo {
	b := buildInfo{Version: buildVersion, GoVersion: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b.named()
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	if v := info.Main.Version; b.Version == "" && v != "(devel)" {
		b.Version = v
	}
	return b.named()
}

func (b buildInfo) named() buildInfo {
	if b.Version == "" {
		b.Version = "devel"
	}
	return b
}

func setupVersion(fs *flag.FlagSet) runner {
	asJSON := fs.Bool("json", false, "print a JSON document")
	return func(_ context.Context, e *env, args []string) error {
		if err := noArgs(args); err != nil {
			return err
		}
		b := build()
		if *asJSON {
			return writeJSON(e.stdout, b)
		}
		revision := ""
		if b.Revision != "" {
			revision = ", revision " + b.Revision
		}
		if b.Modified {
			revision += " with changes"
		}
		_, err := fmt.Fprintf(e.stdout, "csi-registrar %s (%s, %s/%s%s)\n", b.Version, b.GoVersion, b.OS, b.Arch, revision)
		return err
	}
}
