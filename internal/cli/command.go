// Package cli is the command line: commands and flags, tables, hints and exit codes.
package cli

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"csi-registrar/internal/node/csiname"
	"csi-registrar/internal/sys/safetext"
)

// runner runs a command after its flags were parsed; args are the remaining arguments.
type runner func(ctx context.Context, e *env, args []string) error

// command is one entry of the command table, which dispatch and help read.
type command struct {
	name    string // one word
	args    string // what follows it, as in "[DRIVER...]" for names of drivers; flags are not named
	summary string // one line, no full stop
	about   string // more text for help; may be empty
	anyArgs bool   // the command takes more arguments than args has
	ownEnd  bool   // after a signal it takes as long as it needs to end

	sub []command // subcommands; a command that has them has no setup

	// setup declares the flags and returns the function that uses their values. It has no other
	// effect, because help needs the flags too. A flag with an empty usage is accepted
	// but hidden. A name in backquotes in the usage is the placeholder for the value.
	setup func(fs *flag.FlagSet) runner
}

// env is the part of the process's environment that commands use.
type env struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	getenv         func(string) string
	now            func() time.Time // in the time zone of the output
	terminal       func(io.Writer) (columns int, ok bool)
}

// Main runs the command line and returns the exit code. SIGINT, SIGTERM and SIGQUIT end it cleanly;
// the run command handles SIGHUP.
func Main(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	defer stop()
	e := &env{stdin: stdin, stdout: stdout, stderr: stderr, getenv: os.Getenv, now: time.Now, terminal: terminalWidth}
	return e.report(dispatch(ctx, e, commands(), args))
}

// dispatch runs the command that the arguments name.
func dispatch(ctx context.Context, e *env, all []command, args []string) (err error) {
	path, about := []string{"csi-registrar"}, "csi-registrar keeps every CSI driver of this node registered with its kubelet"
	defer func() {
		if x, ok := errors.AsType[*exitError](err); ok && x.code == exitUsage && x.hint == "" {
			x.hint = "see " + strings.Join(slices.Insert(path, 1, "help"), " ")
		}
	}()
	for {
		if len(args) == 0 {
			return usagef("a command is missing")
		}
		name := args[0]
		switch {
		case name == "-h" || name == "-help" || name == "--help":
			_, err := io.WriteString(e.stdout, groupHelp(path, about, all))
			return err
		case len(path) == 1 && (name == "-version" || name == "--version"):
			name = "version"
		}
		i := slices.IndexFunc(all, func(c command) bool { return c.name == name })
		if i < 0 {
			return usagef("there is no command %q", name)
		}
		c := all[i]
		path, args = append(path, c.name), args[1:]
		if c.sub != nil {
			all, about = c.sub, sentence(c.summary)
			continue
		}
		return c.exec(ctx, e, path, args)
	}
}

// exec parses the flags, which may be before, between and after the other arguments, and runs the
// command.
func (c command) exec(ctx context.Context, e *env, path, args []string) error {
	fs := newFlagSet()
	run := c.setup(fs)
	rest, err := parse(fs, args)
	if errors.Is(err, flag.ErrHelp) {
		_, err := io.WriteString(e.stdout, commandHelp(path, c, fs))
		return err
	}
	if err != nil {
		return usagef("%s", flagProblem(fs, err))
	}
	if most := len(strings.Fields(c.args)); len(rest) > most && !c.anyArgs && !strings.Contains(c.args, "...") {
		return usagef("unexpected argument %q", rest[most])
	}
	for _, name := range rest {
		if err := csiname.CheckName(name); err != nil && strings.Contains(c.args, "DRIVER") {
			return usagef("%q: %w", name, err)
		}
	}
	if c.ownEnd {
		return run(ctx, e, rest)
	}
	done := make(chan error, 1)
	go func() { done <- run(ctx, e, rest) }() // when it is abandoned, the process ends
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return err
	case <-time.After(endLimit):
		return fmt.Errorf("cannot finish: %w", interruption(ctx))
	}
}

// endLimit is how long a command may take to end after a signal: it may be computing, or reading
// what does not come.
const endLimit = 500 * time.Millisecond

// flagProblem rewords an error of package flag: help writes flags with two dashes.
func flagProblem(fs *flag.FlagSet, err error) string {
	text := err.Error()
	for _, before := range []string{"not defined: ", "an argument: ", " for flag ", " for "} {
		text = strings.Replace(text, before+"-", before+"--", 1)
	}
	_, name, _ := strings.Cut(text, " for flag --")
	name, _, _ = strings.Cut(name, ":")
	if f := fs.Lookup(name); f != nil {
		if getter, ok := f.Value.(flag.Getter); ok {
			if _, isDuration := getter.Get().(time.Duration); isDuration {
				text = strings.Replace(text, ": parse error", ": it must be a number with a unit, such as 30s or 2m", 1)
			}
		}
	}
	return text
}

func newFlagSet() *flag.FlagSet {
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	fs.SetOutput(io.Discard) // errors and help are printed by report and exec
	return fs
}

// parse calls fs.Parse repeatedly, so that flags may follow other arguments.
func parse(fs *flag.FlagSet, args []string) (rest []string, err error) {
	for {
		if err := fs.Parse(args); err != nil {
			return nil, err
		}
		left := fs.Args()
		if len(left) == 0 {
			return rest, nil
		}
		if n := len(args) - len(left); n > 0 && args[n-1] == "--" {
			return append(rest, left...), nil
		}
		rest, args = append(rest, left[0]), left[1:]
	}
}

// Exit codes other than 0.
const (
	exitFailed     = 1
	exitUsage      = 2
	exitNotRunning = 3  // the daemon
	exitSandbox    = 75 // EX_TEMPFAIL: the service manager starts the daemon in a new sandbox
	exitConfig     = 78 // EX_CONFIG of sysexits.h, which systemd knows by name
)

// exitError is an error with an exit code and a hint. If err is nil, the command has already
// printed everything.
type exitError struct {
	code int
	err  error
	hint string // may be empty
}

func (x *exitError) Error() string {
	if x.err == nil {
		return fmt.Sprintf("exit code %d", x.code)
	}
	return x.err.Error()
}
func (x *exitError) Unwrap() error { return x.err }

// usagef returns an error in the command line. dispatch adds the hint.
func usagef(format string, args ...any) error {
	return &exitError{code: exitUsage, err: fmt.Errorf("invalid command line: "+format, args...)}
}

// hinted adds a hint to an error.
func hinted(err error, hint string) error { return &exitError{exitFailed, err, hint} }

// report prints the error and its hint on standard error and returns the exit code.
func (e *env) report(err error) int {
	if err == nil {
		return 0
	}
	code, hint := exitFailed, ""
	if x, ok := errors.AsType[*exitError](err); ok {
		code, hint = x.code, x.hint
		if x.err == nil {
			return code
		}
	}
	fmt.Fprintf(e.stderr, "error: %s\n", cleanLines(err.Error()))
	if hint != "" {
		fmt.Fprintf(e.stderr, "hint: %s\n", cleanLines(hint))
	}
	return code
}

// maxLine limits a line of untrusted text where the whole text is shown.
const maxLine = 16 << 10

// cleanLines makes a multi-line text safe for a terminal. All lines but the first are indented, so
// that none of them looks like a hint.
func cleanLines(s string) string {
	lines := strings.Split(s, "\n")
	for i, line := range lines {
		lines[i] = safetext.Clean(line, maxLine)
		if i > 0 && !strings.HasPrefix(line, "  ") {
			lines[i] = "  " + lines[i]
		}
	}
	return strings.Join(lines, "\n")
}
