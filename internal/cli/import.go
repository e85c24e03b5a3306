package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"csi-registrar/internal/tool/importer"
	"csi-registrar/internal/sys/safetext"
)

// maxManifest limits the size of the input; all DaemonSets of a cluster have a few MB.
const maxManifest = 64 << 20

func setupImport(fs *flag.FlagSet) runner {
	var names []compat.GivenName
	fs.Func("name", "the driver's name, if the manifest does not have it, as `[WORKLOAD=]NAME`; may be repeated", func(s string) error {
		names = append(names, compat.ParseName(s))
		return nil
	})
	output := fs.String("output", "", "write one file per driver into `DIR`")
	return func(_ context.Context, e *env, args []string) error { return runImport(e, names, *output, args) }
}

// runImport prints the drop-in that replaces the registrars in the manifests, and the reasons why
// some of them cannot be replaced.
func runImport(e *env, names []compat.GivenName, output string, args []string) error {
	if len(args) == 0 {
		return usagef("name the manifests, or - for standard input")
	}
	var manifests []compat.Manifest
	for _, arg := range args {
		m, err := readManifests(e, arg)
		if err != nil {
			return err
		}
		manifests = append(manifests, m...)
	}
	res := compat.Import(manifests, names)
	for _, n := range res.Notes {
		fmt.Fprintf(e.stderr, "note: %s\n", safetext.Clean(n, maxLine))
	}
	for _, r := range res.Refused {
		fmt.Fprintf(e.stderr, "error: cannot import %s\n", safetext.Clean(r.Where+": "+r.Reason, maxLine))
		if r.Hint != "" {
			fmt.Fprintf(e.stderr, "hint: %s\n", r.Hint)
		}
	}
	if err := writeDropIns(e, output, res); err != nil {
		return err
	}
	if len(res.Refused) > 0 {
		return &exitError{code: exitFailed}
	}
	return nil
}

// writeDropIns writes one drop-in for all drivers to standard output, or one per driver into dir.
func writeDropIns(e *env, dir string, res compat.Result) error {
	if dir == "" {
		return compat.WriteDropIn(e.stdout, res.Registrars, res.Edits)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var errs []error
	for _, r := range res.Registrars {
		one := []compat.Registrar{r}
		file := filepath.Join(dir, compat.FileName(one))
		err := writeNew(file, func(w io.Writer) error { return compat.WriteDropIn(w, one, res.Edits) })
		if err == nil {
			_, err = fmt.Fprintln(e.stdout, safetext.Word(file))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// writeNew writes a file that must not exist yet. It gets its name when it is complete, because the
// daemon may be watching the directory.
func writeNew(file string, write func(io.Writer) error) error {
	f, err := os.CreateTemp(filepath.Dir(file), ".import-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }() // the link stays
	err = errors.Join(write(f), f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Link(f.Name(), file)
	}
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("cannot write %s: it already exists", safetext.Word(file))
	}
	return err
}

// readManifests reads a file, standard input, or the manifests in a directory.
func readManifests(e *env, arg string) ([]compat.Manifest, error) {
	if arg == "-" {
		m, err := readAll("standard input", e.stdin)
		return []compat.Manifest{m}, err
	}
	if info, err := os.Stat(arg); err == nil && info.IsDir() {
		return readDirectory(arg)
	}
	m, err := readFile(arg)
	return []compat.Manifest{m}, err
}

// readDirectory reads the files of a directory that kubectl would apply.
func readDirectory(dir string) ([]compat.Manifest, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("cannot import: %w", err)
	}
	has := func(name string) bool {
		return slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() == name })
	}
	name := safetext.Word(dir)
	switch {
	case has("Chart.yaml"):
		return nil, hinted(fmt.Errorf("cannot import %s: it is a chart of Helm", name),
			"render it first: helm template "+safetext.ShellWord(dir)+" | csi-registrar import -")
	case has("kustomization.yaml") || has("kustomization.yml"):
		return nil, hinted(fmt.Errorf("cannot import %s: it has a kustomization", name),
			"render it first: kubectl kustomize "+safetext.ShellWord(dir)+" | csi-registrar import -")
	}
	var manifests []compat.Manifest
	for _, entry := range entries {
		if ext := filepath.Ext(entry.Name()); entry.IsDir() || !slices.Contains([]string{".yaml", ".yml", ".json"}, ext) {
			continue
		}
		m, err := readFile(filepath.Join(dir, entry.Name()))
		if err != nil {
			return nil, err
		}
		manifests = append(manifests, m)
	}
	if len(manifests) == 0 {
		return nil, fmt.Errorf("cannot import %s: no file in it ends in .yaml, .yml or .json", name)
	}
	return manifests, nil
}

func readFile(file string) (compat.Manifest, error) {
	f, err := os.Open(file)
	if err != nil {
		return compat.Manifest{}, fmt.Errorf("cannot import: %w", err)
	}
	defer f.Close()
	return readAll(safetext.Word(file), f)
}

func readAll(name string, r io.Reader) (compat.Manifest, error) {
	data, err := io.ReadAll(io.LimitReader(r, maxManifest+1))
	if err != nil {
		return compat.Manifest{}, fmt.Errorf("cannot read %s: %w", name, err)
	}
	if len(data) > maxManifest {
		return compat.Manifest{}, fmt.Errorf("cannot import %s: it has more than %d MiB", name, maxManifest>>20)
	}
	return compat.Manifest{Name: name, Data: data}, nil
}
