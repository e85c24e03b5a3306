package nspawn

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// cgroup is the control group of a machine: in the unified hierarchy, and in systemd's own
// hierarchy where those of version 1 are mounted as well.
type cgroup struct{ dirs []string }

func newCgroup(name string) (cgroup, error) {
	parents := []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"}
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		parents = []string{"/sys/fs/cgroup"}
	}
	var c cgroup
	for _, parent := range parents {
		dir := filepath.Join(parent, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return c, fmt.Errorf("cannot make a control group: %w", err)
		}
		c.dirs = append(c.dirs, dir)
	}
	return c, nil
}

// enter returns shell code that moves the shell into the group.
func (c cgroup) enter() string {
	var code strings.Builder
	for _, dir := range c.dirs {
		fmt.Fprintf(&code, "echo $$ > %s/cgroup.procs && ", dir)
	}
	return code.String()
}

// kill ends all processes at once. It freezes them first, so that none notices the end of another.
func (c cgroup) kill() error {
	for _, dir := range c.dirs {
		set := func(name, to string) error {
			f, err := os.OpenFile(filepath.Join(dir, name), os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteString(to)
			return errors.Join(err, f.Close())
		}
		err := set("cgroup.freeze", "1")
		if os.IsNotExist(err) {
			continue // a hierarchy of version 1
		}
		for range 100 { // a process that waits for a disk cannot be frozen
			if err != nil || c.hasEvent("frozen 1") {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		if err = errors.Join(err, set("cgroup.kill", "1"), set("cgroup.freeze", "0")); err != nil {
			return fmt.Errorf("cannot end all processes of a control group: %w", err)
		}
	}
	return nil
}

// empty reports whether the group and its child groups have no more processes.
func (c cgroup) empty() bool { return c.hasEvent("populated 0") }

// hasEvent reports whether cgroup.events has the value, in each hierarchy that has this file.
func (c cgroup) hasEvent(event string) bool {
	for _, dir := range c.dirs {
		b, err := os.ReadFile(filepath.Join(dir, "cgroup.events"))
		if err == nil && !strings.Contains(string(b), event) {
			return false
		}
	}
	return true
}

// remove removes the groups and their child groups.
func (c cgroup) remove() error { return c.prune("") }

// clear removes the child groups.
func (c cgroup) clear() error { return c.prune("*/") }

// prune removes what matches the pattern in each group, with all child groups. Their processes take
// a moment to end.
func (c cgroup) prune(pattern string) error {
	var err error
	for range 100 {
		if err = c.tryPrune(pattern); err == nil {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return err
}

func (c cgroup) tryPrune(pattern string) error {
	for _, group := range c.dirs {
		tops, err := filepath.Glob(filepath.Join(group, pattern))
		if err != nil {
			return err
		}
		for _, top := range tops {
			if err := removeGroups(top); err != nil {
				return err
			}
		}
	}
	return nil
}

func removeGroups(top string) error {
	var dirs []string
	if err := filepath.WalkDir(top, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return nil // removed meanwhile, or a file of the group
	}); err != nil {
		return err
	}
	slices.Reverse(dirs)
	for _, dir := range dirs {
		if err := os.Remove(dir); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	return nil
}
