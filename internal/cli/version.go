package cli

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"runtime"
	"runtime/debug"
)

// The linker sets these: -X csi-registrar/internal/cli.buildVersion=1.2.3.
var buildVersion, buildCommit string

// buildInfo describes the program. Its JSON form is the output of version --json.
type buildInfo struct {
	Version string `json:"version"`
	// Of the source; absent if unknown to the build.
	Commit    string        `json:"commit,omitempty"`
	GoVersion string        `json:"go_version"`
	OS        string        `json:"os"`
	Arch      string        `json:"arch"`
	Modules   []buildModule `json:"modules"` // linked modules
}

// buildModule is one Go module in the program.
type buildModule struct {
	Path    string `json:"path"`
	Version string `json:"version"`
	Sum     string `json:"sum"` // as in go.sum
}

// build reads what the linker and the go command stored in the binary.
func build() buildInfo {
	b := buildInfo{
		Version: cmp.Or(buildVersion, "devel"), Commit: buildCommit,
		GoVersion: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH, Modules: []buildModule{},
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			b.Modules = append(b.Modules, buildModule{m.Path, m.Version, m.Sum})
		}
	}
	return b
}

func setupVersion(fs *flag.FlagSet) runner {
	asJSON := fs.Bool("json", false, "print a JSON document")
	return func(_ context.Context, e *env, _ []string) error {
		b := build()
		if *asJSON {
			return writeJSON(e.stdout, b)
		}
		commit := ""
		if b.Commit != "" {
			commit = ", commit " + b.Commit
		}
		_, err := fmt.Fprintf(e.stdout, "csi-registrar %s (%s, %s/%s%s)\n", b.Version, b.GoVersion, b.OS, b.Arch, commit)
		return err
	}
}
