package cli

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
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
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				b.Revision = s.Value
			case "vcs.modified":
				b.Modified = s.Value == "true"
			}
		}
		b.Version = cmp.Or(b.Version, strings.Trim(info.Main.Version, "()")) // it may be (devel)
	}
	b.Version = cmp.Or(b.Version, "devel")
	return b
}

func setupVersion(fs *flag.FlagSet) runner {
	asJSON := fs.Bool("json", false, "print a JSON document")
	return func(_ context.Context, e *env, _ []string) error {
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
