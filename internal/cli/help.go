package cli

import (
	"context"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
)

func runHelp(_ context.Context, e *env, args []string) error {
	return printHelp(e, args)
}

// printHelp explains the command that the words name, or all of them.
func printHelp(e *env, words []string) error {
	var text strings.Builder
	if err := explain(&text, words); err != nil {
		return err
	}
	_, err := io.WriteString(e.stdout, text.String())
	return err
}

func explain(w *strings.Builder, words []string) error {
	if len(words) == 0 {
		fmt.Fprint(w, "csi-registrar keeps every CSI driver of this node registered with its kubelet.\n\n")
		helpGroup(w, []string{"csi-registrar"}, commands())
		return nil
	}
	path, all := []string{"csi-registrar"}, commands()
	for {
		i := slices.IndexFunc(all, func(c command) bool { return c.name == words[0] })
		if i < 0 {
			return usagef(path, "there is no command %q", words[0])
		}
		c := all[i]
		path, words = append(path, c.name), words[1:]
		switch {
		case len(words) == 0:
			helpCommand(w, path, c)
			return nil
		case c.sub == nil:
			return usagef(path, "%s has no subcommands", c.name)
		}
		all = c.sub
	}
}

func helpGroup(w *strings.Builder, path []string, all []command) {
	fmt.Fprintf(w, "usage: %s COMMAND [ARGUMENT...]\n\n", strings.Join(path, " "))
	width := 0
	for _, c := range all {
		if !c.hidden {
			width = max(width, len(c.name))
		}
	}
	for _, c := range all {
		if !c.hidden {
			fmt.Fprintf(w, "  %-*s  %s\n", width, c.name, c.summary)
		}
	}
	fmt.Fprintf(w, "\nSee %s COMMAND --help.\n", strings.Join(path, " "))
}

func helpCommand(w *strings.Builder, path []string, c command) {
	if c.sub != nil {
		fmt.Fprintf(w, "%s.\n\n", sentence(c.summary))
		helpGroup(w, path, c.sub)
		return
	}
	flags := shownFlags(path, c)
	words := slices.Clone(path)
	if c.args != "" {
		words = append(words, c.args)
	}
	if len(flags) > 0 {
		words = append(words, "[FLAG...]")
	}
	fmt.Fprintf(w, "usage: %s\n\n%s.\n", strings.Join(words, " "), sentence(c.summary))
	if c.about != "" {
		fmt.Fprintf(w, "\n%s\n", strings.TrimSpace(c.about))
	}
	if len(flags) == 0 {
		return
	}
	fmt.Fprint(w, "\nFlags:\n")
	for _, f := range flags {
		value, usage := flag.UnquoteUsage(f)
		name := "--" + f.Name
		if value != "" {
			name += " " + value
		}
		if f.DefValue != "" && f.DefValue != "false" && f.DefValue != "0s" && f.DefValue != "0" {
			usage += fmt.Sprintf(" (default %s)", f.DefValue)
		}
		fmt.Fprintf(w, "  %s\n        %s\n", name, strings.Join(wrap(usage, 72), "\n        "))
	}
}

func sentence(s string) string { return strings.ToUpper(s[:1]) + s[1:] }

// shownFlags lists the documented flags of a command, by name.
func shownFlags(path []string, c command) []*flag.Flag {
	if c.setup == nil {
		return nil
	}
	fs := newFlagSet(path)
	c.setup(fs)
	var out []*flag.Flag
	fs.VisitAll(func(f *flag.Flag) {
		if f.Usage != "" {
			out = append(out, f)
		}
	})
	return out
}
