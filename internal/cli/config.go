package cli

import (
	"context"
	"flag"
	"fmt"
	"io"
	"strings"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/systemd"
)

// sourceFlags declares the flags that select the configuration files.
func sourceFlags(fs *flag.FlagSet) *config.Source {
	s := &config.Source{}
	fs.StringVar(&s.File, "config", "", "read only `FILE`, not the files in /etc, /run and /usr/lib")
	fs.StringVar(&s.Root, "config-root", "/", "use `DIR` as the root of /etc, /run and /usr/lib")
	return s
}

// setupConfigCheck uses the daemon's own loader, so that both accept the same files.
func setupConfigCheck(fs *flag.FlagSet) runner {
	source := sourceFlags(fs)
	return func(_ context.Context, e *env, _ []string) error {
		res := config.Load(*source)
		printErrors(e, res)
		if len(res.Errors) > 0 {
			return &exitError{code: exitConfig}
		}
		var b strings.Builder
		fmt.Fprintf(&b, "no errors: %s, %s\n", count(len(res.Config.Drivers), "driver"), count(len(res.Files), "file"))
		for _, d := range res.Config.Drivers {
			if link, target := res.Config.Kubelet.Announced(d); target != "" {
				fmt.Fprintf(&b, "%s: the kubelet is given %s, a link to %s; changing endpoint_link re-registers the driver\n",
					safetext.Word(d.Name), safetext.Word(link), safetext.Word(target))
			}
		}
		if lines := systemd.DropIn(res.Config.Kubelet.RootDir); lines != "" && source.File == "" {
			fmt.Fprintf(&b, "\nkubelet.root_dir needs this drop-in for the unit, then `systemctl daemon-reload` and a restart:\n\n%s",
				cleanLines(lines))
		}
		_, err := io.WriteString(e.stdout, b.String())
		return err
	}
}

// setupConfigShow prints the valid part of the configuration even if there are errors.
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

// printErrors prints each error as FILE:LINE: MESSAGE, which editors understand.
func printErrors(e *env, res *config.Result) {
	for _, err := range res.Errors {
		fmt.Fprintln(e.stderr, err)
	}
}

// count formats a number and its noun.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
