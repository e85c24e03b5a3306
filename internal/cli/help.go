package cli

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"text/tabwriter"
)

// runHelp prints the help of the command that the arguments name, or the list of all commands.
func runHelp(ctx context.Context, e *env, args []string) error {
	return dispatch(ctx, e, commands(), append(args, "--help"))
}

// groupHelp returns the help of a group of commands.
func groupHelp(path []string, about string, all []command) string {
	var w strings.Builder
	fmt.Fprintf(&w, "%s.\n\nusage: %s COMMAND [ARGUMENT...]\n\n", about, strings.Join(path, " "))
	table := tabwriter.NewWriter(&w, 0, 0, 2, ' ', 0)
	for _, c := range all {
		fmt.Fprintf(table, "  %s\t%s\n", c.name, c.summary)
	}
	table.Flush() // to memory
	fmt.Fprintf(&w, "\nSee %s COMMAND --help.\n", strings.Join(path, " "))
	return w.String()
}

// commandHelp returns the help of one command, whose flags fs has.
func commandHelp(path []string, c command, fs *flag.FlagSet) string {
	var w strings.Builder
	flags := shownFlags(fs)
	words := slices.Clone(path)
	if c.args != "" {
		words = append(words, c.args)
	}
	if len(flags) > 0 {
		words = append(words, "[FLAG...]")
	}
	fmt.Fprintf(&w, "usage: %s\n\n%s.\n", strings.Join(words, " "), sentence(c.summary))
	if c.about != "" {
		fmt.Fprintf(&w, "\n%s\n", strings.TrimSpace(c.about))
	}
	for i, f := range flags {
		if i == 0 {
			w.WriteString("\nFlags:\n")
		}
		value, usage := flag.UnquoteUsage(f)
		if f.DefValue != "" && f.DefValue != "false" && f.DefValue != "0s" && f.DefValue != "0" {
			usage += fmt.Sprintf(" (default %s)", f.DefValue)
		}
		fmt.Fprintf(&w, "  %s\n        %s\n", strings.TrimSpace("--"+f.Name+" "+value), strings.Join(wrap(usage, 72), "\n        "))
	}
	return w.String()
}

func sentence(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

// shownFlags returns the documented flags, sorted by name.
func shownFlags(fs *flag.FlagSet) (out []*flag.Flag) {
	fs.VisitAll(func(f *flag.Flag) {
		if f.Usage != "" {
			out = append(out, f)
		}
	})
	return out
}

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
			return writeJSON(e.stdout, b, "  ")
		}
		commit := ""
		if b.Commit != "" {
			commit = ", commit " + b.Commit
		}
		_, err := fmt.Fprintf(e.stdout, "csi-registrar %s (%s, %s/%s%s)\n", b.Version, b.GoVersion, b.OS, b.Arch, commit)
		return err
	}
}
