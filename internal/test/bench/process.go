package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// pss is the memory of all the processes in MiB, what they share with others divided.
func pss(all []*exec.Cmd) (sum float64, err error) {
	for _, cmd := range all {
		kib, err := field(fmt.Sprintf("/proc/%d/smaps_rollup", cmd.Process.Pid), "Pss:")
		if err != nil {
			return 0, err
		}
		sum += kib / 1024
	}
	return sum, nil
}

// switches counts how often the threads of all the processes waited for something so far.
func switches(all []*exec.Cmd) (sum float64, err error) {
	for _, cmd := range all {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", cmd.Process.Pid))
		if err != nil {
			return 0, err
		}
		for _, thread := range threads {
			n, err := field(thread, "voluntary_ctxt_switches:")
			if err != nil {
				return 0, err
			}
			sum += n
		}
	}
	return sum, nil
}

// field is the number behind a name in a file of /proc.
func field(file, name string) (float64, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if words := strings.Fields(line); len(words) > 1 && words[0] == name {
			return strconv.ParseFloat(words[1], 64)
		}
	}
	return 0, fmt.Errorf("%s has no %s", file, name)
}
