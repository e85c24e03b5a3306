// Package bugreport writes an archive with diagnostics for a support case, with known secrets
// removed. The size and the time of each part are limited. For a part that fails, the archive has
// an entry with the reason.
package bugreport

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"

	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/worker"
)

// Part is an entry of the archive.
type Part struct {
	Name  string
	Plain bool // it contains no text of other programs, and is not searched for secrets
	// Write writes the part. It may ignore errors of the writer.
	Write func(context.Context, io.Writer) error
}

const (
	maxPart   = 4 << 20         // bytes
	partLimit = 2 * time.Minute // doctor asks each driver
)

// Write runs the parts one after the other, and writes their output as a compressed tar file with
// one directory.
func Write(ctx context.Context, w io.Writer, dir string, now time.Time, parts []Part) error {
	pool := worker.NewPool()
	secrets := redactor{}
	type entry struct {
		name, text string
		plain      bool
	}
	now = now.Truncate(time.Second) // tar would round it up, and then warn of files from the future
	var entries []entry
	for _, p := range parts {
		text, err := p.make(ctx, pool)
		if ctx.Err() != nil {
			return fmt.Errorf("cannot finish: %w", context.Cause(ctx))
		}
		if !p.Plain {
			text = secrets.recognize(text)
		}
		entries = append(entries, entry{p.Name, text, p.Plain})
		if err != nil {
			entries = append(entries, entry{p.Name + ".error", secrets.recognize(err.Error()) + "\n", false})
		}
	}
	repeated := secrets.repeated()
	z := gzip.NewWriter(w)
	t := tar.NewWriter(z)
	for _, e := range entries {
		if !e.plain { // secrets that were recognized in other parts
			e.text = repeated(e.text)
		}
		err := t.WriteHeader(&tar.Header{Name: dir + "/" + e.name, Mode: 0o600, Size: int64(len(e.text)), ModTime: now})
		if err == nil {
			_, err = io.WriteString(t, e.text)
		}
		if err != nil {
			return err
		}
	}
	return errors.Join(t.Close(), z.Close())
}

// make runs a part and returns its output. The part may never return.
func (p Part) make(ctx context.Context, pool *worker.Pool) (string, error) {
	out := &output{}
	ctx, cancel := context.WithTimeoutCause(ctx, partLimit, fmt.Errorf("it took longer than %s", partLimit))
	defer cancel()
	err := worker.Run(ctx, pool.Slot(p.Name, nil), 2*partLimit, func() error { return p.Write(ctx, out) })
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	out.mu.Lock()
	defer out.mu.Unlock()
	// Use only whole lines: half a secret may not be recognized.
	if err != nil || out.full != nil {
		out.text = out.text[:bytes.LastIndexByte(out.text, '\n')+1]
	}
	return printable(string(out.text)), cmp.Or(out.full, err)
}

var field = safetext.Pattern(`[^\t\n]+`)

// printable makes a text safe for a terminal, and keeps its lines and tabs.
func printable(text string) string {
	return field().ReplaceAllStringFunc(text, func(s string) string { return safetext.Clean(s, len(s)*maxEscape) })
}

// maxEscape is the largest number of characters that Clean makes of a byte: \x1b.
const maxEscape = 4

// output keeps the output of a part up to maxPart bytes.
type output struct {
	mu   sync.Mutex
	text []byte
	full error
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := min(len(p), maxPart-len(o.text))
	o.text = append(o.text, p[:n]...)
	if n < len(p) {
		o.full = fmt.Errorf("it has more than %d MiB; the rest is left out", maxPart>>20)
	}
	return n, o.full
}

// Command returns a part with the output of a program. Of our environment it gets only PATH: a
// pager or a locale would change its output.
func Command(name string, args ...string) func(context.Context, io.Writer) error {
	return func(ctx context.Context, w io.Writer) error {
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C.UTF-8", "SYSTEMD_COLORS=0", "SYSTEMD_PAGER="}
		cmd.Stdout, cmd.Stderr = w, w
		cmd.WaitDelay = time.Second
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("cannot run %s: %w", safetext.Run(name, args...), err)
		}
		return nil
	}
}
