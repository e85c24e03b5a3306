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
	"regexp"
	"time"

	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/worker"
	"csi-registrar/internal/tool/importer"
)

// writeLimit is how long writing the drop-ins may take.
const writeLimit = 10 * time.Second

// maxManifest limits the size of the input; all DaemonSets of a cluster have a few MB.
const maxManifest = 64 << 20

func setupImport(fs *flag.FlagSet) runner {
	var names []importer.GivenName
	fs.Func("name", "the driver's name, if the manifest does not have it, as `[WORKLOAD=]NAME`; may be repeated", func(s string) error {
		name := importer.ParseName(s)
		if name.Driver == "" {
			return errors.New("the name is empty")
		}
		names = append(names, name)
		return nil
	})
	output := fs.String("output", "", "write one file per driver into `DIR`")
	split := fs.String("split", "", "write a kustomization, instead of drop-ins, that splits each DaemonSet by the `LABEL` of a node")
	return func(ctx context.Context, e *env, args []string) error {
		isLabel, _ := regexp.MatchString(`^([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$`, *split)
		if *split != "" && (*output == "" || !isLabel) {
			return usagef("--split needs --output, and the name of a label, without a value")
		}
		return runImport(ctx, e, names, *output, *split, args)
	}
}

// runImport prints the drop-in that replaces the registrars in the manifests, and the reasons why
// some of them cannot be replaced.
func runImport(ctx context.Context, e *env, names []importer.GivenName, output, split string, args []string) error {
	if len(args) == 0 {
		return usagef("name the manifests, or - for standard input")
	}
	var manifests []importer.File
	for _, arg := range args {
		m, err := readManifest(e, arg)
		if err != nil {
			return err
		}
		manifests = append(manifests, m)
	}
	res := importer.Import(manifests, names)
	for _, n := range res.Notes {
		fmt.Fprintf(e.stderr, "note: %s\n", safetext.Clean(n, maxLine))
	}
	for _, r := range res.Refused {
		fmt.Fprintf(e.stderr, "error: cannot import %s\n", safetext.Clean(r.Where+": "+r.Reason, maxLine))
		if r.Hint != "" {
			fmt.Fprintf(e.stderr, "hint: %s\n", r.Hint)
		}
	}
	var files []importer.File
	var err error
	switch {
	case split != "":
		files, err = importer.Split(manifests, res.Edits, split)
	case output != "":
		for _, r := range res.Registrars {
			one := []importer.Registrar{r}
			files = append(files, importer.File{Name: importer.FileName(one), Data: []byte(importer.DropIn(one, res.Edits))})
		}
	default:
		_, err = io.WriteString(e.stdout, importer.DropIn(res.Registrars, res.Edits))
	}
	if err == nil {
		err = writeNewFiles(ctx, e, output, files)
	}
	if err != nil {
		return err
	}
	if len(res.Refused) > 0 {
		return &exitError{code: exitFailed}
	}
	return nil
}

// writeNewFiles writes files into dir, and prints their names.
func writeNewFiles(ctx context.Context, e *env, dir string, files []importer.File) error {
	if files == nil {
		return nil
	}
	return worker.Run(ctx, worker.NewPool().Slot(dir, nil), writeLimit, func() error {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		var errs []error
		for _, f := range files {
			file := filepath.Join(dir, f.Name)
			err := writeNew(file, f.Data)
			if err == nil {
				_, err = fmt.Fprintln(e.stdout, safetext.Word(file))
			}
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
}

// writeNew writes a file that must not exist yet. It gets its name when it is complete, because the
// daemon may be watching the directory.
func writeNew(file string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(file), ".import-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }() // the link stays
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Link(f.Name(), file)
	}
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("cannot write %s: it already exists", safetext.Word(file))
	}
	return err
}

// readManifest reads a file, or standard input.
func readManifest(e *env, arg string) (importer.File, error) {
	name, r := "standard input", e.stdin
	if arg != "-" {
		f, err := os.Open(arg)
		if err != nil {
			return importer.File{}, fmt.Errorf("cannot import: %w", err)
		}
		defer f.Close()
		name, r = safetext.Word(arg), f
	}
	data, err := io.ReadAll(io.LimitReader(r, maxManifest+1))
	if err != nil {
		return importer.File{}, fmt.Errorf("cannot read %s: %w", name, err)
	}
	if len(data) > maxManifest {
		return importer.File{}, fmt.Errorf("cannot import %s: it has more than %d MiB", name, maxManifest>>20)
	}
	return importer.File{Name: name, Data: data}, nil
}
