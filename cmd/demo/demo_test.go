package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"csi-registrar/internal/test/fake"
)

// TestMain checks that the demos left no goroutines and no directories.
func TestMain(m *testing.M) {
	os.Exit(tests(m))
}

func tests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "d")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Setenv("TMPDIR", dir); err != nil {
		panic(err)
	}
	code := m.Run()
	if left, _ := filepath.Glob(filepath.Join(dir, "csi-demo-*")); len(left) > 0 {
		println("a demo left its directory:", left[0])
		return 1
	}
	for deadline := time.Now().Add(5 * time.Second); runtime.NumGoroutine() > 2; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			println("goroutines are left:\n" + string(stacks[:runtime.Stack(stacks, true)]))
			return 1
		}
	}
	return code
}

// programs builds the packaged programs once and returns their directory.
var programs = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "demo-bin") // removed by TestMain, with its TMPDIR
	if err != nil {
		return "", err
	}
	if out, err := exec.Command("../../scripts/build", "", dir).CombinedOutput(); err != nil {
		return "", fmt.Errorf("scripts/build: %w\n%s", err, out)
	}
	return dir, nil
})

// newDemo returns a demo of the packaged programs.
func newDemo(t *testing.T, out io.Writer) Demo {
	t.Helper()
	dir, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	return Demo{Daemon: filepath.Join(dir, "csi-registrar"), Driver: filepath.Join(dir, "csi-sample-driver"), Out: out}
}

func TestDemo(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := newDemo(t, &out).Run(t.Context()); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	t.Logf("\n%s", out.String())
	for line := range strings.SplitSeq(out.String(), "\n") {
		if len(line) > width {
			t.Errorf("%d columns: %s", len(line), line)
		}
	}
	for _, want := range []string{"plugins_registry, ", "queried it again", "not refused", "the same socket", "deregistered", "keeps the configuration", "All 7 steps"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the output lacks %q", want)
		}
	}
}

// An interrupt in any step ends all children.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"\n1. ", "\n2. ", "\n4. "} {
		t.Run(strings.TrimSpace(at), func(t *testing.T) {
			t.Parallel()
			why := errors.New("interrupt")
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			out := &trigger{at: at, run: func() { cancel(why) }}
			if err := newDemo(t, out).Run(ctx); !errors.Is(err, why) {
				t.Errorf("Run = %v, want %v\n%s", err, why, out.text.String())
			}
			nothingLeft(t, out.text.String())
		})
	}
}

// A failed write, as after `| head -1`, ends the demo and all children.
func TestOutputClosed(t *testing.T) {
	t.Parallel()
	out := &trigger{at: "\n1. "}
	out.run = func() { out.broken = syscall.EPIPE }
	if err := newDemo(t, out).Run(t.Context()); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("Run = %v, want %v\n%s", err, syscall.EPIPE, out.text.String())
	}
	nothingLeft(t, out.text.String())
}

// trigger calls run when the text at was written.
type trigger struct {
	at   string
	run  func()
	text bytes.Buffer

	broken error // of every later write
}

func (w *trigger) Write(p []byte) (int, error) {
	if w.broken != nil {
		return 0, w.broken
	}
	defer func() {
		if strings.Contains(w.text.String(), w.at) {
			w.run()
		}
	}()
	return w.text.Write(p)
}

// nothingLeft checks that the directory is removed, and that no process has it in its command line.
func nothingLeft(t *testing.T, out string) {
	t.Helper()
	dir := regexp.MustCompile(`\S*/csi-demo-\d+`).FindString(out)
	if dir == "" {
		t.Fatalf("the output lacks the directory:\n%s", out)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory was left: %v", err)
	}
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range lines {
		if text, err := os.ReadFile(line); err == nil && bytes.Contains(text, []byte(dir)) {
			t.Errorf("a process was left: %s: %q", line, text)
		}
	}
}

// A daemon that ends makes the demo fail at once.
func TestBrokenDaemon(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "broken")
	if err := os.WriteFile(path, []byte("#!/bin/sh\necho the reason; exit 7\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	err := Demo{Daemon: path, Out: &out}.Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "step 1") || !strings.Contains(err.Error(), "exit status 7") {
		t.Errorf("Run = %v", err)
	}
	if !strings.Contains(out.String(), "the reason") {
		t.Errorf("the log is not shown:\n%s", out.String())
	}
}

func TestMissingProgram(t *testing.T) {
	t.Parallel()
	err := Demo{Daemon: filepath.Join(t.TempDir(), "missing"), Out: io.Discard}.Run(t.Context())
	if err == nil {
		t.Error("Run = nil")
	}
}

func TestUnchanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{dir: "/d", events: newEventLog()}
		go func() {
			for range 5 {
				time.Sleep(time.Second)
				n.events.add(fake.Event{What: fake.Reconciled})
			}
		}()
		began := time.Now()
		if err := n.unchanged(t.Context(), 0); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took != 2*time.Second {
			t.Errorf("it took %v, want two rounds of the kubelet", took)
		}
		n.events.add(fake.Event{What: removed, Registration: fake.Registration{Socket: n.registration()}})
		if err := n.unchanged(t.Context(), 0); err == nil || !strings.Contains(err.Error(), "removed") {
			t.Errorf("unchanged = %v after the socket was removed", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := n.unchanged(ctx, n.events.position()); err == nil {
			t.Error("unchanged = nil without a round of the kubelet")
		}
	})
}

func TestWrap(t *testing.T) {
	got := wrap("aa bb  cc dddddddd e", 5)
	if want := "aa bb|cc|dddddddd|e"; strings.Join(got, "|") != want {
		t.Errorf("wrap = %q, want %q", got, want)
	}
}
