package cli

import (
	"context"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/rootdir"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/worker"
)

// sourceFlags declares the flags that select the configuration files.
func sourceFlags(fs *flag.FlagSet) *config.Source {
	s := &config.Source{}
	fs.StringVar(&s.File, "config", "", "read only `FILE`, not the files in /etc, /run and /usr/lib")
	fs.StringVar(&s.Root, "config-root", "/", "use `DIR` as the root of /etc, /run and /usr/lib")
	return s
}

// fileLimit is how long a command waits for a file system.
const fileLimit = 3 * time.Second

// loadConfig reads the configuration files, whose file system may not answer.
func loadConfig(ctx context.Context, source config.Source) (*config.Result, error) {
	slot := worker.NewPool().Slot(filepath.Dir(source.Watch()[0]), nil)
	res, err := worker.Do(ctx, slot, fileLimit, func() *config.Result { return config.Load(source) }, nil)
	if err != nil {
		return nil, fmt.Errorf("cannot read the configuration: %w", err)
	}
	return res, nil
}

// configCommand returns the setup function of a command that loads the files as the daemon does,
// prints text and then each error as FILE:LINE: MESSAGE, which editors understand.
func configCommand(text func(config.Source, *config.Result) string) func(*flag.FlagSet) runner {
	return func(fs *flag.FlagSet) runner {
		source := sourceFlags(fs)
		return func(ctx context.Context, e *env, _ []string) error {
			res, err := loadConfig(ctx, *source)
			if err == nil {
				_, err = io.WriteString(e.stdout, text(*source, res))
			}
			if err != nil || len(res.Errors) == 0 {
				return err
			}
			fmt.Fprintln(e.stderr, res.Errors)
			return &exitError{code: exitConfig}
		}
	}
}

// checkedText describes a configuration without errors; empty if it has some.
func checkedText(source config.Source, res *config.Result) string {
	if len(res.Errors) > 0 {
		return ""
	}
	var b strings.Builder
	drivers, files := safetext.Count(len(res.Config.Drivers), "driver"), safetext.Count(len(res.Files), "file")
	fmt.Fprintf(&b, "no errors: %s, %s\n", drivers, files)
	if len(res.Files) == 0 && source.File == "" {
		fmt.Fprintf(&b, "note: there is no file in etc/csi-registrar, run/csi-registrar and usr/lib/csi-registrar below %s\n", safetext.Word(source.Root))
	}
	if lines := rootdir.DropIn(res.Config.Kubelet.RootDir); lines != "" && source.File == "" {
		b.WriteString("\nkubelet.root_dir needs this drop-in for the unit, then `systemctl daemon-reload` and a restart:\n\n")
		for line := range strings.SplitSeq(strings.TrimSuffix(lines, "\n"), "\n") {
			b.WriteString(safetext.Clean(line, maxLine) + "\n") // as it is pasted
		}
	}
	return b.String()
}

// shownText is the valid part of the configuration, even if there are errors.
func shownText(_ config.Source, res *config.Result) string { return res.Show() }
