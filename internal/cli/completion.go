package cli

import (
	"bufio"
	"context"
	_ "embed" // the scripts
	"flag"
	"fmt"
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

// runComplete prints the completions of the last word: the first line is their kind (:words, :files
// or :dirs); for :words each of the following lines has a word, a tab and a description.
func runComplete(_ context.Context, e *env, words []string) error {
	kind, list := complete(words)
	w := bufio.NewWriter(e.stdout)
	fmt.Fprintln(w, kind)
	for _, c := range list {
		fmt.Fprintln(w, c)
	}
	return w.Flush()
}

const (
	kindWords = ":words"
	kindFiles = ":files"
	kindDirs  = ":dirs"
)

// complete returns the completions of the last word. The words are the command line without the
// program's name.
func complete(words []string) (kind string, list []string) {
	// Bash splits --flag=value.
	words = slices.DeleteFunc(slices.Clone(words), func(w string) bool { return w == "=" })
	if len(words) == 0 {
		words = []string{""}
	}
	before, last := words[:len(words)-1], words[len(words)-1]
	kind = kindWords
	offer := func(word, about string) {
		if strings.HasPrefix(word, last) {
			list = append(list, word+"\t"+about)
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
			return kind, list
		}
		i := slices.IndexFunc(all, func(c command) bool { return c.name == before[0] })
		if i < 0 {
			return kind, nil
		}
		c, all, before = all[i], all[i].sub, before[1:]
	}

	fs := newFlagSet()
	c.setup(fs)
	// An error usually means that the value of the last flag is missing.
	given, err := parse(fs, before)
	root := "/"
	if f := fs.Lookup("config-root"); f != nil {
		root = f.Value.String()
	}
	var open *flag.Flag
	if err != nil {
		open = fs.Lookup(strings.TrimLeft(before[len(before)-1], "-"))
	}
	switch {
	case open != nil:
		value, _ := flag.UnquoteUsage(open)
		return valueKind(value), nil
	case strings.HasPrefix(last, "-"):
		for _, f := range shownFlags(c) {
			_, usage := flag.UnquoteUsage(f)
			offer("--"+f.Name, usage)
		}
		offer("--help", "explain the command")
	case c.name == "help":
		return complete(append(given, last))
	case strings.Contains(c.args, "DRIVER"):
		// Those in the configuration files, because only root may ask the daemon.
		for _, d := range config.Load(config.Source{Root: root}).Config.Drivers {
			if !slices.Contains(given, d.Name) && (len(given) == 0 || strings.Contains(c.args, "...")) {
				offer(d.Name, "driver")
			}
		}
	case strings.Contains(c.args, "|") && len(given) == 0:
		for word := range strings.SplitSeq(c.args, "|") {
			offer(word, "")
		}
	default:
		kind = valueKind(c.args)
	}
	return kind, list
}

// valueKind derives the kind of a value from its name in the usage.
func valueKind(word string) string {
	switch {
	case strings.Contains(word, "FILE"), strings.Contains(word, "MANIFEST"), strings.Contains(word, "PATH"):
		return kindFiles
	case strings.Contains(word, "DIR"):
		return kindDirs
	}
	return kindWords
}
