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
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

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
// one directory. If host, the name of this machine, is not empty, host names, node ids and IP
// addresses are replaced by placeholders.
func Write(ctx context.Context, w io.Writer, dir string, now time.Time, parts []Part, host string) error {
	pool := worker.NewPool()
	names, secrets := newIdentities(host), newRedactor()
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
		names.learn(text)
	}
	repeated := secrets.repeated()
	z := gzip.NewWriter(w)
	t := tar.NewWriter(z)
	for _, e := range entries {
		if !e.plain { // secrets that were recognized in other parts
			e.text = repeated(e.text)
		}
		if host != "" {
			e.text = names.replace(e.text)
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

var field = pattern(`[^\t\n]+`)

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

// identities replaces host names, node ids and IP addresses by placeholders, the same one
// wherever a value is found.
type identities struct {
	names       []string          // host names and node ids
	placeholder map[string]string // by name in lower case, or address
	count       map[string]int    // by kind
}

func newIdentities(host string) *identities {
	x := &identities{placeholder: map[string]string{}, count: map[string]int{}}
	short, _, _ := strings.Cut(host, ".")
	for _, name := range []string{host, short} {
		x.name("host", name)
	}
	return x
}

var (
	nodeName = pattern(`(?i)\b(?:node_?(?:id|name)?|hostname)\\*"?(?:=\\*"?|:[ \t]*\\*")([^\s"'\\,;]+)`)
	ipv4     = pattern(`\b\d{1,3}(?:\.\d{1,3}){3}\b`)
	ipv6     = pattern(`\b[0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f]{0,4}){2,7}`)
)

// learn finds host names and node IDs that a text labels as such.
func (x *identities) learn(s string) {
	for _, m := range nodeName().FindAllStringSubmatch(s, -1) {
		x.name("node", m[1])
	}
}

// minNumber is the shortest number that is replaced wherever it is.
const minNumber = 5

func (x *identities) name(kind, name string) {
	name = strings.ToLower(strings.TrimFunc(name, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) }))
	if x.placeholder[name] != "" || name == "" {
		return
	}
	x.placeholderFor(kind, name)
	if strings.ContainsFunc(name, unicode.IsLetter) || len(name) >= minNumber {
		x.names = append(x.names, name)
	}
}

func (x *identities) placeholderFor(kind, value string) string {
	if x.placeholder[value] == "" {
		x.count[kind]++
		x.placeholder[value] = fmt.Sprintf("%s-%d", kind, x.count[kind])
	}
	return x.placeholder[value]
}

// replace replaces the known names, and all addresses except those that every machine has.
func (x *identities) replace(s string) string {
	if len(x.names) > 0 {
		// The longest first.
		slices.SortFunc(x.names, func(a, b string) int { return len(b) - len(a) })
		var quoted []string
		for _, name := range x.names {
			quoted = append(quoted, regexp.QuoteMeta(name))
		}
		all := regexp.MustCompile(`(?i)\b(?:` + strings.Join(quoted, "|") + `)\b`)
		s = all.ReplaceAllStringFunc(s, func(name string) string { return x.placeholder[strings.ToLower(name)] })
	}
	s = replace(nodeName(), s, func(m []string) string { // short numbers, only after a label
		if placeholder := x.placeholder[m[1]]; placeholder != "" {
			return strings.TrimSuffix(m[0], m[1]) + placeholder
		}
		return m[0]
	})
	ip := func(text string) string {
		addr, err := netip.ParseAddr(text)
		if err != nil || addr.IsLoopback() || addr.IsUnspecified() {
			return text
		}
		return x.placeholderFor("ip", addr.String())
	}
	return ipv6().ReplaceAllStringFunc(ipv4().ReplaceAllStringFunc(s, ip), ip)
}
