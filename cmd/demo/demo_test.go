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

	"csi-registrar/internal/fake"
)

// TestMain looks for what a story may leave behind: goroutines, and its directory.
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
		println("a story left its directory behind:", left[0])
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

// programs builds what is shipped, once, and returns the directory.
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

// story is the demo of the programs as they are shipped.
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
	for _, want := range []string{"plugins_registry:", "asked it again", "not refused", "the same socket", "deregistered", "keeps what it has", "All 7 steps"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the story does not tell %q", want)
		}
	}
}

// A story is cut short at any of its steps, as by Ctrl-C: all children end.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"\n1. ", "\n2. ", "\n4. "} {
		t.Run(strings.TrimSpace(at), func(t *testing.T) {
			t.Parallel()
			why := errors.New("interrupt")
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			out := &trip{at: at, wire: func() { cancel(why) }}
			if err := newDemo(t, out).Run(ctx); !errors.Is(err, why) {
				t.Errorf("Run = %v, want %v\n%s", err, why, out.text.String())
			}
			nothingLeft(t, out.text.String())
		})
	}
}

// Nobody reads any more, as after `| head -1`: the story ends, and leaves nothing.
func TestOutputClosed(t *testing.T) {
	t.Parallel()
	out := &trip{at: "\n1. "}
	out.wire = func() { out.broken = syscall.EPIPE }
	if err := newDemo(t, out).Run(t.Context()); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("Run = %v, want %v\n%s", err, syscall.EPIPE, out.text.String())
	}
	nothingLeft(t, out.text.String())
}

// trip calls wire when the text at was written.
type trip struct {
	at   string
	wire func()
	text bytes.Buffer

	broken error // of every write from now on
}

func (w *trip) Write(p []byte) (int, error) {
	if w.broken != nil {
		return 0, w.broken
	}
	defer func() {
		if strings.Contains(w.text.String(), w.at) {
			w.wire()
		}
	}()
	return w.text.Write(p)
}

// nothingLeft looks for the story's directory, and for processes that have it in their command
// line.
func nothingLeft(t *testing.T, out string) {
	t.Helper()
	dir := regexp.MustCompile(`\S*/csi-demo-\d+`).FindString(out)
	if dir == "" {
		t.Fatalf("the story does not name its directory:\n%s", out)
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

// A daemon that does not do its work makes the story fail, and quickly.
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
			t.Errorf("unchanged = %v, though the socket removed", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := n.unchanged(ctx, n.events.position()); err == nil {
			t.Error("unchanged = nil, though the kubelet looks no more")
		}
	})
}

func TestWrap(t *testing.T) {
	got := wrap("aa bb  cc dddddddd e", 5)
	if want := "aa bb|cc|dddddddd|e"; strings.Join(got, "|") != want {
		t.Errorf("wrap = %q, want %q", got, want)
	}
}
