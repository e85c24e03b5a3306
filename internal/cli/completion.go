package cli

import (
	"context"
	_ "embed" // the scripts
	"flag"
	"io"
	"slices"
	"strings"

	"csi-registrar/internal/node/config"
)

// The scripts call `csi-registrar __complete`.
var (
	//go:embed completion/csi-registrar.bash
	bashScript string
	//go:embed completion/csi-registrar.zsh
	zshScript string
	//go:embed completion/csi-registrar.fish
	fishScript string
)

func runCompletion(_ context.Context, e *env, args []string) error {
	if len(args) != 1 {
		return usagef("name one shell: bash, zsh or fish")
	}
	scripts := map[string]string{"bash": bashScript, "zsh": zshScript, "fish": fishScript}
	script, ok := scripts[args[0]]
	if !ok {
		return usagef("there is no completion for %q, only for bash, zsh and fish", args[0])
	}
	_, err := io.WriteString(e.stdout, script)
	return err
}

// runComplete prints the completions of the last word, each with a tab and a description in its
// line. Where there are none, the scripts complete the names of files.
func runComplete(ctx context.Context, e *env, words []string) error {
	_, err := io.WriteString(e.stdout, strings.Join(complete(ctx, words), ""))
	return err
}

// complete returns the completions of the last word. The words are the command line without the
// program's name.
func complete(ctx context.Context, words []string) (list []string) {
	// Bash splits --flag=value.
	words = slices.DeleteFunc(slices.Clone(words), func(w string) bool { return w == "=" })
	if len(words) == 0 {
		words = []string{""}
	}
	before, last := words[:len(words)-1], words[len(words)-1]
	offer := func(word, about string) {
		if strings.HasPrefix(word, last) {
			list = append(list, word+"\t"+about+"\n")
		}
	}
	var c command
	for all := commands(); c.setup == nil; {
		if len(before) == 0 {
			for _, c := range all {
				if !c.hidden {
					offer(c.name, c.summary)
				}
			}
			return list
		}
		i := slices.IndexFunc(all, func(c command) bool { return c.name == before[0] })
		if i < 0 {
			return nil
		}
		c, all, before = all[i], all[i].sub, before[1:]
	}

	fs := newFlagSet()
	c.setup(fs)
	given, err := parse(fs, before)
	if err != nil {
		return nil // usually the value of the last flag is missing
	}
	root := "/"
	if f := fs.Lookup("config-root"); f != nil {
		root = f.Value.String()
	}
	switch {
	case strings.HasPrefix(last, "-"):
		for _, f := range shownFlags(c) {
			_, usage := flag.UnquoteUsage(f)
			offer("--"+f.Name, usage)
		}
		offer("--help", "explain the command")
	case c.name == "help":
		return complete(ctx, append(given, last))
	case strings.Contains(c.args, "DRIVER"):
		// Those in the configuration files, because only root may ask the daemon.
		res, err := loadConfig(ctx, config.Source{Root: root})
		if err != nil {
			return nil
		}
		for _, d := range res.Config.Drivers {
			if !slices.Contains(given, d.Name) && (len(given) == 0 || strings.Contains(c.args, "...")) {
				offer(d.Name, "driver")
			}
		}
	case strings.Contains(c.args, "|") && len(given) == 0:
		for word := range strings.SplitSeq(c.args, "|") {
			offer(word, "")
		}
	}
	return list
}
