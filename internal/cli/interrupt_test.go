package cli

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"csi-registrar/internal/test/fake"
)

// Every command ends soon after a signal, also one that reads what does not come.
func TestCommandsEndAfterASignal(t *testing.T) {
	root := fake.ShortDir(t)
	pipe := filepath.Join(root, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	// With both ends open, opening it succeeds, and reading waits.
	f, err := os.OpenFile(pipe, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	interrupted, cancel := context.WithCancel(t.Context())
	cancel()
	arguments := map[string][][]string{
		"import":    {{"-"}, {pipe}},
		"config":    {{"check", "--config", pipe}, {"show", "--config", pipe}},
		"wait":      {{"--config-root", root}, {"a.example", "--config-root", root}},
		"doctor":    {{"--config", pipe}},
		"supervise": {{"--socket", filepath.Join(root, "s")}},
		"trace":     {{"--listen", filepath.Join(root, "l"), "--connect", filepath.Join(root, "s")}},
		"bugreport": {{"--output", filepath.Join(root, "archive"), "--config-root", root}},
		"cleanup":   {{"--if-stopped", "--config-root", root}},
		"reload":    {{"--config-root", root}},
		// It ends in its own time; so does trace, which waits for pending calls.
		"run": nil,
		// These only write a text, or what the daemon answers at once.
		"status": nil, "version": nil, "help": nil,
		"reregister": {{"a.example", "--config-root", root}},
	}
	for _, c := range commands() {
		list, known := arguments[c.name]
		if !known {
			t.Errorf("%s is not tested", c.name)
		}
		for _, args := range list {
			s := newSession()
			s.env.stdin = f
			began := time.Now()
			done := make(chan int, 1)
			go func() { done <- s.run(interrupted, slices.Insert(args, 0, c.name)...) }()
			select {
			case <-done:
				t.Logf("%s %s: %s", c.name, strings.Join(args, " "), time.Since(began))
			case <-time.After(10 * time.Second):
				t.Errorf("%s %s does not end", c.name, strings.Join(args, " "))
			}
		}
	}
}
