package cli

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"

	"csi-registrar/internal/compat"
	"csi-registrar/internal/safetext"
)

// maxManifest bounds what import reads; rendered charts have some hundred kB.
const maxManifest = 16 << 20

func setupImport(fs *flag.FlagSet) runner {
	name := fs.String("name", "", "the driver's `name`, if the manifest does not have it")
	return func(_ context.Context, e *env, args []string) error { return runImport(e, *name, args) }
}

// runImport prints the drop-in that replaces the registrar in the manifests, or, if anything
// cannot be derived from them, only the reasons.
func runImport(e *env, name string, args []string) error {
	if len(args) == 0 {
		return usagef(nil, "name the manifests, or - for standard input")
	}
	var manifests []compat.Manifest
	for _, arg := range args {
		m, err := readManifest(e, arg)
		if err != nil {
			return err
		}
		manifests = append(manifests, m)
	}
	res := compat.Import(manifests, name)
	for _, n := range res.Notes {
		fmt.Fprintf(e.stderr, "note: %s\n", safetext.Clean(n, maxLine))
	}
	for _, r := range res.Refused {
		fmt.Fprintf(e.stderr, "error: cannot import %s\n", safetext.Clean(r.Where+": "+r.Reason, maxLine))
		if r.Hint != "" {
			fmt.Fprintf(e.stderr, "hint: %s\n", r.Hint)
		}
	}
	if len(res.Refused) > 0 {
		return &exitError{code: exitFailed}
	}
	return compat.WriteDropIns(e.stdout, res.Registrars)
}

func readManifest(e *env, arg string) (compat.Manifest, error) {
	m, in := compat.Manifest{Name: "standard input"}, e.stdin
	if arg != "-" {
		m.Name = safetext.Word(arg)
		f, err := os.Open(arg)
		if err != nil {
			return m, fmt.Errorf("cannot import: %w", err)
		}
		defer f.Close()
		in = f
	}
	var err error
	if m.Data, err = io.ReadAll(io.LimitReader(in, maxManifest+1)); err != nil {
		return m, fmt.Errorf("cannot read %s: %w", m.Name, err)
	}
	if len(m.Data) > maxManifest {
		return m, fmt.Errorf("cannot import %s: it has more than %d MiB", m.Name, maxManifest>>20)
	}
	return m, nil
}
