package main

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"csi-registrar/internal/test/hostile"
)

const archive = "/root/bugreport.tar.gz"

// quick are the commands of root that talk with the daemon, and those that might. The others take
// longer.
var quick = [][]string{
	{"status"}, {"status", hostile.Driver}, {"status", "--json"}, {"reload"}, {"reregister", hostile.Driver}, {"reregister", "--force", hostile.Driver},
	{"wait", "--timeout", "10ms"}, {"wait", "--timeout", "10ms", hostile.Driver},
}

var slow = [][]string{
	{"doctor"}, {"doctor", "--json"}, {"bugreport", "--output", archive},
	{"config", "check"}, {"config", "show"}, {"cleanup", "--if-stopped"}, {"cleanup", "--ask"}, {"version"}, {"__complete", "status", ""},
}

// programs are all that the commands start.
var programs = []string{"csi-registrar", "systemctl", "journalctl", "ls", "uname", "cat", "df"}

// ask runs the commands of root beside the program that answers, and writes a line for each harm
// that was done, and one with the number of commands at the end. Without all, it leaves out the
// answers with one hostile field, and the slow commands get some of the others.
func ask(dir string, all bool) error {
	answers, err := hostile.Answers(dir, 1)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	bait, err := hostile.NewBait(dir)
	if err != nil {
		return err
	}
	defer bait.Close()
	asked, started := 0, map[string]int{}
	names := slices.Sorted(maps.Keys(answers))
	everything := func(name string) bool { return strings.HasPrefix(name, "everything: ") }
	if !all {
		names = slices.DeleteFunc(names, func(name string) bool { return strings.Contains(name, ": ") && !everything(name) })
	}
	for _, name := range names {
		if err := choose(name); err != nil {
			return err
		}
		before, err := files(dir)
		if err != nil {
			return err
		}
		commands := quick
		if all || everything(name) || name == "endless text" || name == "failure 500" || name == "no HTTP" {
			commands = slices.Concat(quick, slow)
		}
		for _, args := range commands {
			p, err := run(time.Minute, append([]string{"/usr/bin/csi-registrar"}, args...)...)
			note := func(format string, values ...any) {
				fmt.Printf("%s: %s: %s\n", name, strings.Join(args, " "), fmt.Sprintf(format, values...))
			}
			if err != nil {
				note("%v", err)
			}
			asked++
			for _, line := range p.started {
				program, _, _ := strings.Cut(line, " ")
				started[filepath.Base(program)]++
				if found := hostile.Names(line, dir); found != "" || !slices.Contains(programs, filepath.Base(program)) {
					note("it starts %q", line)
				}
			}
			if err := bait.Touched(); err != nil {
				note("%v", err)
			}
			check := func(what, text string) {
				if r, found := hostile.Control(text); found {
					note("%s has %U", what, r)
				}
				if strings.Contains(text, hostile.Secret) {
					note("%s has a secret", what)
				}
			}
			switch args[0] {
			case "doctor":
				if slices.Contains(args, "--json") {
					checkFixes(p.output, dir, note)
				}
			case "bugreport":
				if err := eachFile(archive, func(what, text string) { check(what, strings.ReplaceAll(text, "\t", " ")) }); err != nil {
					note("%v: %q", err, p.output)
				}
			case "__complete":
				p.output = strings.ReplaceAll(p.output, "\t", " ")
			}
			if found := hostile.Forged.FindString(p.output); found != "" {
				note("the terminal has the line %q", found)
			}
			check("the terminal", withoutOurs(p.output))
		}
		after, err := files(dir)
		if err != nil {
			return err
		}
		for _, path := range changed(before, after) {
			fmt.Printf("%s: %s was changed\n", name, path)
		}
	}
	fmt.Println(asked, "commands beside", len(names), "answers started", started)
	return nil
}

// choose makes the program at the control socket give an answer.
func choose(name string) error {
	err := os.WriteFile(chosen+".new", []byte(name), 0o600)
	if err == nil {
		err = os.Rename(chosen+".new", chosen)
	}
	return err
}

// withoutOurs returns a text without what the program itself writes to a terminal: colours.
func withoutOurs(text string) string {
	for _, code := range []string{"[0m", "[01m", "[02m", "[31m", "[32m", "[33m"} {
		text = strings.ReplaceAll(text, "\x1b"+code, "")
	}
	return text
}

// checkFixes checks the commands that doctor prints for root.
func checkFixes(output, dir string, note func(string, ...any)) {
	var report struct {
		Findings []struct{ Fix []string }
	}
	if err := json.Unmarshal([]byte(output), &report); err != nil {
		note("%v: %q", err, output)
	}
	for _, f := range report.Findings {
		for _, line := range f.Fix {
			if hostile.Names(line, dir) != "" {
				note("it prints the fix %q", line)
			}
		}
	}
}

// eachFile reads and removes an archive.
func eachFile(path string, do func(name, text string)) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			return os.Remove(path)
		}
		if err != nil {
			return err
		}
		text, err := io.ReadAll(r)
		if err != nil {
			return err
		}
		do(h.Name, string(text))
	}
}

// files returns what changes when a file is written, created or removed, for each of the machine
// outside of a directory.
func files(except string) (map[string]string, error) {
	all := map[string]string{}
	err := filepath.WalkDir("/", func(path string, d fs.DirEntry, err error) error {
		switch path {
		case except, "/proc", "/sys", "/dev", "/run/log", "/var/log", "/run/systemd/journal":
			return filepath.SkipDir
		case "/root", "/run/csi-registrar/state": // of this program, and of cleanup
			return filepath.SkipDir
		}
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		all[path] = fmt.Sprint(st.Ino, st.Mode, st.Size, st.Mtim, st.Ctim)
		return err
	})
	return all, err
}

func changed(before, after map[string]string) (paths []string) {
	for path, state := range after {
		if before[path] != state {
			paths = append(paths, path)
		}
	}
	for path := range before {
		if _, ok := after[path]; !ok {
			paths = append(paths, path)
		}
	}
	slices.Sort(paths)
	return paths
}
