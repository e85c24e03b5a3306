package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"

	"csi-registrar/internal/config"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/systemd"
)

// sourceFlags declares which files make the configuration.
func sourceFlags(fs *flag.FlagSet) *config.Source {
	s := &config.Source{}
	fs.StringVar(&s.File, "config", "", "read `FILE` alone, instead of the files in /etc, /run and /usr/lib")
	fs.StringVar(&s.Root, "config-root", "/", "take `DIR` for the root of /etc, /run and /usr/lib")
	return s
}

// setupConfigCheck reads the files as the daemon does: what passes here is what it takes.
func setupConfigCheck(fs *flag.FlagSet) runner {
	source := sourceFlags(fs)
	return func(_ context.Context, e *env, _ []string) error {
		res := config.Load(*source)
		printErrors(e, res)
		if len(res.Errors) > 0 {
			return &exitError{code: exitConfig}
		}
		_, err := fmt.Fprintf(e.stdout, "no errors: %s, %s\n",
			count(len(res.Config.Drivers), "driver"), count(len(res.Files), "file"))
		for _, d := range res.Config.Drivers {
			if link, target := res.Config.Kubelet.Announced(d); target != "" {
				_, outErr := fmt.Fprintf(e.stdout, "%s: the kubelet is told %s, a link to %s; to change endpoint_link registers the driver once more\n",
					safetext.Word(d.Name), safetext.Word(link), safetext.Word(target))
				err = errors.Join(err, outErr)
			}
		}
		if lines := systemd.DropIn(res.Config.Kubelet.RootDir); lines != "" && source.File == "" {
			_, outErr := fmt.Fprintf(e.stdout, "\nThe unit needs this file for kubelet.root_dir, then `systemctl daemon-reload` and a restart:\n\n%s", cleanLines(lines))
			err = errors.Join(err, outErr)
		}
		return err
	}
}

// setupConfigShow prints what is right even where not everything is.
func setupConfigShow(fs *flag.FlagSet) runner {
	source := sourceFlags(fs)
	asJSON := fs.Bool("json", false, "print a JSON document")
	return func(_ context.Context, e *env, _ []string) error {
		res := config.Load(*source)
		var err error
		if *asJSON {
			err = writeJSON(e.stdout, res.Document())
		} else {
			_, err = io.WriteString(e.stdout, res.Show())
		}
		if err != nil {
			return err
		}
		printErrors(e, res)
		if len(res.Errors) > 0 {
			return &exitError{code: exitFailed}
		}
		return nil
	}
}

// printErrors prints every error as FILE:LINE, for people and editors.
func printErrors(e *env, res *config.Result) {
	for _, bad := range res.Errors {
		fmt.Fprintln(e.stderr, bad)
	}
}

// count is a number with its noun.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
