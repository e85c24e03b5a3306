package cli

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// transcript is a program that runs the commands in a file and prints them with their output.
func transcript() {
	if err := transcribe(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "transcript:", err)
		os.Exit(1)
	}
}

func transcribe(args []string) error {
	if len(args) != 1 {
		return errors.New("usage: transcript FILE")
	}
	file, err := os.ReadFile(args[0])
	if err != nil {
		return err
	}
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	commands := 0
	for line := range strings.Lines(string(file)) {
		command, ok := strings.CutPrefix(line, "$ ")
		if !ok {
			continue
		}
		commands++
		var stdout, stderr bytes.Buffer
		cmd := exec.Command("sh", "-c", command)
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		err := cmd.Run()
		if _, exited := errors.AsType[*exec.ExitError](err); err != nil && !exited {
			return err
		}
		fmt.Print(line, replace(stdout.String(), dir))
		for line := range strings.Lines(replace(stderr.String(), dir)) {
			fmt.Print("2> ", line)
		}
		if code := cmd.ProcessState.ExitCode(); code != 0 {
			fmt.Printf("[%d]\n", code)
		}
	}
	if commands == 0 {
		return fmt.Errorf("%s has no line that begins with \"$ \"", args[0])
	}
	return nil
}

// replacements are the texts that differ from run to run, and their placeholders.
var replacements = []struct {
	pattern *regexp.Regexp
	text    string
}{
	{regexp.MustCompile(`\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?( UTC|Z|[+-]\d\d:\d\d)?`), "TIME"},
	{regexp.MustCompile(`\b\d\d:\d\d:\d\d\b`), "CLOCK"},
	{regexp.MustCompile(`[0-9][0-9a-z.]* ago`), "AGE ago"},
	// A row of the status table, which has a column for the age.
	{regexp.MustCompile(`(?m)^(\S.* (?:absent|starting|ready|mismatch|published|registered|refused|conflict) +)\d+[smhd]\w* +`), "${1}AGE    "},
	{regexp.MustCompile(`[0-9][0-9.e+]* ms\b`), "N ms"},
	{regexp.MustCompile(`("pid":|\b(?:pid|process)) \d+`), "$1 PID"},
	{regexp.MustCompile(`\buid \d+`), "uid UID"},
	// The unit of the daemon depends on how the test is run.
	{regexp.MustCompile(`(?s)"server": \{.*?\}`), `"server": {}`},
	{regexp.MustCompile(`"version": "[^"]*"`), `"version": "VERSION"`},
	{regexp.MustCompile(`"took_ms": [0-9.]+`), `"took_ms": N`},
}

func replace(text, dir string) string {
	text = strings.ReplaceAll(text, dir, "$WORK")
	for _, r := range replacements {
		text = r.pattern.ReplaceAllString(text, r.text)
	}
	if text != "" && !strings.HasSuffix(text, "\n") {
		text += "\n[no newline]\n"
	}
	return text
}

func TestReplace(t *testing.T) {
	for text, want := range map[string]string{
		"":                                    "",
		"at 2026-11-23 09:12:12 UTC (3s ago)": "at TIME (AGE ago)\n[no newline]\n",
		"\"at\": \"2026-11-23T09:12:12.123+01:00\"\n":               "\"at\": \"TIME\"\n",
		"a.example  registered  3s     yes 2m10s ago\n":             "a.example  registered  AGE    yes AGE ago\n",
		"a.example  absent      59m1s  -\n":                         "a.example  absent      AGE    -\n",
		"served by x (pid 12), uid 0, after 0.42 ms, within 2m0s\n": "served by x (pid PID), uid UID, after N ms, within 2m0s\n",
		"/tmp/c1/script-x/k\n":                                      "$WORK/k\n",
	} {
		if got := replace(text, "/tmp/c1/script-x"); got != want {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
}
